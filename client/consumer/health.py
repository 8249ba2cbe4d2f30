"""The state of a consumer, the result of `consumer.health()`; and its progress, which it publishes."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from metamq.client.fetch.inbox import RunningMessage
from metamq.client.group.assignment import RebalanceHealth
from metamq.client.handling.handler_figures import HandlerHealth
from metamq.zk.partitions import TopicPartition

if TYPE_CHECKING:
    from metamq.client.consumer.loop_end import LoopEnd
    from metamq.client.fetch.inbox import Inbox, PartitionState
    from metamq.client.group.assignment import Assignment
    from metamq.client.net.outages import Outages

PROGRESS_CHECK_S = 1.0
CHECKS_A_PUBLICATION = 5
PUBLISH_LIMIT_S = 1.0
"""The most seconds that the last publication may delay close()."""


@dataclass(frozen=True, slots=True)
class PartitionHealth:
    """The state of one partition of a consumer. Before the first answer, offsets are -1 and the lag is None."""

    next_offset: int
    done_offset: int
    committed_offset: int | None
    lag: int | None
    in_hand: bool
    """True while the application processes a message or batch of the partition."""
    running: tuple[RunningMessage, ...]
    """The messages that `run()` processes now, the longest first: with order="partition" one at most."""
    paused: bool
    last_error: str
    """The reason that the partition is not fetched now, or "". While a slave is read, it is the master's reason."""
    handler_error: str = ""
    """The error of a message that run() tries again, or ""."""


@dataclass(frozen=True, slots=True)
class ConsumerHealth:
    """The state of one consumer. `group` is None for a consumer that does not share its partitions."""

    partitions: Mapping[TopicPartition, PartitionHealth]
    delivering: bool
    """False while ZooKeeper has not answered for longer than the lease."""
    buffered_bytes: int
    last_fetch_s: float | None
    """Seconds since a broker last answered."""
    lost_messages: int
    """Messages that retention removed before they were read."""
    delayed_s: float
    """Seconds until the delay ends, or is reported again: this client is above its quota. 0: no broker delays it."""
    group: RebalanceHealth | None
    handlers: Mapping[str, HandlerHealth]
    """The handlers of `run()`, by topic."""

    @property
    def obstacle(self) -> str:
        """The reason that no message can arrive, or "". It is for readiness: a handler that tries a message again is no
        obstacle, nor is a partition that cannot be fetched while others can."""
        if not self.delivering:
            return "ZooKeeper does not answer"
        if self.group is not None and self.group.state in ("joining", "failed"):
            return f"the consumer is {self.group.state} in its group: {self.group.last_error or 'no answer yet'}"
        wanted = [(tp, one.last_error) for tp, one in self.partitions.items() if not one.paused]
        is_cut_off = wanted and all(error for _tp, error in wanted)
        return "{}: {}".format(*wanted[0]) if is_cut_off else ""


def health_of(state: PartitionState, last_error: str) -> PartitionHealth:
    """Returns the state of one partition. The caller holds the inbox's lock."""
    return PartitionHealth(
        next_offset=state.next_offset,
        done_offset=state.done_offset(),
        committed_offset=state.committed_offset,
        lag=state.lag(),
        in_hand=state.in_flight is not None,
        running=tuple(state.in_flight.running) if state.in_flight is not None else (),
        paused=state.paused,
        last_error=last_error,
        handler_error=next(iter([*state.in_flight.retrying.values()]), "") if state.in_flight is not None else "",
    )


class ProgressWatch:
    """Notes the progress of a consumer: a message was done, or there is no work. Warns of lasting obstacles."""

    def __init__(self, inbox: Inbox, assignment: Assignment, outages: Outages, end: LoopEnd) -> None:
        self._inbox = inbox
        self._assignment = assignment
        self._outages = outages
        self._end = end
        self._done: dict[TopicPartition, int] = {}
        self._checks = 0

    def check(self) -> Coroutine[Any, Any, None] | None:
        """Called every `pause_s`, in the loop. Returns the publication of the progress if that is due."""
        self._outages.warn()
        self._end.warn()
        with self._inbox.lock:
            done = done_offsets(self._inbox)
            is_busy = any(state.in_flight is not None or state.buffered for state in self._inbox.states.values())
        if done != self._done or not is_busy:
            self._assignment.note_progress()
        self._done = done
        self._checks += 1
        return self._assignment.publish(done) if self._checks % CHECKS_A_PUBLICATION == 1 else None

    @staticmethod
    def pause_s() -> float:
        """Returns the seconds between two checks."""
        return PROGRESS_CHECK_S


def done_offsets(inbox: Inbox) -> dict[TopicPartition, int]:
    """Returns the offset after the last done message, per partition that has begun. Thread-safe."""
    with inbox.lock:
        return {state.tp: state.done_offset() for state in inbox.states.values() if state.next_offset >= 0}
