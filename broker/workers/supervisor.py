"""The supervisor of `metamq broker --processes N`: N workers, one configuration, one status port, one exit status.

start    the status port, then all workers at the same time. A wrong configuration of a worker ends the command.
run      A worker that ends is started again, see metamq.broker.workers.decisions. The supervisor serves no clients:
         these connect to the workers, whose addresses are in ZooKeeper.
SIGUSR1  a rolling restart: the workers one after the other, each when all of them are ready and in sync.
stop     SIGTERM, SIGINT and SIGHUP stop all workers at the same time, each as a broker by itself. There is no time-out:
         the program that stops the command has one.
kill -9  The workers notice that the supervisor's end of their standard input closes, and end
         (metamq.broker.process.channel).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from metamq.broker.process.http import StatusServer
from metamq.broker.process.pages import port_tls
from metamq.broker.workers.division import divided, ids_of, too_many
from metamq.broker.workers.pages import WorkerPages
from metamq.broker.workers.places import find_places
from metamq.broker.workers.worker import Worker
from metamq.client.settings import (
    CONFIG_FILE_VARIABLE,
    CONTEXT_VARIABLE,
    ROOT_VARIABLE,
    ZOOKEEPER_VARIABLE,
    ClusterAccess,
    variable,
)
from metamq.private_files import restrict_process
from metamq.security.tls import broker_security

if TYPE_CHECKING:
    from metamq.broker.config import BrokerConfig

log = logging.getLogger("metamq.broker")

POLL_S = 0.2
TELL_S = 30.0
"""Seconds between two log lines of a rolling restart that waits."""


class Supervisor:
    """The workers of a command. Its owner calls run()."""

    def __init__(self, config: BrokerConfig, access: ClusterAccess, command: Sequence[str]) -> None:
        """`command` starts a worker, whose settings are in its environment. Raises ConfigError."""
        self._config = config
        self._access = access
        self._serving = asyncio.Event()
        self._ending = asyncio.Event()
        self._roll_asked = asyncio.Event()
        ids = ids_of(config)
        if (warning := too_many(config.processes, _cores())) is not None:
            log.warning("%s", warning)
        configs = divided(config, find_places(Path(config.data).absolute(), ids))
        self.workers = [Worker(one.id, command, _environment(one, access), self._served) for one in configs]
        self.http_port = -1

    async def run(self, ready: Callable[[Supervisor], None]) -> int:
        """Runs until a signal. Returns the exit status. `ready` is called once all workers have served.

        Raises ConfigError, after the end of all workers; TooManyThreads.
        """
        self._follow_signals()
        status = self._status_server()
        jobs = [asyncio.ensure_future(self._told(ready)), asyncio.ensure_future(self._rolls())]
        try:
            await self._run_workers()
        finally:
            for job in jobs:
                job.cancel()
            if status is not None:
                await asyncio.to_thread(status.close)
        return 0 if all(worker.ended_well for worker in self.workers) else 1

    def _follow_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` sets SIG_IGN
                loop.add_signal_handler(number, self._ending.set)
        loop.add_signal_handler(signal.SIGUSR1, self._roll_asked.set)

    def _status_server(self) -> StatusServer | None:
        if self._config.http_port < 0:
            return None
        tls = port_tls(self._config, broker_security(self._access.security))
        pages = WorkerPages(self.workers, self._config.console_url, guarded=tls is not None)
        server = StatusServer(self._config.http_host or self._config.host, self._config.http_port, pages.respond, tls)
        self.http_port = server.port
        return server

    async def _run_workers(self) -> None:
        """Runs all workers until end of the command. Raises the first ConfigError of one."""
        running = [asyncio.ensure_future(worker.run()) for worker in self.workers]
        ending = asyncio.ensure_future(self._ending.wait())
        try:
            await asyncio.wait([*running, ending], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ending.cancel()
            for worker in self.workers:
                worker.stop()
            await asyncio.wait(running)
        for one in running:
            one.result()

    def _served(self) -> None:
        if all(worker.has_served for worker in self.workers):
            self._serving.set()

    async def _told(self, ready: Callable[[Supervisor], None]) -> None:
        await self._serving.wait()
        ready(self)

    async def _rolls(self) -> None:
        """Carries out rolling restarts. A signal during one asks for another one after it."""
        while True:
            await self._roll_asked.wait()
            self._roll_asked.clear()
            log.info("a rolling restart of %d brokers begins", len(self.workers))
            for worker in self.workers:
                await self._settled()
                worker.restart()
                await worker.serves.wait()
            await self._settled()
            log.info("the rolling restart is done")

    async def _settled(self) -> None:
        """Waits until all workers are ready and in sync. It has no time-out: to go on would take a second one away."""
        waits = 0
        while True:
            reasons = await asyncio.gather(*(asyncio.to_thread(worker.unsettled) for worker in self.workers))
            late = [
                f"broker {worker.state.broker_id}: {reason}"
                for worker, reason in zip(self.workers, reasons, strict=True)
                if reason
            ]
            if not late:
                return
            if waits % round(TELL_S / POLL_S) == 0:
                log.info("the rolling restart waits: %s", "; ".join(late))
            waits += 1
            await asyncio.sleep(POLL_S)


def run_workers(
    config: BrokerConfig, access: ClusterAccess, command: Sequence[str], *, ready: Callable[[Supervisor], None]
) -> int:
    """Runs the supervisor until SIGTERM, SIGINT or SIGHUP, and returns the exit status. Raises as Supervisor."""
    restrict_process()

    async def work() -> int:
        return await Supervisor(config, access, command).run(ready)

    return asyncio.run(work())


def _environment(config: BrokerConfig, access: ClusterAccess) -> Mapping[str, str]:
    """Returns the environment of a worker: all settings are variables, so that no other source counts."""
    ours = ("METAMQ_BROKER_", "METAMQ_SECURITY_", CONFIG_FILE_VARIABLE, CONTEXT_VARIABLE)
    others = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    settings = {variable("broker", name): str(value) for name, value in asdict(config).items()}
    settings |= {variable("security", name): str(value) for name, value in asdict(access.security).items()}
    return {**others, **settings, ZOOKEEPER_VARIABLE: access.zookeeper, ROOT_VARIABLE: access.root}


def _cores() -> int:
    """Returns the number of cores that this process may use."""
    with contextlib.suppress(AttributeError):  # not on this system
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
