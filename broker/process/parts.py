"""Puts the parts of a broker together: its role, the processors of requests, and background work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import metamq
from metamq.broker.data.partition import BatchIds
from metamq.broker.data.scrubber import Scrubber
from metamq.broker.delays.forwarder import DelayForwarder
from metamq.broker.front_door.administration import AdministrationProcessor
from metamq.broker.front_door.appends import Appends, TxProcessor
from metamq.broker.front_door.door import FrontDoor, Processor, Timeouts
from metamq.broker.front_door.fetch_session import ReplicaReadRole
from metamq.broker.front_door.limits.admission import Admission
from metamq.broker.front_door.limits.answer_memory import AnswerMemory
from metamq.broker.front_door.limits.request_memory import RequestMemory
from metamq.broker.front_door.limits.slices import Slices
from metamq.broker.front_door.look_ups import LookUps
from metamq.broker.front_door.puts import PutProcessor
from metamq.broker.front_door.statistics import Counters, StatsProcessor
from metamq.broker.front_door.writes import Writes
from metamq.broker.process.group_expiry import GroupExpiry
from metamq.broker.process.group_lag import GroupLagReader
from metamq.broker.process.housekeeping import Housekeeping
from metamq.broker.roles.keeper import RoleKeeper
from metamq.broker.roles.role import ReplicaStatus
from metamq.broker.transactions.processor import TransactionalCommandProcessor
from metamq.wire.commands import Command, HelloReply
from metamq.wire.limits import BATCH_BYTES_MAX, FRAME_BYTES_MAX, MESSAGE_BYTES_MAX, PROTOCOL_VERSION_MAX

if TYPE_CHECKING:
    from metamq.broker.config import BrokerConfig
    from metamq.broker.data.data_folder import DataFolder
    from metamq.broker.data.flusher import Flusher
    from metamq.broker.data.topics import Topics
    from metamq.broker.front_door.audit import Audit
    from metamq.broker.process.users import KnownUsers
    from metamq.errors import MetamqError
    from metamq.zk.cluster.registrations import Registration
    from metamq.zk.cluster.topics import TopicStore
    from metamq.zk.session.session import Session


@dataclass(frozen=True, slots=True)
class BrokerParts:
    """The parts above the topics."""

    status: ReplicaStatus
    transactions: TransactionalCommandProcessor
    keeper: RoleKeeper
    housekeeping: Housekeeping
    scrubber: Scrubber
    lags: GroupLagReader
    expiry: GroupExpiry
    delays: DelayForwarder
    stats: StatsProcessor
    door: FrontDoor


def _scrubber(topics: Topics, config: BrokerConfig, read_role: ReplicaReadRole, housekeeping: Housekeeping) -> Scrubber:
    """Makes the scrubber, which starts a thread; after an error it ends those of the housekeeping."""
    try:
        return Scrubber(topics, config, read_role.found_damage)
    except BaseException:
        housekeeping.close()
        raise


def follow_rights(users: KnownUsers, door: FrontDoor) -> None:
    """Tells the connections that rights or tokens have changed."""

    async def rights_changed() -> None:
        for connection in list(door.connections):  # new ones have the new rules already
            connection.rights_changed()
            await asyncio.sleep(0)

    async def tokens_changed() -> None:
        for connection in [one for one in door.connections if one.has_token]:
            connection.rights_changed()

    users.when_rights_change(rights_changed)
    users.when_tokens_change(tokens_changed)


def make_parts(
    config: BrokerConfig,
    folder: DataFolder,
    session: Session,
    store: TopicStore,
    topics: Topics,
    flusher: Flusher,
    registration: Callable[[], Registration],
    *,
    connections_max: int,
    users: KnownUsers,
    audit: Audit,
    check: Callable[[], Awaitable[None]],
    failed: Callable[[MetamqError], None],
) -> BrokerParts:
    """Makes the parts. The replica has no role yet. `check` and `failed`: see RoleKeeper."""
    status, ids, counters, slices, writes = ReplicaStatus(config.id), BatchIds(0), Counters(), Slices(), Writes()
    appends = Appends(
        status, folder, topics, flusher, ids, counters,
        batch_bytes_max=BATCH_BYTES_MAX, promised_bytes=lambda: transactions.figures.promised_bytes,
    )  # fmt: skip
    transactions = TransactionalCommandProcessor(
        config.id, topics, flusher, ids, appends, appends.body_place, failed, lambda: status.transactions
    )
    keeper = RoleKeeper(
        config, folder, session, topics, flusher, ids, status, transactions, registration, check=check, failed=failed
    )
    housekeeping = Housekeeping(topics, folder, status, transactions, flusher, config, failed)
    read_role = ReplicaReadRole(status, topics, config.far_behind_bytes)
    scrubber = _scrubber(topics, config, read_role, housekeeping)
    delays = DelayForwarder(config.id, session, topics, status)
    stats = StatsProcessor(
        status, folder, topics, ids, counters, replication=keeper.statistics, delayed=lambda: delays.figures,
        transactions=lambda: transactions.figures, scrub=scrubber.statistics,
    )  # fmt: skip
    puts = PutProcessor(appends, flusher, writes, failed)
    administration = AdministrationProcessor(status, keeper, store, session, users)
    table: dict[int, Processor] = {
        Command.PUT: puts.put,
        Command.GET: lambda request, connection: connection.fetches.get(request),
        Command.OFFSETS: LookUps(topics, read_role, scrubber.report, slices, config.search_timeout_s).offsets,
        Command.STATS: stats.stats,
        Command.SYNC: administration.join,
        Command.PROMOTE: administration.promote,
        Command.TX: TxProcessor(status, transactions).tx,
        Command.BRANCHES: transactions.branches,
        Command.TOPIC: administration.topic,
        Command.DELEGATE: administration.delegate,
    }
    door = FrontDoor(
        table, puts.store, read_role, transactions, counters, slices, writes,
        Admission(connections_max, config.connections_per_address_max, config.connections_per_principal_max), audit,
        RequestMemory(config.request_memory_bytes), AnswerMemory(config.answer_memory_bytes),
        Timeouts(config.unread_timeout_s, config.idle_timeout_s), lambda: greeting(config.id, ids.epoch), users,
    )  # fmt: skip
    of_groups = GroupLagReader(session, topics, status, config), GroupExpiry(session, status, config)
    return BrokerParts(status, transactions, keeper, housekeeping, scrubber, *of_groups, delays, stats, door)


def greeting(broker_id: int, epoch: int) -> HelloReply:
    """Returns the answer to HELLO."""
    return HelloReply(
        version=PROTOCOL_VERSION_MAX,
        broker_id=broker_id,
        epoch=epoch,
        message_bytes_max=MESSAGE_BYTES_MAX,
        batch_bytes_max=BATCH_BYTES_MAX,
        frame_bytes_max=FRAME_BYTES_MAX,
        server=f"metamq {metamq.__version__}",
    )
