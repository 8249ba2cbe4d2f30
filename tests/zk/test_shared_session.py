"""Clients of one process on one session of ZooKeeper: none ends, loses or takes what belongs to another."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from metamq.errors import ClosedError, ConnectError
from metamq.zk.errors import ConnectionLost
from metamq.zk.groups.members import Member, join, leave
from metamq.zk.groups.ownership import NotYet, Ownership, claim, release
from metamq.zk.nodes import ANY_VERSION, Create, Node
from metamq.zk.partitions import TopicPartition
from metamq.zk.server.embedded import EmbeddedZooKeeper
from metamq.zk.server.ports import free_port
from metamq.zk.session import channel as channel_module
from metamq.zk.session.session import Session, SessionState

Until = Callable[..., Awaitable[None]]
Expire = Callable[[Session], None]

TP = TopicPartition("flights", "0-3")
shared = partial(Session.open, shared_by="clients")


def member(name: str) -> Member:
    return Member(name, ("flights",), "range", "here", 1, 2, 3, 4, "0", 10_000)


def ignore() -> None:
    pass


async def claimed(session: Session, name: str, freed: Callable[[], None] = ignore) -> Ownership | NotYet:
    return await claim(session, "etl", TP, "0123456789abcdef", name, freed=freed)


def test_clients_of_one_identity_share_a_session_and_its_threads(servers: str, until: Until) -> None:
    async def main() -> None:
        threads = set(threading.enumerate())
        one = await shared(servers)
        with_one = set(threading.enumerate())
        two, three = await asyncio.gather(shared(servers), shared(servers))
        assert one.session_id == two.session_id == three.session_id
        assert set(threading.enumerate()) == with_one
        others = [
            await Session.open(servers),
            await Session.open(servers, shared_by="others"),
            await shared(servers, timeout_ms=20_000),
            await shared(f"{servers}/below"),
            await shared(servers, root="/other"),
        ]
        assert len({one.session_id, *(other.session_id for other in others)}) == 6
        await asyncio.gather(*(session.close() for session in (one, two, three, *others)))
        await until(lambda: set(threading.enumerate()) == threads)
        async with await shared(servers) as later:  # the channel has ended
            assert later.session_id != one.session_id

    asyncio.run(main())


def test_loops_do_not_share(servers: str) -> None:
    ids: list[int] = []
    both = threading.Barrier(2)

    async def main() -> None:
        async with await shared(servers) as session:
            await asyncio.to_thread(both.wait, 60)
            ids.append(session.session_id)
            await asyncio.to_thread(both.wait, 60)

    threads = [threading.Thread(target=lambda: asyncio.run(main())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(ids)) == 2


def test_the_nodes_of_a_closed_client_go_and_those_of_the_others_stay(servers: str) -> None:
    async def main() -> None:
        async with await shared(servers) as stays, await Session.open(servers) as outside:
            leaves = await shared(servers)
            await leaves.create("/of-one", b"one", ephemeral=True)
            await leaves.set("/of-one", b"another content", ANY_VERSION)
            await leaves.multi([Create("/also", b"one", ephemeral=True), Create("/lasting", b"one")])
            await stays.create("/of-two", b"two", ephemeral=True)
            request = asyncio.create_task(leaves.get("/"))
            calls: list[str] = []
            await leaves.get("/of-two", lambda: calls.append("watch"))
            await leaves.close()
            assert sorted(await outside.children("/")) == ["lasting", "of-two"]
            await asyncio.wait({request})
            assert calls == ["watch"]
            assert (leaves.closed, leaves.state) == (True, SessionState.LOST)
            with pytest.raises(ClosedError):
                await leaves.get("/")
            assert stays.state is SessionState.CONNECTED
            await stays.sync()

    asyncio.run(main())


@pytest.mark.slow
def test_a_client_that_closes_without_zookeeper_leaves_nothing_either(victim: EmbeddedZooKeeper, until: Until) -> None:
    async def main() -> None:
        async with await shared(victim.address, timeout_ms=30_000) as stays:
            leaves = await shared(victim.address, timeout_ms=30_000)
            await join(stays, "etl", member("stays"), left=ignore)
            await join(leaves, "etl", member("leaves"), left=ignore)
            assert isinstance(await claimed(leaves, "leaves"), Ownership)
            session_id = stays.session_id
            victim.kill()
            await until(lambda: stays.state is SessionState.SUSPENDED)
            await leaves.close()
            freed = asyncio.Event()
            victim.restart()
            await asyncio.wait_for(stays.connected(), 60)
            while isinstance(await claimed(stays, "stays", freed.set), NotYet):
                await asyncio.wait_for(freed.wait(), 60)
            gone = asyncio.Event()
            while await join(stays, "etl", member("leaves"), left=gone.set) is not None:
                await asyncio.wait_for(gone.wait(), 60)
                gone.clear()
            assert stays.session_id == session_id

    asyncio.run(main())


def test_a_clean_up_does_not_trust_a_server_that_lags_behind(
    servers: str, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[Session] = set()
    read, sync = Session.get_or_none, Session.sync

    async def stale_read(self: Session, path: str) -> Node | None:
        return await read(self, path) if self in synced else None

    async def noted_sync(self: Session, *, is_urgent: bool = False) -> None:
        await sync(self, is_urgent=is_urgent)
        synced.add(self)

    async def main() -> None:
        async with await shared(servers) as stays:
            leaves = await shared(servers)
            await leaves.create("/lagging", ephemeral=True)
            monkeypatch.setattr(Session, "get_or_none", stale_read)
            monkeypatch.setattr(Session, "sync", noted_sync)
            await leaves.close()
            await until(lambda: not stays._channel.ephemerals)
            assert await stays.exists("/lagging") is None

    asyncio.run(main())


def test_clients_that_all_close_without_zookeeper_leave_no_task(victim: EmbeddedZooKeeper, until: Until) -> None:
    async def main() -> None:
        sessions = [await shared(victim.address) for _ in range(2)]
        for session in sessions:
            await session.create(f"/{id(session)}", ephemeral=True)
        victim.kill()
        await until(lambda: sessions[0].state is SessionState.SUSPENDED)
        for session in sessions:
            await session.close()
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
        victim.restart()

    asyncio.run(main())


def test_no_client_takes_what_another_one_of_the_session_has(servers: str) -> None:
    async def main() -> None:
        async with await shared(servers) as one, await shared(servers) as two:
            held = await claimed(one, "one")
            assert isinstance(held, Ownership)
            freed = asyncio.Event()
            assert await claimed(two, "two", freed.set) == NotYet(TP, "one")
            assert await claimed(two, "one", freed.set) == NotYet(TP, "one")  # not even with its name
            assert isinstance(await claimed(one, "one"), Ownership)
            await release(one, await claimed(one, "one"))  # type: ignore[arg-type]
            await asyncio.wait_for(freed.wait(), 60)
            assert isinstance(await claimed(two, "two"), Ownership)
            assert await claimed(one, "one") == NotYet(TP, "two")
            await join(one, "etl", member("one"), left=ignore)
            taken = await join(two, "etl", member("one"), left=ignore)
            assert taken is not None
            await leave(two, "etl", "one")
            assert await one.exists(one.paths.member("etl", "one")) is not None

    asyncio.run(main())


def test_a_claim_whose_answer_was_lost_is_taken_over_by_its_client_alone(servers: str, until: Until) -> None:
    async def main() -> None:
        async with await shared(servers) as one, await shared(servers) as two:
            assert isinstance(await claimed(two, "two"), Ownership)
            await release(two, await claimed(two, "two"))  # type: ignore[arg-type]
            for _ in range(20):
                asking = asyncio.create_task(claimed(one, "one"))
                while not asking.done() and await two.exists(two.paths.owner("etl", *TP)) is None:
                    pass
                asking.cancel()
                await asyncio.wait({asking})
                assert await claimed(two, "two") == NotYet(TP, "one")
                held = await claimed(one, "one")
                assert isinstance(held, Ownership)
                await release(one, held)

    asyncio.run(main())


def test_the_end_of_the_session_is_that_of_all_its_clients(servers: str, expire: Expire, until: Until) -> None:
    async def main() -> None:
        async with await shared(servers) as one, await shared(servers) as two:
            first, states = one.session_id, {one: [], two: []}  # type: ignore[var-annotated]
            for session in (one, two):
                session.on_state(states[session].append)
                await join(session, "etl", member(str(session is one)), left=ignore)
            await asyncio.to_thread(expire, one)
            await until(lambda: one.generation == two.generation == 2)
            await asyncio.gather(one.connected(), two.connected())
            assert one.session_id == two.session_id != first
            await until(lambda: all(SessionState.LOST in seen for seen in states.values()))
            assert await one.children(one.paths.members("etl")) == []
            assert await join(one, "etl", member("True"), left=ignore) is None

    asyncio.run(main())


def test_the_session_keeps_nothing_of_a_closed_client(servers: str) -> None:
    class Part:
        def changed(self) -> None:
            """A watch."""

    async def main() -> None:
        async with await shared(servers) as stays:
            client, part = await shared(servers), Part()
            await client.get("/", part.changed)
            await client.children("/", part.changed)
            await client.exists("/nothing", part.changed)
            client.on_state(lambda _state, part=part: None)  # type: ignore[misc]
            refs = weakref.ref(client), weakref.ref(part)
            reading = asyncio.create_task(client.get("/", part.changed))
            await asyncio.sleep(0)  # kazoo has the request: it keeps the watch when the answer comes
            await client.close()
            await asyncio.wait({reading})
            await stays.sync()
            assert isinstance(reading.exception(), ConnectionLost)
            del client, part, reading
            gc.collect()
            assert [ref() for ref in refs] == [None, None]
            await stays.sync()

    asyncio.run(main())


def test_a_session_has_a_limited_number_of_clients_and_nodes(servers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "CLIENTS_MAX", 2)
    monkeypatch.setattr(channel_module, "ROOM_MAX", 3 * (len(servers.partition("/")[2]) + len("//n0") + 4))

    async def main() -> None:
        sessions = [await shared(servers) for _ in range(5)]
        ids = [session.session_id for session in sessions]
        assert ids[0] == ids[1] != ids[2] == ids[3] != ids[4] != ids[0]
        for number in range(3):
            await sessions[0].create(f"/n{number}", ephemeral=True)
        await sessions.pop(1).close()  # one client is left, with many nodes
        sessions.append(await shared(servers))
        assert sessions[-1].session_id == ids[4]
        await sessions[0].delete("/n1", 0)
        sessions.append(await shared(servers))
        assert sessions[-1].session_id == ids[0]
        await asyncio.gather(*(session.close() for session in sessions))

    asyncio.run(main())


def test_a_client_with_many_nodes_has_a_session_with_room_for_them(
    servers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "ROOM_MAX", 10)

    async def main() -> None:
        one, two = await shared(servers), await shared(servers)
        assert one.reserve(6)
        assert one.reserve(5)
        assert not two.reserve(5)
        assert two.reserve(4)
        three, small, large = [await shared(servers, room=room) for room in (4, 0, 50)]
        assert len({session.session_id for session in (one, three, large)}) == 3
        assert small.session_id == two.session_id == one.session_id
        await one.close()
        assert two.reserve(9)
        assert not small.reserve(1)
        await asyncio.gather(two.close(), three.close(), large.close())
        assert small.reserve(50)  # alone, it has as many as it needs
        await small.close()

    asyncio.run(main())


def test_who_cannot_connect_takes_nobody_along(victim: EmbeddedZooKeeper, until: Until) -> None:
    async def main() -> None:
        threads = set(threading.enumerate())
        nothing = f"127.0.0.1:{free_port()}"
        outcomes = await asyncio.gather(
            *(shared(nothing, connect_timeout_s=limit_s) for limit_s in (0.2, 0.4)), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes] == [ConnectError, ConnectError]
        await until(lambda: set(threading.enumerate()) == threads)
        async with await shared(victim.address) as stays:
            victim.kill()
            await until(lambda: stays.state is SessionState.SUSPENDED)
            with pytest.raises(ConnectError):
                await shared(victim.address, connect_timeout_s=0.2)
            victim.restart()
            await asyncio.wait_for(stays.connected(), 60)
            victim.kill()
            with pytest.raises(ConnectionLost):
                await stays.sync()
            victim.restart()

    asyncio.run(main())


def test_a_forks_child_begins_a_session_of_its_own(servers: str) -> None:
    async def main() -> None:
        async with await shared(servers) as session:
            reader, writer = os.pipe()
            child = os.fork()
            if not child:
                os.write(writer, str(len(channel_module._shared.channels)).encode())
                os._exit(0)
            await asyncio.to_thread(os.waitpid, child, 0)
            assert os.read(reader, 10) == b"0"
            os.close(reader)
            os.close(writer)
            await session.sync()

    asyncio.run(main())


def test_a_loop_that_ended_before_its_clients_is_forgotten(servers: str) -> None:
    async def main() -> Session:
        return await shared(servers)

    left = asyncio.run(main())

    async def later() -> None:
        async with await shared(servers) as session:
            assert session.session_id != left.session_id
            assert len(channel_module._shared.channels) == 1

    asyncio.run(later())
    stopped = threading.Event()
    left._channel.link.stop(stopped.set)
    assert stopped.wait(60)
