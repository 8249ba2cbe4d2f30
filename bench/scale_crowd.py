"""Many simulated brokers and members of groups in one process, for bench/scale.py.

Each has a session with ZooKeeper of its own, as a real process has, and runs the product's code for ZooKeeper: a broker
registers, reads all topics and offers them; a member reads the masters, joins its group, follows the plan, claims its
partitions, commits their offsets, and keeps a lease. There are no messages, no files and no connections to brokers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from metamq.broker.process.topic_reader import TopicReader
from metamq.client.group.assignment import AssignedPartition
from metamq.client.group.rebalance import ZKLoadRebalanceListener
from metamq.client.net.cluster import ClusterClient
from metamq.client.offsets.offsets import CommitRequest, Ownership, ZooKeeperOffsets
from metamq.errors import MetamqError
from metamq.zk.cluster.brokers import Mastership, become_master
from metamq.zk.cluster.offers import Offers
from metamq.zk.cluster.registrations import Registration
from metamq.zk.cluster.replicas import Confirmed, change_insync, register_slave, take_over
from metamq.zk.cluster.topics import TopicConfig, TopicStore
from metamq.zk.errors import ConnectionLost
from metamq.zk.partitions import TopicPartition
from metamq.zk.session.lease import Lease
from metamq.zk.session.session import Session, SessionState

OPENED_AT_ONCE = 20
"""Sessions that a process opens at the same time."""
PAUSE_S = 0.1


@dataclass(slots=True)
class GroupView:
    """The members of a group in one process: their number, their partitions, the plans that they follow."""

    members: int = 0
    held: int = 0
    generations: set[int] = field(default_factory=set)
    is_settled: bool = True

    def with_(self, other: GroupView) -> GroupView:
        """Returns both together."""
        generations, is_settled = self.generations | other.generations, self.is_settled and other.is_settled
        return GroupView(self.members + other.members, self.held + other.held, generations, is_settled)


class SimulatedReplica:
    """One replica of a broker id: its registration, its view of the topics, and its offers."""

    def __init__(self, session: Session, broker_id: int, replica: int) -> None:
        self.session = session
        name = f"{broker_id}-{replica}"
        self.registration = Registration(
            broker_id, replica, incarnation=1, folder=name, lock=name, host=f"broker-{broker_id}.example.com",
            port=7070 + replica, version="0", data=f"/var/lib/metamq/{name}",
        )  # fmt: skip
        self.held: Mastership | None = None
        self.offered: dict[str, int] = {}
        self._offers = Offers(session)
        self._changed, self._made = asyncio.Event(), asyncio.Event()
        self._topics = TopicReader(session, TopicStore(session), self._change)
        self._turn = asyncio.Lock()
        self._generation = 0
        session.on_state(self._on_state)
        self.task = asyncio.create_task(self._run())

    def _on_state(self, state: SessionState) -> None:
        self._offers.may_be_gone()
        self._change()

    def _change(self) -> None:
        self._made.clear()
        self._changed.set()

    async def made(self) -> None:
        """Waits until its offers are those of its present role."""
        await self._made.wait()

    async def register(self) -> None:
        """Registers as what it is."""
        if self.registration.replica == 0 or self.held is not None:
            self.held = await become_master(self.session, self.registration)
        else:
            await register_slave(self.session, self.registration)
        self._generation = self.session.generation
        self._change()

    async def _run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._follow()
            except MetamqError:
                await asyncio.sleep(PAUSE_S)
                self._change()

    async def _follow(self) -> None:
        async with self._turn:
            await self.session.connected()
            if 0 < self._generation != self.session.generation:
                await self.register()
            found, _listing = await self._topics.read()
            counts = {
                topic: config.partitions.get(self.registration.broker_id, 0)
                for topic, config in found.items()
                if isinstance(config, TopicConfig)
            }
            offered = {topic: count for topic, count in counts.items() if count}
            role = "slave" if self.held is None else "master"
            await self._offers.make(*self.place, role, offered, self.held)
            self.offered = offered
            if not self._changed.is_set():
                self._made.set()

    @property
    def place(self) -> tuple[int, int]:
        """Its broker id and its number."""
        return self.registration.broker_id, self.registration.replica

    async def admit(self, slave: SimulatedReplica) -> None:
        """Adds its slave to the in-sync set."""
        assert self.held is not None
        members = [self.registration.member, slave.registration.member]
        outcome = await change_insync(self.session, self.held, members)
        assert isinstance(outcome, Confirmed), outcome
        self.held = outcome.held

    async def take_over_from(self, master: SimulatedReplica) -> None:
        """Takes over from the master, which then registers as the slave."""
        assert master.held is not None
        async with master._turn, self._turn:
            former = master.held
            taken = await take_over(self.session, self.registration, former.state, former.version, handed_over=True)
            assert isinstance(taken, Mastership), taken
            self.held, master.held = taken, None
            await register_slave(master.session, master.registration)
        self._change()
        master._change()

    async def close(self) -> None:
        """Ends its work and its session."""
        self.task.cancel()
        await self.session.close()


class SimulatedMember:
    """One consumer of a group: what it has in ZooKeeper, without fetching."""

    def __init__(self, session: Session, group: str, name: str, topics: Sequence[str]) -> None:
        self.session = session
        self.group = group
        self.claims: dict[TopicPartition, Ownership] = {}
        self.cluster = ClusterClient(session)
        self.committed = 0
        self._lease = Lease(session)
        self.listener = ZKLoadRebalanceListener(
            session, group, name, topics, "sticky", ZooKeeperOffsets(session), self, self._lease
        )

    async def start(self) -> None:
        """Reads the masters, and joins."""
        await self.cluster.refresh_brokers()
        await self._lease.start()
        await self.listener.start()

    async def assigned(self, partitions: Sequence[AssignedPartition]) -> None:
        """See AssignmentHandler."""
        self.claims.update((one.tp, one.claim) for one in partitions)

    async def revoke(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, tuple[int, int] | None]:
        """See AssignmentHandler."""
        self.lost(partitions)
        return dict.fromkeys(partitions)

    def lost(self, partitions: Sequence[TopicPartition]) -> None:
        """See AssignmentHandler."""
        for tp in partitions:
            self.claims.pop(tp, None)

    def failed(self, error: MetamqError) -> None:
        """See AssignmentHandler."""
        raise error

    async def commit(self, offset: int) -> None:
        """Commits an offset for each of its partitions."""
        refused = await self.listener.commit([CommitRequest(claim, offset, 1) for claim in self.claims.values()])
        self.committed += len(self.claims) - len(refused)

    @property
    def view(self) -> GroupView:
        """This member alone."""
        health = self.listener.health()
        generation = -1 if health.plan_generation is None else health.plan_generation
        is_settled = self.listener.unsettled() is None and not health.revoking and not health.waiting
        return GroupView(1, len(self.claims), {generation}, is_settled)

    async def close(self) -> None:
        """Leaves the group, and ends its session."""
        await self.listener.stop()
        await self._lease.close()
        await self.cluster.close()
        await self.session.close()


class Crowd:
    """The simulated replicas and members of one process. Its methods are the commands of bench/scale.py."""

    def __init__(self, address: str, session_ms: int) -> None:
        self._address = address
        self._session_ms = session_ms
        self._replicas: dict[tuple[int, int], SimulatedReplica] = {}
        self._members: dict[str, SimulatedMember] = {}
        self._gate = asyncio.Semaphore(OPENED_AT_ONCE)

    async def _session(self) -> Session:
        return await Session.open(self._address, timeout_ms=self._session_ms, connect_timeout_s=60)

    async def add_brokers(self, broker_ids: Iterable[int], replicas: int) -> None:
        """Starts all replicas of these broker ids; the slaves are in sync."""
        await asyncio.gather(*(self._add_broker(broker_id, replicas) for broker_id in broker_ids))

    async def _add_broker(self, broker_id: int, replicas: int) -> None:
        async with self._gate:
            for replica in range(replicas):
                one = SimulatedReplica(await self._session(), broker_id, replica)
                self._replicas[broker_id, replica] = one
                await one.register()
                if replica:
                    await self._replicas[broker_id, 0].admit(one)

    async def add_members(self, wanted: Iterable[tuple[str, str, Sequence[str]]]) -> None:
        """Starts members, each (group, name, topics)."""
        await asyncio.gather(*(self._add_member(*one) for one in wanted))

    async def _add_member(self, group: str, name: str, topics: Sequence[str]) -> None:
        async with self._gate:
            member = SimulatedMember(await self._session(), group, name, topics)
            await member.start()
            self._members[name] = member

    async def remove_member(self, name: str) -> None:
        """Has a member leave its group."""
        await self._members.pop(name).close()

    async def promote(self, broker_id: int) -> None:
        """Promotes replica 1 of a broker id."""
        await self._replicas[broker_id, 1].take_over_from(self._replicas[broker_id, 0])

    async def create(self, configs: Iterable[TopicConfig]) -> None:
        """Creates topics."""
        async with await self._session() as session:
            store = TopicStore(session)
            await asyncio.gather(*map(store.create, configs))

    async def offering(self, topics: Iterable[str]) -> int:
        """Returns the number of offers that the replicas here have made of these topics."""
        return sum(topic in one.offered for one in self._replicas.values() for topic in topics)

    async def offers_made(self) -> None:
        """Waits until every replica here has made the offers of its present role."""
        await asyncio.gather(*(one.made() for one in self._replicas.values()))

    async def seeing(self, broker_id: int, replica: int) -> int:
        """Returns the number of members here that have this replica as the master of the broker id."""
        masters = (member.cluster.brokers.get(broker_id) for member in self._members.values())
        return sum(master is not None and master.replica == replica for master in masters)

    async def groups(self) -> dict[str, GroupView]:
        """Returns the state of each group, as far as it is here."""
        found: dict[str, GroupView] = {}
        for member in self._members.values():
            found[member.group] = found.get(member.group, GroupView()).with_(member.view)
        return found

    async def commit_for(self, seconds: float, every_s: float) -> int:
        """Has each member commit each of its partitions, again and again; returns the number of commits."""
        before = sum(member.committed for member in self._members.values())
        end = time.monotonic() + seconds
        count = max(len(self._members), 1)
        places = enumerate(self._members.values())
        await asyncio.gather(*(self._commit_until(one, end, every_s, every_s * n / count) for n, one in places))
        return sum(member.committed for member in self._members.values()) - before

    async def _commit_until(self, member: SimulatedMember, end: float, every_s: float, first_s: float) -> None:
        next_at, offset = time.monotonic() + first_s, 0
        while next_at < end:
            await asyncio.sleep(max(next_at - time.monotonic(), 0))
            offset += 1
            await member.commit(offset)
            next_at = max(next_at + every_s, time.monotonic())

    async def answered(self) -> int:
        """Waits until ZooKeeper has answered in each session; returns the number of sessions."""
        sessions = [one.session for one in self._replicas.values()]
        sessions += [one.session for one in self._members.values()]
        await asyncio.gather(*map(_answered, sessions))
        return len(sessions)

    async def processor(self) -> tuple[float, float]:
        """Returns the processor seconds of this process, and of its event loop alone: the rest is kazoo's threads."""
        return time.process_time(), time.thread_time()

    async def close(self) -> None:
        """Ends all sessions, a part of them at a time."""
        for some in (self._members, self._replicas):
            await asyncio.gather(*(one.close() for one in some.values()), return_exceptions=True)


async def _answered(session: Session) -> None:
    while True:
        try:
            await session.connected()
            await session.sync()
        except ConnectionLost:
            await asyncio.sleep(PAUSE_S)
        else:
            return


def serve(pipe: Connection, address: str, session_ms: int) -> None:
    """Runs a crowd in this process until None comes, or its parent ends."""
    asyncio.run(_serve(pipe, address, session_ms))


async def _serve(pipe: Connection, address: str, session_ms: int) -> None:
    crowd = Crowd(address, session_ms)
    commands: dict[str, Callable[..., Awaitable[Any]]] = {
        name: getattr(crowd, name) for name in dir(crowd) if not name.startswith("_")
    }
    try:
        while (request := await asyncio.to_thread(pipe.recv)) is not None:
            name, arguments = request
            try:
                answer = await commands[name](*arguments)
            except Exception as error:
                answer = RuntimeError(f"{name}: {error!r}")
            pipe.send(answer)
    except EOFError:
        return
    finally:
        await crowd.close()
