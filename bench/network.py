"""Machines of a benchmark: network namespaces on one bridge, so that a machine can be cut off from all others.

Needs root and the command `ip`. Elsewhere every machine is this one, and cannot be cut off. The names are fixed, so one
benchmark runs at a time. A benchmark that was killed leaves its namespaces and links, which the next one removes.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

CLONE_NEWNET = 0x40000000
NAMESPACES = Path("/run/netns")
_libc = ctypes.CDLL(None, use_errno=True)


def can_cut() -> bool:
    """Returns True if this process may make network namespaces."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise OSError(f"`ip {' '.join(words)}` failed: {done.stderr.strip()}")


def _add_namespace(name: str, stack: ExitStack) -> None:
    if (NAMESPACES / name).exists():
        _ip("netns", "del", name)
    _ip("netns", "add", name)
    stack.callback(_ip, "netns", "del", name)
    _ip("-n", name, "link", "set", "lo", "up")


def _enter(namespace: int) -> None:
    """Moves the calling thread into a namespace, which is an open file."""
    if _libc.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns failed")


class Machine:
    """This machine: processes that start inside() listen on `address`."""

    address = "127.0.0.1"

    def inside(self) -> Any:
        """Returns a context manager: sockets and processes of the calling thread belong to this machine."""
        return nullcontext()

    def cut(self) -> None:
        """Cuts the machine off from all others, in both directions, until mend(). Raises OSError unless can_cut()."""
        raise OSError("this machine cannot be cut off: that needs root and the command ip")

    def mend(self) -> None:
        """Connects the machine again."""


class _Namespace(Machine):
    def __init__(self, name: str, hub: str, address: str, stack: ExitStack) -> None:
        self.address = address
        self._link, self._hub = name, hub
        self._path = NAMESPACES / name
        _add_namespace(name, stack)
        _ip("-n", hub, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("-n", hub, "link", "set", name, "master", "bridge", "up")
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")

    @contextmanager
    def inside(self) -> Iterator[None]:
        with self._path.open() as other, Path("/proc/thread-self/ns/net").open() as own:
            _enter(other.fileno())
            try:
                yield
            finally:
                _enter(own.fileno())

    def cut(self) -> None:
        _ip("-n", self._hub, "link", "set", self._link, "nomaster")

    def mend(self) -> None:
        _ip("-n", self._hub, "link", "set", self._link, "master", "bridge")


class Network:
    """Makes machines. `address` is this machine's, as the others reach it."""

    def __init__(self, stack: ExitStack, subnet: int) -> None:
        self.address = "127.0.0.1"
        self._stack = stack
        self._prefix = f"10.213.{subnet}"
        self._hub = f"metamq{subnet}"
        self._made = 0
        if can_cut():
            self.address = f"{self._prefix}.1"
            if Path(f"/sys/class/net/{self._hub}").exists():
                _ip("link", "del", self._hub)
            # The bridge is in a namespace of its own: the rules of this machine's firewall do not apply there.
            _add_namespace(self._hub, stack)
            _ip("-n", self._hub, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self._hub, "link", "set", "bridge", "up")
            _ip("link", "add", self._hub, "type", "veth", "peer", "name", "host", "netns", self._hub)
            _ip("-n", self._hub, "link", "set", "host", "master", "bridge", "up")
            _ip("address", "add", f"{self.address}/24", "dev", self._hub)
            _ip("link", "set", self._hub, "up")

    def machine(self) -> Machine:
        """Returns a new machine."""
        if not can_cut():
            return Machine()
        self._made += 1
        name = f"{self._hub}-{self._made}"
        return _Namespace(name, self._hub, f"{self._prefix}.{self._made + 1}", self._stack)
