"""A view of the cluster for readers of ranges: offsets, topics and replicas. Blocking, over the process's background
loop.

If a broker cannot be reached, the answers for its partitions are errors. Without ZooKeeper the view uses its last
answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from metamq.client.admin.admin_brokers import Found, ask_offsets, ask_slaves
from metamq.client.background import background
from metamq.client.net.cluster import ClusterClient
from metamq.client.net.first_contact import open_client_session
from metamq.client.scan.replicas import ReplicaAddress, replicas_of
from metamq.errors import OffsetOutOfRange, TopicNotFound
from metamq.wire.commands import OffsetsResult
from metamq.zk.names import parse_partition
from metamq.zk.partitions import TopicPartition

if TYPE_CHECKING:
    from metamq.client.settings import ClusterAccess
    from metamq.zk.cluster.topics import TopicConfig

T = TypeVar("T")

SESSION_TIMEOUT_MS = 10_000
ASK_AGAIN_S = 0.2
SLAVES_AFTER_S = 3.0
"""Seconds after which slaves are asked. A restarted master is registered again by then."""

Topics = dict[TopicPartition, str]
"""The partitions that are read, with their topics' ids."""
SlaveCheck = Callable[[TopicPartition, OffsetsResult], bool]
"""Returns True if a slave's answer for a partition is enough."""

log = logging.getLogger("metamq.client")


class ClusterView:
    """An open view. Raises ConnectError, ConfigError if it cannot be opened."""

    def __init__(self, access: ClusterAccess) -> None:
        self._loop = background()
        self._cluster = self._run(self._open(access))

    async def _open(self, access: ClusterAccess) -> ClusterClient:
        return ClusterClient(await open_client_session(access, SESSION_TIMEOUT_MS), with_slaves=True)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._loop.run(coroutine)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Disconnects."""
        self._run(self._close())

    async def _close(self) -> None:
        await self._cluster.close()
        await self._cluster.session.close()

    def topic(self, name: str) -> TopicConfig:
        """Returns a topic's configuration. Raises TopicNotFound, ConnectError."""
        return self._run(self._cluster.topic(name))

    def offsets(
        self,
        questions: Mapping[TopicPartition, tuple[str, int]],
        read_to: Mapping[TopicPartition, tuple[int, int]] | None = None,
    ) -> dict[TopicPartition, Found]:
        """Returns the masters' answers for partition -> (topic id, a time in microseconds or EARLIEST, LATEST), or
        errors.

        `read_to`: (offset up to which a partition was read, epoch of the message before). Default: the log's start.
        """
        return self._run(
            ask_offsets(self._cluster, questions, {**dict.fromkeys(questions, (0, -1)), **(read_to or {})})
        )

    def offsets_of_slaves(
        self, questions: Mapping[TopicPartition, tuple[str, int]]
    ) -> dict[TopicPartition, OffsetsResult]:
        """Returns slaves' answers for partitions whose broker has no master now, if there are slaves that answer."""
        return self._run(ask_slaves(self._cluster, questions))

    def replicas(
        self, partitions: Collection[TopicPartition], *, with_slaves: bool
    ) -> dict[TopicPartition, tuple[ReplicaAddress, ...]]:
        """Returns the replicas at which each partition can be read, as known last."""
        return self._run(self._replicas(partitions, with_slaves))

    async def _replicas(
        self, partitions: Collection[TopicPartition], with_slaves: bool
    ) -> dict[TopicPartition, tuple[ReplicaAddress, ...]]:
        masters = await self._cluster.refresh_brokers()
        if with_slaves:
            await asyncio.gather(*map(self._cluster.know_slaves, {tp.topic for tp in partitions}))
        found = {}
        for tp in partitions:
            broker_id, _index = parse_partition(tp.partition)
            slaves = []
            if with_slaves:
                known = self._cluster.slaves.get(broker_id, {})
                slaves = [known[number] for number in self._cluster.slaves_with(broker_id, tp.topic)]
            found[tp] = replicas_of(masters.get(broker_id), slaves)
        return found


def ask_until_answered(
    view: ClusterView,
    questions: Mapping[TopicPartition, tuple[str, int]],
    timeout_s: float,
    slave_check: SlaveCheck | None = None,
) -> dict[TopicPartition, OffsetsResult]:
    """Returns the answers to these questions. Raises the error of a broker that does not answer in time.

    `slave_check`: checks a slave's answer if there is no master; None: only masters are asked.
    """
    answers: dict[TopicPartition, OffsetsResult] = {}
    for tp, found in ask_until_settled(view, questions, timeout_s, slave_check=slave_check).items():
        if not isinstance(found, OffsetsResult):
            raise found
        answers[tp] = found
    return answers


def ask_until_settled(
    view: ClusterView,
    questions: Mapping[TopicPartition, tuple[str, int]],
    timeout_s: float,
    read_to: Mapping[TopicPartition, tuple[int, int]] | None = None,
    slave_check: SlaveCheck | None = None,
) -> dict[TopicPartition, Found]:
    """Retries while errors are transient. Raises an error that lasts too long.

    It is also transient if a broker does not know a topic that ZooKeeper has: the topic or the broker is new.
    """
    deadline = time.monotonic() + timeout_s
    slaves_from = time.monotonic() + min(SLAVES_AFTER_S, timeout_s / 2)
    settled: dict[TopicPartition, Found] = {}
    left = dict(questions)
    while left:
        for tp, found in view.offsets(left, read_to).items():
            if isinstance(found, OffsetsResult) or not (found.retriable or isinstance(found, TopicNotFound)):
                settled[tp] = found
                del left[tp]
            elif time.monotonic() > deadline:
                raise found
            else:
                log.info("requesting the start and end of %s again: %s", tp, found)
        if left and slave_check is not None and time.monotonic() > slaves_from:
            for tp, answer in view.offsets_of_slaves(left).items():
                if slave_check(tp, answer):
                    log.warning("%s is read up to a slave's end: its broker has no master, which may have more", tp)
                    settled[tp] = answer
                    del left[tp]
        if left:
            time.sleep(ASK_AGAIN_S)
    return settled


def offset_inside(tp: TopicPartition, wanted: int, answer: OffsetsResult, hint: str | None) -> int:
    """Returns the offset if the log has it. Otherwise raises OffsetOutOfRange with the hint, or returns the nearest
    offset if `hint` is None."""
    inside = min(max(wanted, answer.start_offset), answer.stable_offset)
    if inside != wanted and hint is not None:
        error = OffsetOutOfRange(str(tp), wanted, answer.start_offset, answer.stable_offset)
        error.hint = hint
        raise error
    return inside
