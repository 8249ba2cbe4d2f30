"""The background loop and the end of its process."""

from __future__ import annotations

import contextlib
import subprocess
import sys

from metamq.testing import Cluster, cluster

EARLY = """
import atexit, sys, threading

def registered_first():
    print([thread.name for thread in threading.enumerate()])
    with metamq.Admin(sys.argv[1]) as admin:
        print(list(admin.topics()))

atexit.register(registered_first)
import metamq
with metamq.Admin(sys.argv[1]) as admin:
    admin.create_topic("t")
"""

WINDOW = """
import asyncio, ctypes
from metamq.client.background import background

libc = ctypes.CDLL(None)
libc.__cxa_atexit.argtypes = [ctypes.c_void_p] * 3
assert libc.__cxa_atexit(ctypes.cast(libc.getchar, ctypes.c_void_p), None, None) == 0

async def begin():
    asyncio.get_running_loop().create_task(tick())

async def tick():
    while True:
        await asyncio.sleep(0.3)  # seldom while Python is taken down: that would end the thread

background().run(begin())
print("up", flush=True)
"""
"""Once Python is taken down the process waits for its input, and has not ended yet."""


def test_no_loop_runs_when_all_handlers_have_run_and_what_is_called_late_still_works() -> None:
    with cluster() as running:
        done = _run(EARLY, running)
        assert done.stdout.splitlines() == ["['MainThread']", "['t']"], done.stderr
        assert (done.returncode, done.stderr) == (0, "")


def test_nothing_calls_into_python_once_it_is_taken_down() -> None:
    """It crashed where a timer, or what a broker sent, came between the interpreter's end and the process's."""
    command = [sys.executable, "-c", WINDOW]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        with contextlib.suppress(subprocess.TimeoutExpired):  # it ticks a while, or crashes
            process.wait(1)
        process.stdin.close()
        assert process.wait(60) == 0


def _run(code: str, running: Cluster) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, running.zookeeper], capture_output=True, text=True, timeout=100, check=False
    )
