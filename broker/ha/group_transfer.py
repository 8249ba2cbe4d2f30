"""GroupTransferService: decides at a master if a PUT is accepted, and when it is acknowledged.

    replication   acknowledged when                            depends on
    sync          every in-sync replica holds it (stable)      the in-sync set; the lease only if it is the master alone
    async         this replica has stored it                   the lease, if there ever was a slave

`min_insync` is checked twice. Before the append, a refusal means that nothing was stored. Before the answer, the set
may have shrunk: then the outcome is *unknown*, since fewer replicas have the batch than the topic requires. PUTs wait
at the same time, in each partition in the order of its log. No code polls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from metamq.errors import Fenced, MetamqError, NotEnoughReplicas

if TYPE_CHECKING:
    from metamq.broker.data.partition import Done, Partition
    from metamq.broker.ha.service import HAService
    from metamq.zk.cluster.topics import TopicConfig


class GroupTransferService:
    """Decides about PUTs, in the broker's loop. `may_believe()`: True if it may believe that it is the master."""

    def __init__(self, broker_id: int, insync: HAService, may_believe: Callable[[], bool]) -> None:
        self._what = f"broker {broker_id}"
        self._insync = insync
        self._may_believe = may_believe

    def admit(self, config: TopicConfig) -> None:
        """Checks that an append may begin. Raises NotEnoughReplicas, Fenced: nothing is stored then."""
        if not self._may_believe():
            raise self._lease_over()
        have = self._insync.insync_count
        if have < config.min_insync:
            raise NotEnoughReplicas(f"topic {config.topic!r} at {self._what}", have, config.min_insync)

    def when_acknowledged(self, partition: Partition, config: TopicConfig, end_offset: int, done: Done) -> None:
        """Calls `done` when the batch that ends there may be acknowledged, or with an error; perhaps at once."""
        is_sync = config.replication == "sync"

        def answer(error: MetamqError | None) -> None:
            done(error or self._withheld(config, is_sync))

        wait = partition.when_stable if is_sync else partition.when_stored
        if wait(end_offset, answer):
            answer(None)

    def _withheld(self, config: TopicConfig, is_sync: bool) -> MetamqError | None:
        """Returns the reason why a stored batch is not acknowledged, or None."""
        have = self._insync.insync_count
        if have < config.min_insync:
            what = f"topic {config.topic!r} at {self._what}"
            return NotEnoughReplicas(what, have, config.min_insync, outcome="unknown")
        if (not is_sync or self._insync.alone) and not self._may_believe():
            return self._lease_over().with_unknown_outcome()
        return None

    def _lease_over(self) -> Fenced:
        return Fenced(self._what, "it was cut off from ZooKeeper for longer than its lease")
