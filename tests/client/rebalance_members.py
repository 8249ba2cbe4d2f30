"""Members of a group with real sessions and no broker, and a referee who sees that none holds what another does."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from kazoo.client import KazooClient
from kazoo.handlers.threading import KazooTimeoutError

from metamq.client.group.rebalance import AssignedPartition, ZKLoadRebalanceListener
from metamq.client.offsets.offsets import ZooKeeperOffsets
from metamq.errors import MetamqError
from metamq.zk.cluster.topics import TopicConfig, TopicStore
from metamq.zk.errors import ConnectionLost
from metamq.zk.groups.members import owned_partitions
from metamq.zk.groups.plans import read_plan
from metamq.zk.partitions import TopicPartition
from metamq.zk.session.lease import Lease
from metamq.zk.session.session import Session

GROUP = "etl"


class Referee:
    """Who consumes what at this moment, over all members of a test."""

    def __init__(self) -> None:
        self.owners: dict[TopicPartition, Member] = {}
        self.beginnings: Counter[TopicPartition] = Counter()
        self.samples = 0

    def begins(self, member: Member, tp: TopicPartition) -> None:
        assert tp not in self.owners, f"{tp} is consumed by {self.owners[tp].name} and {member.name}"
        self.owners[tp] = member
        self.beginnings[tp] += 1

    def ends(self, member: Member, tp: TopicPartition) -> None:
        if self.owners.get(tp) is member:
            del self.owners[tp]

    async def sample(self, session: Session) -> None:
        """Whoever consumes a partition for as long as a look at the owner nodes takes, is its owner there."""
        while True:
            before, beginnings = dict(self.owners), Counter(self.beginnings)
            try:
                nodes = await owned_partitions(session, GROUP)
            except ConnectionLost:
                await session.connected()
                continue
            for tp, member in before.items():
                if self.owners.get(tp) is member and self.beginnings[tp] == beginnings[tp]:
                    assert nodes.get(tp) == member.name, (tp, member.name, nodes.get(tp))
            self.samples += 1
            await asyncio.sleep(0.005)


class Member:
    """A consumer as the listener sees it: counts one message up each time it is asked to revoke."""

    def __init__(self, name: str, session: Session, referee: Referee, topics: Sequence[str], strategy: str) -> None:
        self.name = name
        self.session = session
        self.referee = referee
        self.consuming: dict[TopicPartition, AssignedPartition] = {}
        self.events: list[str] = []
        self.failure: MetamqError | None = None
        self.is_paused = False
        self.lets_go = asyncio.Event()
        self.lets_go.set()
        self.lease = Lease(session)
        self.listener = ZKLoadRebalanceListener(
            session, GROUP, name, topics, strategy, ZooKeeperOffsets(session), self, self.lease
        )

    async def assigned(self, partitions: Sequence[AssignedPartition]) -> None:
        for assigned in partitions:
            if not self.is_paused:
                self.referee.begins(self, assigned.tp)
            self.consuming[assigned.tp] = assigned
        self.events.append(f"assigned {len(partitions)}")

    async def revoke(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, tuple[int, int] | None]:
        self.events.append(f"revoke {len(partitions)}")
        await self.lets_go.wait()
        finals = {}
        for tp in partitions:
            if tp in self.consuming:
                finals[tp] = (self.next_offset(tp), 1)
                self.stop_consuming(tp)
        return finals

    def next_offset(self, tp: TopicPartition) -> int:
        committed = self.consuming[tp].committed
        return committed.offset + 1 if committed else 1

    def stop_consuming(self, tp: TopicPartition) -> None:
        del self.consuming[tp]
        self.referee.ends(self, tp)

    def lost(self, partitions: Sequence[TopicPartition]) -> None:
        self.events.append(f"lost {len(partitions)}")
        for tp in partitions:
            self.stop_consuming(tp)

    def failed(self, error: MetamqError) -> None:
        self.failure = error

    def pause(self) -> None:
        """What a consumer does when its lease ends: it holds its partitions, but delivers nothing."""
        self.is_paused = True
        for tp in self.consuming:
            self.referee.ends(self, tp)

    def go_on(self) -> None:
        """What a consumer does when it has a lease again."""
        self.is_paused = False
        for tp in self.consuming:
            self.referee.begins(self, tp)

    def die(self) -> None:
        """The process is gone: whatever it held or is still given, it consumes no more."""
        self.is_paused = True
        for tp in list(self.consuming):
            self.stop_consuming(tp)


class Group:
    """The members of one test."""

    def __init__(self, servers: str, session: Session, is_shared: bool) -> None:
        self.servers = servers
        self.session = session
        self.is_shared = is_shared
        self.topics = TopicStore(session)
        self.referee = Referee()
        self.members: list[Member] = []
        self._sampler = asyncio.create_task(self.referee.sample(session))

    async def member(
        self, name: str, topics: Sequence[str] = ("t",), strategy: str = "range", timeout_ms: int = 10_000
    ) -> Member:
        """A member that is not started yet. Its session of ZooKeeper is its own, or that of all members."""
        shared_by = GROUP if self.is_shared else None
        session = await Session.open(self.servers, timeout_ms=timeout_ms, shared_by=shared_by)
        member = Member(name, session, self.referee, topics, strategy)
        self.members.append(member)
        return member

    async def join(self, name: str, topics: Sequence[str] = ("t",), strategy: str = "range") -> Member:
        member = await self.member(name, topics, strategy)
        await member.listener.start()
        return member

    async def settled(self, partitions: int, *members: Member, limit_s: float = 60.0) -> None:
        """Until the plan is one for these members, and all partitions are consumed as it says."""
        deadline = time.monotonic() + limit_s
        names = {member.name for member in members}
        while True:
            await self.until(lambda: len(self.referee.owners) == partitions, limit_s)
            stored = await read_plan(self.session, GROUP)
            owners = {tp: member.name for tp, member in self.referee.owners.items()}
            plan = stored and stored.plan
            if plan and set(plan.inputs.members) == names and plan.assignment == owners:
                return
            assert time.monotonic() < deadline, self.report()
            await asyncio.sleep(0.002)

    async def until(self, condition: Callable[[], object], limit_s: float = 60.0) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, self.report()
            if self._sampler.done():
                self._sampler.result()
            await asyncio.sleep(0.002)

    def report(self) -> str:
        lines = [f"{member.name}: {len(member.consuming)} {member.events}" for member in self.members]
        return "\n".join([*lines, *(str(member.listener.health()) for member in self.members)])

    async def close(self) -> None:
        if self._sampler.done():
            self._sampler.result()
        self._sampler.cancel()
        for member in self.members:
            member.lets_go.set()
        await asyncio.gather(*(member.listener.stop() for member in self.members))
        await asyncio.gather(*(member.session.close() for member in self.members))


@contextlib.asynccontextmanager
async def group_with(servers: str, *topics: TopicConfig, is_shared: bool = False) -> AsyncIterator[Group]:
    async with await Session.open(servers) as session:
        group = Group(servers, session, is_shared)
        for config in topics:
            await group.topics.create(config)
        try:
            yield group
        finally:
            await group.close()


async def until(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        await asyncio.sleep(0.002)


async def expire(member: Member, *sharers: Member) -> None:
    """End a member's session as the server does when it hears nothing of it for too long: after the lease's end.

    `sharers` are the other members in the same session of ZooKeeper.
    """
    session, all_of_them = member.session, {member, *sharers}

    def end() -> None:
        client = KazooClient(session.servers.partition("/")[0], client_id=session._channel.link._client.client_id)
        with contextlib.suppress(KazooTimeoutError):
            client.start(2)
        client.stop()
        client.close()

    generation = session.generation
    for one in all_of_them:
        one.pause()
    while session.generation == generation:
        # One that is just reconnecting takes its session back, and then it is not ended.
        await session.connected()
        await asyncio.to_thread(end)
        with contextlib.suppress(AssertionError):
            await until(lambda: session.generation > generation, limit_s=1)
    await session.connected()
    for one in all_of_them:
        one.go_on()
