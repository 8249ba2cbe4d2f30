"""`metamq worker --processes N`: N processes of one command, one status port, one exit status.

start    The status port, then all processes at the same time. A wrong program or option ends the command.
run      A process that ends with an error is started again after a pause (metamq.broker.workers.decisions), one that
         ends by --max-messages at once. One that ends by --idle-timeout is not. One that refuses its command line
         ends the command.
stop     The first SIGTERM, SIGINT or SIGHUP stops all processes after the messages in progress, a second one at once.
kill -9  The processes notice that their standard input closes, and end (metamq.broker.process.channel).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from metamq.broker.process.http import StatusServer
from metamq.broker.workers.decisions import Reaction
from metamq.broker.workers.pages import WorkerPages
from metamq.broker.workers.worker import Worker
from metamq.cli.worker.child import IDLE_STATUS, PROCESS_VARIABLE, SPENT_STATUS

log = logging.getLogger("metamq.cli")

KIND = "worker"
REACTIONS = {IDLE_STATUS: Reaction.ENDED, SPENT_STATUS: Reaction.AT_ONCE}


class WorkerProcesses:
    """The processes of a command. Its owner calls run()."""

    def __init__(self, count: int) -> None:
        self._ready = asyncio.Event()
        self._asked = 0
        self._ending = asyncio.Event()
        command = [sys.executable, "-P", "-m", "metamq.cli", *sys.argv[1:]]
        self.workers = [
            Worker(
                number, command, {**os.environ, PROCESS_VARIABLE: str(number)}, self._served,
                kind=KIND, reactions=REACTIONS, log=log,
            )
            for number in range(count)
        ]  # fmt: skip

    async def run(self, host: str, port: int, ready: Callable[[int], None]) -> int:
        """Runs until a signal, or the end of all processes. Returns the exit status. `ready` is called with the status
        port once all processes have joined their group. Raises ConfigError, after the end of all."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` ignores SIGHUP
                loop.add_signal_handler(number, self._stop)
        with contextlib.ExitStack() as stack:
            if port >= 0:
                pages = WorkerPages(self.workers, "", guarded=False)
                port = stack.enter_context(contextlib.closing(StatusServer(host, port, pages.respond))).port
            saying = asyncio.ensure_future(self._say(ready, port))
            try:
                await self._run_all()
            finally:
                saying.cancel()
        if self._asked > 1:
            raise KeyboardInterrupt
        return 0 if all(worker.ended_well for worker in self.workers) else 1

    def _stop(self) -> None:
        self._asked += 1
        self._ending.set()
        if self._asked > 1:
            for worker in self.workers:
                worker.kill()

    async def _run_all(self) -> None:
        running = [asyncio.ensure_future(worker.run()) for worker in self.workers]
        all_ended: asyncio.Future[Any] = asyncio.gather(*running)
        ending: asyncio.Future[Any] = asyncio.ensure_future(self._ending.wait())
        try:
            await asyncio.wait([all_ended, ending], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ending.cancel()
            for worker in self.workers:
                worker.stop()
            await asyncio.wait(running)
        await all_ended

    def _served(self) -> None:
        if all(worker.has_served for worker in self.workers):
            self._ready.set()

    async def _say(self, ready: Callable[[int], None], port: int) -> None:
        await self._ready.wait()
        ready(port)


def run_processes(count: int, host: str, port: int, ready: Callable[[int], None]) -> int:
    """Runs so many processes of the present command until a signal, and returns the exit status. Raises as
    WorkerProcesses; KeyboardInterrupt after a second signal."""

    async def work() -> int:
        return await WorkerProcesses(count).run(host, port, ready)

    return asyncio.run(work())
