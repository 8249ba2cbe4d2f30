"""Outages: partitions that cannot be fetched now. They are logged, and a loop does not take them for the end of the
data.

An outage of many partitions of one broker is logged once, and not at all if it ends within WARN_AFTER_S.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from metamq.errors import ConnectError, MetamqError, TopicNotFound
from metamq.words import count
from metamq.zk.names import parse_partition

if TYPE_CHECKING:
    from metamq.zk.partitions import TopicPartition

log = logging.getLogger("metamq.client")

WARN_AFTER_S = 1.0
PATIENCE_S = 30.0
"""Seconds for which a loop with `idle_timeout_s` waits for unreachable partitions. Then it raises the error."""


class _Outage(NamedTuple):
    since: float
    """The start, as time.monotonic()."""
    error: MetamqError
    """The last error."""
    broker: str
    """The broker's name at the time of the error: a new master has another address."""


class Outages:
    """The outages of one consumer. `name_of` returns a broker's name, with its address if the address is known.

    `is_substituted` is True if a slave is read instead of a partition's master. That needs no warning, but the end of
    the slave's log may be before the end of the data.
    """

    def __init__(self, name_of: Callable[[int], str], is_substituted: Callable[[TopicPartition], bool]) -> None:
        self.name_of = name_of
        self._is_substituted = is_substituted
        self.errors: dict[TopicPartition, str] = {}
        """The error of each partition, for health()."""
        self._now: dict[TopicPartition, _Outage] = {}
        self._warned: dict[int, float] = {}
        self._count: Counter[int] = Counter()
        """The number of partitions of each broker that cannot be fetched."""

    def failed(self, tp: TopicPartition, error: MetamqError) -> None:
        """Notes that a partition could not be fetched. The same error of many partitions is logged once."""
        text = str(error)
        if text not in self.errors.values():
            passes = error.retriable or type(error) is TopicNotFound  # the assignment logs a deleted topic
            log.log(logging.INFO if passes else logging.WARNING, "%s: %s", tp, text, extra=tp._asdict())
        self.errors[tp] = text
        broker_id, before = _broker_of(tp), self._now.get(tp)
        if before is None:
            self._count[broker_id] += 1
        since = time.monotonic() if before is None else before.since
        self._now[tp] = _Outage(since, error, self.name_of(broker_id))

    def cut_off(self, tps: Iterable[TopicPartition]) -> list[TopicPartition]:
        """Returns the partitions among `tps` whose broker could not be reached."""
        return [tp for tp in tps if tp in self._now and isinstance(self._now[tp].error, ConnectError)]

    def ended(self, tp: TopicPartition) -> None:
        """Notes that a partition is fetched, or that the consumer does not fetch it any more."""
        self.errors.pop(tp, None)
        if self._now.pop(tp, None) is None:
            return
        broker_id = _broker_of(tp)
        self._count[broker_id] -= 1
        if broker_id in self._warned and not self._count[broker_id]:
            lasted_s = time.monotonic() - self._warned.pop(broker_id)
            text, fields = "%s: all partitions can be fetched again, after %.1f s", {"broker": broker_id}
            log.info(text, self.name_of(broker_id), lasted_s, extra=fields)

    def warn(self) -> None:
        """Warns of the outages that last."""
        for tp, outage in self._now.items():
            broker_id = _broker_of(tp)
            is_new = broker_id not in self._warned and time.monotonic() - outage.since >= WARN_AFTER_S
            if is_new and not self._is_substituted(tp):
                self._warned[broker_id] = outage.since
                dark = [one for one in self._now if _broker_of(one) == broker_id and not self._is_substituted(one)]
                partitions = count(len(dark), "partition")
                text, fields = "%s: %s cannot be fetched at present: %s", {"broker": broker_id}
                log.warning(text, outage.broker, partitions, outage.error, extra=fields)

    def began_at(self) -> float | None:
        """Returns the start (time.monotonic) of the longest outage, or None. Thread-safe."""
        return min((outage.since for outage in list(self._now.values())), default=None)

    def error(self) -> MetamqError:
        """Returns the error that ends a loop after PATIENCE_S. There must be an outage. Thread-safe."""
        tp, (_, error, broker) = min(list(self._now.items()), key=lambda item: item[1].since)
        if not isinstance(error, ConnectError):
            return error
        if self._is_substituted(tp):
            return ConnectError(
                broker,
                f"its master could not be reached for {PATIENCE_S:g} s, and slaves may lack the end of {tp}: "
                f"{error.problem}",
                hint="See in `metamq ha status` if a slave can be promoted. The processed messages are committed.",
            )
        return ConnectError(
            broker,
            f"{tp} could not be fetched for {PATIENCE_S:g} s: {error.problem}",
            hint="Start again when the broker is back. The processed messages are committed.",
        )


def _broker_of(tp: TopicPartition) -> int:
    return parse_partition(tp.partition)[0]
