"""The role of a replica: one frozen object, exchanged as a whole by RoleKeeper.

    class          kind          has                                  a PUT, TX or JOIN is      readers get
    BetweenRoles   see below     nothing                              refused with `refusal`    what is stable here
    MasterRole     MASTER        service, transfer, transactions      accepted                  a final answer
    SlaveRole      SLAVE         link to the master                   refused with `refusal`    what the master says is
                                                                                                stable
    WaitingRole    WAITING       link that soon follows no master     refused with `refusal`    what is stable here

BetweenRoles has the kind that the replica reports in the meantime:

    kind                 the replica
    STARTING             has had no role since its start
    WAITING              has lost its epoch: another process has begun one as this replica
    the former kind      has a new epoch in ZooKeeper, stops its former work, and notes the epoch on disk; or is closed
    MASTER               has noted the epoch, and begins it: durable commits of former masters go into their partitions

Invariants:

- A replica has at most one HAService and at most one HAClient, never both. RoleKeeper reaches it only by the role.
- The service, the transfer and the transactions of a MasterRole belong to its epoch. They appear together, when all of
  them have begun, and disappear together.
- The exchange comes first, the end of a former master's work second, in the same turn of the loop. So all code that
  this end calls finds the new role. RoleKeeper stops the link of a former slave before the next epoch begins.
- `epoch` is the newest epoch in which this replica was the master. It never goes down.

A reader takes `ReplicaStatus.role` once and works with that object. After an `await` it takes the role again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from metamq.broker.roles.decide_role import RoleKind
from metamq.errors import DiskFull, Fenced, MetamqError

if TYPE_CHECKING:
    from metamq.broker.data.partition import Partition
    from metamq.broker.ha.client import HAClient
    from metamq.broker.ha.group_transfer import GroupTransferService
    from metamq.broker.ha.service import HAService
    from metamq.broker.transactions.term import TransactionTerm


@dataclass(frozen=True, slots=True)
class BetweenRoles:
    """The state before the first role, and between two roles."""

    kind: RoleKind
    epoch: int
    reason: str
    """The reason of `kind`, for messages."""
    refusal: Fenced
    """The answer to requests that only a master serves."""

    @property
    def followed_epoch(self) -> int:
        """The newest epoch in which this replica was the master."""
        return self.epoch

    def preferred_replica(self, partition: Partition, position: int, far_bytes: int) -> int:
        """See MasterRole.preferred_replica."""
        return -1

    def opened(self, partition: Partition) -> None:
        """Notes that a partition was opened."""

    def closing(self, partition: Partition) -> None:
        """Notes that a partition is closed: ZooKeeper does not list it any more."""

    def flush_changed(self, partition: Partition) -> None:
        """Notes that acknowledgements of a partition count differently: when held, or when flushed."""

    def damaged(self) -> None:
        """Notes that a log is damaged here."""

    def statistics(self) -> dict[str, Any]:
        """The figures of this role alone. Any thread."""
        return {}


@dataclass(frozen=True, slots=True)
class MasterRole:
    """The master of one epoch."""

    kind: ClassVar[RoleKind] = RoleKind.MASTER
    reason: ClassVar[str] = ""
    epoch: int
    service: HAService
    """Replication to the slaves."""
    transfer: GroupTransferService
    """Decides if a PUT is accepted, and when it is acknowledged."""
    transactions: TransactionTerm | MetamqError
    """The transactions of this epoch, or the reason why the journal cannot be read."""

    @property
    def followed_epoch(self) -> int:
        """The epoch of the logs here."""
        return self.epoch

    def preferred_replica(self, partition: Partition, position: int, far_bytes: int) -> int:
        """Returns the replica that a reader at this byte of a partition must ask next; -1 is this one.

        Data more than `far_bytes` behind the end is in no page cache any more, so a slave's disk serves it as well. A
        reader leaves the master at `far_bytes`, and comes back at half of it: so it does not alternate between the two.
        """
        behind_bytes = partition.log.stable_position - position
        is_far = 0 < far_bytes < behind_bytes
        return self.service.slave_beyond(partition, position + far_bytes // 2) if is_far else -1

    def check_order(self, partition: Partition) -> None:
        """See TransactionTerm.check_order."""
        if not isinstance(self.transactions, MetamqError):
            self.transactions.check_order(partition)

    def opened(self, partition: Partition) -> None:
        """See BetweenRoles.opened."""
        self.service.opened(partition)

    def closing(self, partition: Partition) -> None:
        """See BetweenRoles.closing."""
        self.service.closed_partition(partition)

    def flush_changed(self, partition: Partition) -> None:
        """See BetweenRoles.flush_changed."""
        self.service.flush_changed(partition)

    def damaged(self) -> None:
        """See BetweenRoles.damaged."""
        self.service.damaged()

    def statistics(self) -> dict[str, Any]:
        """The figures of this role alone. Any thread."""
        return self.service.statistics()


@dataclass(frozen=True, slots=True)
class _LinkedRole:
    epoch: int
    reason: str
    """The reason of the role, for messages."""
    refusal: Fenced
    """The answer to requests that only a master serves."""
    link: HAClient

    @property
    def followed_epoch(self) -> int:
        """The epoch of the logs here."""
        return max(self.epoch, self.link.epoch)

    def preferred_replica(self, partition: Partition, position: int, far_bytes: int) -> int:
        """See MasterRole.preferred_replica."""
        behind_bytes = partition.log.stable_position - position
        master = self.link.master
        return master.replica if master is not None and behind_bytes <= far_bytes // 2 else -1

    def opened(self, partition: Partition) -> None:
        """See BetweenRoles.opened."""
        partition.freeze()
        self.link.opened(partition)

    def closing(self, partition: Partition) -> None:
        """See BetweenRoles.closing."""
        self.link.closed(partition)

    def flush_changed(self, partition: Partition) -> None:
        """See BetweenRoles.flush_changed."""
        if partition.flushes_before_ack:
            self.link.flushes_now(partition)

    def damaged(self) -> None:
        """See BetweenRoles.damaged."""

    def statistics(self) -> dict[str, Any]:
        """The figures of this role alone. Any thread."""
        return {
            "link": self.link.state.value,
            "received_bytes": self.link.received_bytes,
            "master_silent_ms": self.link.silent_ms,
        }


@dataclass(frozen=True, slots=True)
class SlaveRole(_LinkedRole):
    """A slave: it copies the logs of its master, and serves readers."""

    kind: ClassVar[RoleKind] = RoleKind.SLAVE


@dataclass(frozen=True, slots=True)
class WaitingRole(_LinkedRole):
    """A replica without a master to follow. Its link keeps the partitions that readers may read."""

    kind: ClassVar[RoleKind] = RoleKind.WAITING


Role = BetweenRoles | MasterRole | SlaveRole | WaitingRole


class ReplicaStatus:
    """The role of this replica, and the other reasons to refuse writes. Used by the broker's loop; any thread may read.

    Each attribute has one writer: RoleKeeper exchanges the role, Housekeeping sets `disk_full`, Broker.stop() sets
    `stopping`. So a reason that ends leaves the others in place.
    """

    def __init__(self, broker_id: int) -> None:
        self.disk_full: DiskFull | None = None
        self.stopping: Fenced | None = None
        self._role: Role = BetweenRoles(RoleKind.STARTING, 0, "", Fenced(f"broker {broker_id}", "it is starting"))

    @property
    def role(self) -> Role:
        """The role now."""
        return self._role

    def exchange(self, role: Role) -> Role:
        """Sets the new role and returns the former one. Called by RoleKeeper only."""
        former, self._role = self._role, role
        return former

    @property
    def leaving(self) -> Fenced | None:
        """The reason why this master accepts no more writes: it stops, hands over, or was deposed; or None."""
        role = self._role
        return self.stopping or (role.service.writes_refused if isinstance(role, MasterRole) else None)

    @property
    def writes_refused(self) -> DiskFull | Fenced | None:
        """The reason why PUTs are refused at present, apart from the role; or None."""
        return self.leaving or self.disk_full

    @property
    def transactions(self) -> TransactionTerm | MetamqError:
        """The transactions of the present epoch, or the reason why there are none."""
        role = self._role
        return role.transactions if isinstance(role, MasterRole) else role.refusal

    def master(self) -> MasterRole:
        """Returns the role of a master. Raises Fenced if this replica is not the master."""
        role = self._role
        if isinstance(role, MasterRole):
            return role
        raise role.refusal.with_traceback(None)

    def writing_master(self) -> MasterRole:
        """Returns the role of a master that takes writes. Raises Fenced, DiskFull."""
        if (refusal := self.writes_refused) is not None:
            raise refusal.with_traceback(None)
        return self.master()
