"""The questions of the console: each page asks the cluster when it is opened.

Each question has a time-out, so a broker that does not answer delays no page for long, and no other page at all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from metamq.cli.show.top_view import ClusterLoad, Sample, figures
from metamq.errors import MetamqError

if TYPE_CHECKING:
    from metamq.cli.show.replica_view import Finding
    from metamq.client.admin.admin_model import BrokerStatistics, GroupDescription
    from metamq.client.admin.aio_admin import Admin

ANSWER_S = 3.0
READ_S = 10.0
"""The limit of a page that reads messages: each of its steps has its own."""
SAMPLE_S = 1.0
"""The least time between two samples, or two visits of the doctor: a page that is opened sooner shows the last one."""
Answer = TypeVar("Answer")
Doctor: TypeAlias = "Callable[[Callable[[Finding], None]], bool]"
"""Reports each finding by a call, as metamq.cli.commands.doctor.look."""


@dataclass(frozen=True, slots=True)
class Examination:
    """The doctor's findings; `is_done` is False while the doctor still looks, `problem` is the reason of its end."""

    findings: Sequence[Finding]
    is_done: bool
    problem: str = ""


async def within_time(question: Awaitable[Answer], limit_s: float = ANSWER_S) -> Answer:
    """Returns the answer. Raises MetamqError: the cluster's own errors, and after the limit."""
    try:
        async with asyncio.timeout(limit_s):
            return await question
    except TimeoutError as error:
        hint = "The health page has the next step."
        raise MetamqError(f"a part of the cluster does not answer within {limit_s:g} s", hint=hint) from error


async def answer_or_problem(question: Awaitable[Answer]) -> Answer | MetamqError:
    """As within_time; returns the error."""
    try:
        return await within_time(question)
    except MetamqError as error:
        return error


class ConsoleView:
    """Asks one cluster, for all visitors. Belongs to one event loop."""

    def __init__(self, admin: Admin, client: dict[str, Any], doctor: Doctor) -> None:
        self.admin = admin
        self.client = client
        """The arguments of clients of this cluster."""
        self._doctor = doctor
        self._samples: dict[bool, list[Sample]] = {True: [], False: []}
        """The last samples, with the groups and without."""
        self._pool = ThreadPoolExecutor(1, "metamq-console-doctor")
        self._visit: asyncio.Future[bool] | None = None
        self._visit_ended_s = 0.0
        self._findings: list[Finding] = []

    def close(self) -> None:
        """Ends the doctor's next visits; the present one ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def load(self, *, with_groups: bool) -> ClusterLoad:
        """Returns the figures of `metamq top`, with rates since the last visit. Raises MetamqError.

        A group of a thousand partitions takes two thousand reads: pages that do not show groups leave them out.
        """
        samples = self._samples[with_groups]
        if not samples or time.monotonic() - samples[-1].at_s >= SAMPLE_S:
            self._samples[with_groups] = samples = [*samples[-1:], await self._sample(with_groups)]
        return figures(samples[0], samples[-1])

    async def _sample(self, with_groups: bool) -> Sample:
        admin = self.admin
        brokers, topics = await asyncio.gather(within_time(admin.brokers()), within_time(admin.topics()))
        groups = await within_time(admin.groups()) if with_groups else []
        live = [broker_id for broker_id, one in brokers.items() if one.live]
        asked, described = await asyncio.gather(
            asyncio.gather(*(answer_or_problem(admin.statistics(one)) for one in live)),
            asyncio.gather(*(answer_or_problem(admin.describe_group(name)) for name in groups)),
        )
        statistics: dict[int, BrokerStatistics] = {}
        problems: dict[int, str] = {}
        for broker_id, answer in zip(live, asked, strict=True):
            if isinstance(answer, MetamqError):
                problems[broker_id] = answer.problem
            else:
                statistics[broker_id] = answer
        loads: dict[str, GroupDescription | None] = {
            name: None if isinstance(one, MetamqError) else one for name, one in zip(groups, described, strict=True)
        }
        return Sample(time.monotonic(), brokers, topics, statistics, loads, problems)

    async def examine(self) -> Examination:
        """Returns the doctor's findings: of the visit that has not ended, or has just ended, or of a new one."""
        if self._visit is None or (self._visit.done() and time.monotonic() - self._visit_ended_s > SAMPLE_S):
            self._findings = []
            loop = asyncio.get_running_loop()
            self._visit = loop.run_in_executor(self._pool, self._doctor, self._findings.append)
            self._visit.add_done_callback(self._note_end)
        visit, findings = self._visit, self._findings
        await asyncio.wait([visit], timeout=ANSWER_S)
        if not visit.done():
            return Examination(list(findings), False)
        error = visit.exception()
        return Examination(list(findings), True, "" if error is None else str(error))

    def _note_end(self, _visit: asyncio.Future[bool]) -> None:
        self._visit_ended_s = time.monotonic()
