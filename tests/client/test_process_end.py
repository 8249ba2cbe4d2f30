"""The background loop and the end of its process; a daemon thread that calls it all the time is in nobody's way."""

from __future__ import annotations

import subprocess
import sys

from tests.one_zookeeper import cluster

EARLY = '''
import asyncio, atexit, sys, threading

def registered_first():
    """Runs last. A loop whose thread was here still would crash the process, when a timer came once Python is gone."""
    print("metamq" in [thread.name for thread in threading.enumerate()])
    with metamq.Admin(sys.argv[1]) as admin:
        print(list(admin.topics()))

atexit.register(registered_first)
import metamq
from metamq.client.background import background

def consume():
    while True:
        background().run(asyncio.sleep(0))

threading.Thread(target=consume, daemon=True).start()
with metamq.Admin(sys.argv[1]) as admin:
    admin.create_topic("t")
'''


def test_no_loop_runs_when_all_handlers_have_run_and_what_is_called_late_still_works() -> None:
    with cluster() as running:
        command = [sys.executable, "-c", EARLY, running.zookeeper]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert done.stdout.splitlines() == ["False", "['t']"], done.stderr
        assert (done.returncode, done.stderr) == (0, "")
