"""A worker of the supervisor: one broker id, and its processes one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from metamq.broker.process.channel import ParentEnd
from metamq.broker.process.pages import BAD, GOOD, SETTLED, Page
from metamq.broker.workers.decisions import Reaction, after_end, ends_in_series, pause_s
from metamq.errors import ConfigError
from metamq.zk.server.embedded import how_it_ended

log = logging.getLogger("metamq.broker")

ASK_S = 5.0
LAST_LINE_S = 1.0
"""Seconds for the line of a process that has ended. It comes at once, or never: then a fork of it holds the pipe."""
USAGE_STATUS = 2
"""The exit status of a process that refuses its command line: it has printed the reason."""
READY, REFUSED = "ready", "refused"
"""The keys of the line of JSON that a worker's process prints: it serves, or its configuration is wrong."""


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A worker as the status pages show it. A new object for each change, so any thread may read it."""

    broker_id: int
    phase: str = "starting"
    pid: int | None = None
    address: str = ""
    starts: int = 0
    last_end: str = ""
    kind: str = "broker"

    @property
    def title(self) -> str:
        """The kind and the number, as "broker 0"."""
        return f"{self.kind} {self.broker_id}"


class _Ended(NamedTuple):
    """The end of a process."""

    status: int
    served_s: float
    """0 if it never served."""
    refusal: ConfigError | None

    @property
    def is_good(self) -> bool:
        """True if it ended as asked. SIGTERM itself ends a process that is still importing its modules."""
        return self.status in (0, -signal.SIGTERM)


class _Report(asyncio.Protocol):
    """The standard output of a process: its first line is its report, the rest is dropped. It is no pipe of asyncio,
    which would wait for the end of the output, too: what the process has forked may hold it open."""

    def __init__(self) -> None:
        self._ours, self.for_child = os.pipe()
        self._line: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._data = b""
        self._transport: asyncio.BaseTransport | None = None

    async def read(self, process: Process) -> dict[str, Any]:
        """Returns the report of a process that has `for_child`; empty if it ended without one."""
        os.close(self.for_child)
        self.for_child = -1
        pipe = os.fdopen(self._ours, "rb", buffering=0)
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: self, pipe)
        end: asyncio.Future[Any] = asyncio.ensure_future(process.wait())
        await asyncio.wait([self._line, end], return_when=asyncio.FIRST_COMPLETED)
        end.cancel()
        await asyncio.wait([self._line], timeout=LAST_LINE_S)
        return dict(json.loads(self._line.result())) if self._line.done() and self._line.result() else {}

    def data_received(self, data: bytes) -> None:
        """Takes output of the process."""
        if not self._line.done():
            self._data += data
            if b"\n" in self._data:
                self._line.set_result(self._data.partition(b"\n")[0])

    def connection_lost(self, _error: Exception | None) -> None:
        """Notes the end of the output."""
        if not self._line.done():
            self._line.set_result(b"")

    def close(self) -> None:
        """Closes the pipe."""
        if self._transport is not None:
            self._transport.close()
        else:
            os.close(self._ours)
        if self.for_child >= 0:
            os.close(self.for_child)


class Worker:
    """One broker id, or one number of another kind. All methods except for ask() are for the supervisor's loop."""

    def __init__(
        self,
        broker_id: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        served: Callable[[], None],
        *,
        kind: str = "broker",
        reactions: Mapping[int, Reaction] | None = None,
        log: logging.Logger = log,
    ) -> None:
        """`served` is called whenever a process begins to serve. `reactions`: those to exit statuses of a process that
        was not asked to end; they are no failures. `log`: for the ends of processes."""
        self.state = WorkerState(broker_id, kind=kind)
        self._reactions = reactions or {}
        self._log = log
        self.name = ""
        """The replica and its role when it began to serve."""
        self.host, self.port = "", 0
        self.has_served = False
        self.serves = asyncio.Event()
        """Set while a process serves. restart() clears it until the next process does."""
        self.ended_well = True
        """False if the last process failed while the command stopped."""
        self._command = command
        self._environment = environment
        self._served = served
        self._channel: ParentEnd | None = None
        self._process: Process | None = None
        self._is_terminated = False
        self._stopping = self._restarting = False
        self._woken = asyncio.Event()

    async def run(self) -> None:
        """Runs processes until stop(). Raises the ConfigError of a worker that has never served."""
        ends, step = 0, Reaction.AT_ONCE
        while step is not Reaction.ENDED:
            ended = await self._run_process()
            refused = ended.refusal is not None
            step = after_end(
                stopping=self._stopping, restarting=self._restarting, refused=refused, has_served=self.has_served
            )
            if step is Reaction.LATER:
                step = self._reactions.get(ended.status, step)
            self._restarting = False
            if ended.refusal is not None and step is Reaction.FAIL:
                raise ended.refusal
            if step is Reaction.LATER:
                ends = ends_in_series(ends, ended.served_s)
                step = await self._pause(pause_s(ends), str(ended.refusal or how_it_ended(ended.status)))
        self._changed(phase="ended", pid=None)

    async def _pause(self, seconds: float, reason: str) -> Reaction:
        """Waits before the next start; stop() and restart() end the wait."""
        self._log.error(
            "%s %s: it starts again in %g s", self.state.title, reason, seconds,
            extra={self.state.kind: self.state.broker_id},
        )  # fmt: skip
        self._changed(phase=f"starts again {seconds:g} s after its end")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        self._restarting = False
        return Reaction.ENDED if self._stopping else Reaction.AT_ONCE

    async def _run_process(self) -> _Ended:
        if self._stopping:
            return _Ended(0, 0.0, None)
        self._woken.clear()
        self._is_terminated = False
        try:
            return await self._started()
        except OSError as error:  # memory, processes or descriptors are used up
            self._log.error("%s cannot be started: %s", self.state.title, error)
            return _Ended(1, 0.0, None)
        finally:
            self._process = None

    async def _started(self) -> _Ended:
        with contextlib.closing(ParentEnd()) as channel, contextlib.closing(_Report()) as report:
            process = self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=channel.for_child.fileno(), stdout=report.for_child, env=dict(self._environment),
                # Ctrl-C goes to the whole foreground group: the supervisor decides when its workers end.
                start_new_session=True,
            )  # fmt: skip
            channel.for_child.close()
            self._channel = channel
            self._changed(phase="starting", pid=process.pid, starts=self.state.starts + 1)
            if self._stopping:
                self._terminate()
            try:
                return await self._followed(process, report)
            finally:
                self._channel = None

    async def _followed(self, process: Process, report: _Report) -> _Ended:
        """Follows a process from its start to its end."""
        told = await report.read(process)
        began, refusal = time.monotonic(), None
        if READY in told:
            self._note_ready(told[READY])
        elif REFUSED in told:
            problem, hint = told[REFUSED]
            refusal = ConfigError(f"{self.state.title}: {problem}", hint=hint)
        status = await process.wait()
        if not told and status == USAGE_STATUS:
            refusal = ConfigError(f"{self.state.title} refused its command line", hint="See the lines above.")
        self.serves.clear()
        served_s = time.monotonic() - began if READY in told else 0.0
        ended = _Ended(status, served_s, refusal)
        self.ended_well = ended.is_good or status in self._reactions
        self._changed(phase="starting", pid=None, last_end=str(refusal or how_it_ended(status)))
        return ended

    def _note_ready(self, told: dict[str, str]) -> None:
        self.name, self.host, self.port = told["name"], told["host"], int(told["port"])
        self.has_served = True
        self.serves.set()
        self._changed(phase="serving", address=f"{self.host}:{self.port}")
        self._served()

    def _changed(self, **fields: Any) -> None:
        self.state = replace(self.state, **fields)

    def stop(self) -> None:
        """Asks the process to end, and starts no other one."""
        self._stopping = True
        self._end("stopping")

    def kill(self) -> None:
        """Ends the process by SIGKILL."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def restart(self) -> None:
        """Asks the process to end, and starts the next one at once."""
        self._restarting = True
        self.serves.clear()
        self._end("restarting")

    def _end(self, phase: str) -> None:
        self._woken.set()
        if self._process is not None:
            self._changed(phase=phase)
            self._terminate()

    def _terminate(self) -> None:
        """Sends SIGTERM, once: a second one could come after the process has removed its handler."""
        if not self._is_terminated and self._process is not None:
            self._is_terminated = True
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def ask(self, path: str, principal: str = "", address: str = "") -> Page | None:
        """Returns a page of the process; None if it does not answer. Any thread."""
        channel = self._channel
        if channel is None:
            return None
        try:
            return channel.ask(path, principal, address, ASK_S)
        except (OSError, ValueError):  # it is ending, frozen, or has ended
            return None

    def unsettled(self) -> str:
        """Returns the reason why the next worker must not be restarted yet; empty: there is none. Any thread."""
        page = self.ask(SETTLED)
        if page is None:
            page = Page.text(BAD, "it does not answer")
        return "" if page.status == GOOD else page.body.decode(errors="replace").strip()
