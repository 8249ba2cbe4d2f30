"""The console of `metamq up`: a process of its own, which ends with the command."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from metamq.cli.show.output import say
from metamq.zk.server.ports import is_free

if TYPE_CHECKING:
    from metamq.cli.processes import StopSignals

HOST = "127.0.0.1"
PORT = 8180
PORTS_TRIED = 20
START_S = 20.0
STOP_S = 5.0
POLL_S = 0.05
PACKAGES = ("starlette", "uvicorn", "jinja2")


def choose_port(wanted: int | None) -> int:
    """Returns the console's port: the wanted one, else the first free one from PORT on; -1: none, or no packages."""
    if wanted == -1 or not all(map(importlib.util.find_spec, PACKAGES)):
        if wanted is not None and wanted >= 0:
            say("There is no console: it needs `pip install 'metamq[console]'`.")
        return -1
    if wanted is not None:
        return wanted
    return free_port(HOST)


def free_port(host: str) -> int:
    """Returns the first free port from PORT on; 0, which is any free one, after PORTS_TRIED that are taken."""
    return next((port for port in range(PORT, PORT + PORTS_TRIED) if is_free(host, port)), 0)


def url_of(port: int) -> str:
    """Returns the console's address; empty if it is not known before the start."""
    return f"http://{HOST}:{port}/" if port > 0 else ""


@contextlib.contextmanager
def console_of(zookeeper: str, port: int, log_path: Path, signals: StopSignals) -> Iterator[str | None]:
    """Runs the console for a `with` block. Yields its address; None without one, as for port -1.

    In a secure cluster its visitors log in: other users of this machine have no rights. A console that does not start
    is reported, and no error.
    """
    if port == -1:
        yield None
        return
    command = ["console", "--port", str(port), "-o", "json", "--with-parent", "--zookeeper", zookeeper]
    if os.environ.get("METAMQ_SECURITY_DIR"):
        command.append("--login")
    with (
        log_path.open("ab") as log,
        subprocess.Popen(
            [sys.executable, "-P", "-m", "metamq.cli", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # Ctrl-C in the terminal is for the command, which ends this process
        ) as process,
    ):
        try:
            yield _address(process, log_path, signals)
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _address(process: subprocess.Popen[bytes], log_path: Path, signals: StopSignals) -> str | None:
    assert process.stdout is not None
    answer = select.poll()
    answer.register(process.stdout, select.POLLIN)
    deadline = time.monotonic() + START_S
    while not answer.poll(POLL_S * 1000):
        if signals.asked:
            return None
        if time.monotonic() > deadline:
            break
    line = process.stdout.readline() if answer.poll(0) else b""
    if not line:
        say(f"There is no console: it did not start. Its log is {log_path}.")
        return None
    address: str = json.loads(line)["console"]
    return address
