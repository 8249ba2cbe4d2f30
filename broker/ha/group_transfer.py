"""GroupTransferService: whether a PUT is taken at a master, and when it is acknowledged.

    replication   is acknowledged once                                      rests on
    sync          every in-sync replica holds it (stable)                   the in-sync set alone, no clock
    async         this replica has stored it as the topic asks              the lease, where there ever was a slave

`min_insync` is looked at twice: before the append, when a refusal means that nothing was stored; and before the
answer, when the set may have shrunk meanwhile. Then the outcome is *unknown*: it is stored here, on fewer replicas than
the topic asks for. PUTs wait side by side, each partition's in the order of its log, and nobody polls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from metamq.broker.data.partition import Done, Partition
from metamq.errors import Fenced, MetamqError, NotEnoughReplicas
from metamq.zk.cluster.topics import TopicConfig


class MasterTerm(Protocol):
    """The master's term, as far as it matters here: HAService."""

    @property
    def insync_count(self) -> int:
        """Members of the in-sync set, the master included."""

    @property
    def alone(self) -> bool:
        """Whether nobody else's acknowledgement counts."""


class GroupTransferService:
    """Used by the broker's loop only. `may_believe` tells whether this process may believe to be the master."""

    def __init__(self, broker_id: int, term: MasterTerm, may_believe: Callable[[], bool]) -> None:
        self._what = f"broker {broker_id}"
        self._term = term
        self._may_believe = may_believe

    def admit(self, config: TopicConfig) -> None:
        """Before an append. Raises NotEnoughReplicas or Fenced: nothing is stored."""
        if not self._may_believe():
            raise self._lease_over()
        have = self._term.insync_count
        if have < config.min_insync:
            raise NotEnoughReplicas(f"topic {config.topic!r} at {self._what}", have, config.min_insync)

    def when_acknowledged(self, partition: Partition, config: TopicConfig, end_offset: int, done: Done) -> None:
        """Calls `done` once the batch that ends there may be acknowledged, or with why it is not; perhaps at once."""
        is_sync = config.replication == "sync"

        def answer(error: MetamqError | None) -> None:
            done(error or self._withheld(config, is_sync))

        wait = partition.when_stable if is_sync else partition.when_stored
        if wait(end_offset, answer):
            answer(None)

    def _withheld(self, config: TopicConfig, is_sync: bool) -> MetamqError | None:
        """Why a batch that is stored is not acknowledged after all; None: it is."""
        have = self._term.insync_count
        if have < config.min_insync:
            what = f"topic {config.topic!r} at {self._what}"
            return NotEnoughReplicas(what, have, config.min_insync, outcome="unknown")
        if (not is_sync or self._term.alone) and not self._may_believe():
            return self._lease_over().with_unknown_outcome()
        return None

    def _lease_over(self) -> Fenced:
        return Fenced(self._what, "it was cut off from ZooKeeper for too long to know")
