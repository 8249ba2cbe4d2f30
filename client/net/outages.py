"""Outages: partitions that cannot be fetched at present. They are told, and no loop takes one for the end of the data.

What many partitions of a broker share is told once, and not at all when it is over within TELL_AFTER_S.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from metamq.errors import ConnectError, MetamqError, TopicNotFound
from metamq.words import count
from metamq.zk.names import parse_partition
from metamq.zk.partitions import TopicPartition

log = logging.getLogger("metamq.client")

TELL_AFTER_S = 1.0
PATIENCE_S = 30.0
"""How long a loop that ends when nothing comes waits for partitions that cannot be fetched, before it raises."""


class _Outage(NamedTuple):
    since: float
    """time.monotonic()"""
    error: MetamqError
    """The last one."""
    broker: str
    """As it was called when that came: a master that follows it has another address."""


class Outages:
    """A consumer's. `name_of` gives a broker's name, with its address where that is known.

    `is_substituted` says whether a slave is read in the place of a partition's master: nothing to warn of, but where
    the slave ends need not be the end of the data.
    """

    def __init__(self, name_of: Callable[[int], str], is_substituted: Callable[[TopicPartition], bool]) -> None:
        self.name_of = name_of
        self._is_substituted = is_substituted
        self.errors: dict[TopicPartition, str] = {}
        """What is wrong with a partition, for health()."""
        self._now: dict[TopicPartition, _Outage] = {}
        self._told: dict[int, float] = {}
        self._count: Counter[int] = Counter()
        """How many partitions of a broker cannot be fetched."""

    def failed(self, tp: TopicPartition, error: MetamqError) -> None:
        """It could not be fetched. What is wrong with many partitions at once is logged once."""
        text = str(error)
        if text not in self.errors.values():
            passes = error.retriable or type(error) is TopicNotFound  # or the assignment says that it was deleted
            log.log(logging.INFO if passes else logging.WARNING, "%s: %s", tp, text)
        self.errors[tp] = text
        broker_id, before = _broker_of(tp), self._now.get(tp)
        if before is None:
            self._count[broker_id] += 1
        since = time.monotonic() if before is None else before.since
        self._now[tp] = _Outage(since, error, self.name_of(broker_id))

    def cut_off(self, tps: Iterable[TopicPartition]) -> list[TopicPartition]:
        """Those of them whose broker could not be reached."""
        return [tp for tp in tps if tp in self._now and isinstance(self._now[tp].error, ConnectError)]

    def ended(self, tp: TopicPartition) -> None:
        """It is fetched, or is not to be."""
        self.errors.pop(tp, None)
        if self._now.pop(tp, None) is None:
            return
        broker_id = _broker_of(tp)
        self._count[broker_id] -= 1
        if broker_id in self._told and not self._count[broker_id]:
            lasted_s = time.monotonic() - self._told.pop(broker_id)
            log.info("%s: all partitions can be fetched again, after %.1f s", self.name_of(broker_id), lasted_s)

    def tell(self) -> None:
        """Warns of what lasts."""
        for tp, outage in self._now.items():
            broker_id = _broker_of(tp)
            is_new = broker_id not in self._told and time.monotonic() - outage.since >= TELL_AFTER_S
            if is_new and not self._is_substituted(tp):
                self._told[broker_id] = outage.since
                dark = [one for one in self._now if _broker_of(one) == broker_id and not self._is_substituted(one)]
                partitions = count(len(dark), "partition")
                log.warning("%s: %s cannot be fetched at present: %s", outage.broker, partitions, outage.error)

    def began_at(self) -> float | None:
        """When the longest outage began (time.monotonic); None when there is none. Any thread."""
        return min((outage.since for outage in list(self._now.values())), default=None)

    def error(self) -> MetamqError:
        """What ends a loop that waited for PATIENCE_S. Any thread; there must be an outage."""
        tp, (_, error, broker) = min(list(self._now.items()), key=lambda item: item[1].since)
        if not isinstance(error, ConnectError):
            return error
        if self._is_substituted(tp):
            return ConnectError(
                broker,
                f"its master could not be reached for {PATIENCE_S:g} s, and slaves need not have all of {tp}: "
                f"{error.problem}",
                hint="`metamq ha status` says whether a slave can be promoted. What is done is committed.",
            )
        return ConnectError(
            broker,
            f"{tp} could not be fetched for {PATIENCE_S:g} s: {error.problem}",
            hint="Is the broker running? What is done is committed: start again when it is back.",
        )


def _broker_of(tp: TopicPartition) -> int:
    return parse_partition(tp.partition)[0]
