"""What a module of tests leaves behind fails that module, not a later test that meets it.

Looked at once the fixtures of the module are gone: unclosed sockets, clients, event loops and processes that nobody
refers to any more warn as they are collected, and warnings are errors; threads and child processes that still run are
compared with those before. What a fixture of the whole session makes is its own until the end of the run.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Generator, Iterator
from typing import Any

import psutil
import pytest

from tests import zygote

LIMIT_S = 60.0
"""So long threads and processes that are ending may take, on a slow machine."""
POOLS = ("asyncio_", "uvloop_", "metamq", "ThreadPoolExecutor-")
"""Names of threads that stay for later use: of the background loop, of asyncio.to_thread(), of pools."""

_of_the_session: set[threading.Thread | int] = set()
_servers_of_the_session: set[str] = set()
"""Their commands: some may be started anew by tests."""


def alive() -> set[threading.Thread | int]:
    """Threads, but for those of pools, and the ids of child processes."""
    threads = {one for one in threading.enumerate() if not one.name.startswith(POOLS) and not _is_of_spark(one)}
    children = psutil.Process().children()
    forked = [one for child in children if child.pid in zygote.commands for one in child.children()]
    return {*threads, *(child.pid for child in (*children, *forked) if zygote.commands.get(child.pid) != zygote.NAME)}


def _is_of_spark(thread: threading.Thread) -> bool:
    """Whether it serves the JVM's calls, as of foreachBatch: py4j keeps such threads while the session lives."""
    target = getattr(thread, "_target", None)
    return (getattr(target, "__module__", None) or "").startswith("py4j.")


@contextlib.contextmanager
def of_the_session() -> Iterator[None]:
    """What is made in the block stays until the end of the run."""
    before = alive()
    try:
        yield
    finally:
        made = alive() - before
        _of_the_session.update(made)
        _servers_of_the_session.update(filter(None, map(_command, made)))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
    """What a fixture of the whole session makes is left to it."""
    with of_the_session() if fixturedef.scope == "session" else contextlib.nullcontext():
        return (yield)


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Looks when the other fixtures of the module are gone.

    Not at tests that run Spark: a Python process that plans, reads or writes for it keeps its session for its life.
    """
    before = alive()
    yield
    items = (item for item in request.session.items if item.path == request.path)
    if not any(item.get_closest_marker("spark") for item in items):
        check(before)


def check(before: set[threading.Thread | int]) -> None:
    """Fails where anything is left that was not there before."""
    gc.collect()
    waited, deadline = False, time.monotonic() + LIMIT_S
    while left := {one for one in alive() - before - _of_the_session if _command(one) not in _servers_of_the_session}:
        if time.monotonic() > deadline:
            raise AssertionError(f"this module's tests have left behind: {', '.join(map(_name, left))}")
        waited = True
        time.sleep(0.01)
    if waited:
        gc.collect()


def _name(one: threading.Thread | int) -> str:
    if isinstance(one, threading.Thread):
        return f"thread {one.name} ({getattr(one, '_target', None)})"
    return f"process {one}: {_command(one)}"


def _command(one: threading.Thread | int) -> str:
    """Of a process; "" of a thread, and of a process that has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if not isinstance(one, threading.Thread):
            return zygote.commands.get(one) or " ".join(psutil.Process(one).cmdline())
    return ""
