"""The session when the server is killed, frozen, unreachable, or has ended the session."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable

import pytest

from metamq.errors import ConnectError
from metamq.zk.errors import ConnectionLost, NodeExists, SessionExpired
from metamq.zk.nodes import ANY_VERSION, Create, Node
from metamq.zk.server.embedded import EmbeddedZooKeeper
from metamq.zk.session.session import Session, SessionState
from tests.zk.listeners import black_hole

Expire = Callable[[Session], None]
Until = Callable[..., Awaitable[None]]


def test_a_killed_server_suspends_and_a_restarted_one_resumes_the_session(
    victim: EmbeddedZooKeeper, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        states: list[SessionState] = []
        async with await Session.open(victim.address, timeout_ms=30_000, on_state=states.append) as session:
            node = await session.create("/e", ephemeral=True)
            calls: list[int] = []
            await session.get("/e", lambda: calls.append(1))
            victim.kill()
            await until(lambda: session.state is SessionState.SUSPENDED)
            await until(lambda: calls == [1])
            with pytest.raises(ConnectionLost, match="it was lost, nothing was sent") as failure:
                await session.set("/e", b"", ANY_VERSION)
            assert failure.value.outcome == "not_done"
            assert failure.value.retriable
            victim.restart()
            await asyncio.wait_for(session.connected(), 60)
            assert (session.generation, session.session_id) == (1, node.ephemeral_owner)
            assert await session.get("/e") == node
            await until(lambda: states == [SessionState.SUSPENDED, SessionState.CONNECTED])
            assert calls == [1]

    with caplog.at_level(logging.INFO, "metamq.zk"):
        asyncio.run(main())
    assert [record.getMessage().split(": ")[1].split(",")[0] for record in caplog.records] == [
        "connected",
        "connection lost",
        "connected",
    ]
    assert all(record.exc_info is None for record in caplog.records)


def test_an_expired_session_is_followed_by_a_new_one(servers: str, until: Until, expire: Expire) -> None:
    async def main() -> None:
        states: list[SessionState] = []
        async with await Session.open(servers, on_state=states.append) as session:
            first = session.session_id
            await session.create("/e", ephemeral=True)
            calls: list[int] = []
            assert await session.get_or_none("/x", lambda: calls.append(1)) is None
            await asyncio.to_thread(expire, session)
            await until(lambda: session.generation == 2)
            await until(lambda: states[-2:] == [SessionState.LOST, SessionState.CONNECTED])
            # Before that, it may have won itself back.
            assert set(states[:-2:2]) == {SessionState.SUSPENDED}
            assert set(states[1:-2:2]) <= {SessionState.CONNECTED}
            await session.connected()
            assert session.session_id != first
            assert calls == [1]
            assert await session.exists("/e") is None
            remove = session.on_state(lambda _: calls.append(2))
            remove()
            assert (await session.create("/e", ephemeral=True)).ephemeral_owner == session.session_id

    asyncio.run(main())


def test_a_server_frozen_for_longer_than_the_time_out_ends_the_session(victim: EmbeddedZooKeeper, until: Until) -> None:
    async def main() -> None:
        async with await Session.open(victim.address, timeout_ms=1_000) as session:
            assert session.negotiated_timeout_ms == 1_000
            # On thawing, the server may see the client's return before its own clock: then nothing expires.
            for _ in range(5):
                victim.freeze()
                frozen = time.monotonic()
                await until(lambda since=frozen: time.monotonic() - since > 1.7)
                victim.thaw()
                await until(lambda: session.state is SessionState.CONNECTED)
                with contextlib.suppress(ConnectionLost):
                    await session.connected()
                    await session.sync()
                if session.generation > 1:
                    break
            assert session.generation > 1

    asyncio.run(main())


def test_no_request_to_a_frozen_server_outlives_the_session_time_out(victim: EmbeddedZooKeeper) -> None:
    """Requests keep coming: each of them postpones kazoo's own ping, and with it kazoo's finding out."""

    async def slowest() -> float | None:
        """How long the slowest request took; None: the connection was lost before the server was frozen."""
        async with await Session.open(victim.address, timeout_ms=1_500) as session:
            outcomes: list[tuple[float, ConnectionLost]] = []

            async def ask(number: int) -> None:
                started = time.monotonic()
                kinds: list[Callable[[], Awaitable[object]]] = [
                    lambda: session.get("/n"),
                    lambda: session.create("/a/b/c", makepath=True),
                    lambda: session.get_or_none("/x", lambda: None),
                    lambda: session.ensure("/d/e"),
                    lambda: session.multi([Create("/m")]),
                    session.sync,
                ]
                try:
                    await kinds[number % len(kinds)]()
                except ConnectionLost as error:
                    outcomes.append((time.monotonic() - started, error))

            victim.freeze()
            # More than are handed over at once: the others wait for their turn, and not for ever either.
            requests = [asyncio.create_task(ask(number)) for number in range(300)]
            started = time.monotonic()
            while time.monotonic() - started < 1.2:
                requests.append(asyncio.create_task(ask(len(requests))))
                await asyncio.sleep(0.02)
            await asyncio.gather(*requests)
            victim.thaw()
            assert len(outcomes) == len(requests)
            if {error.outcome for _, error in outcomes} == {"unknown", "not_done"}:
                return max(elapsed for elapsed, _ in outcomes)
            return None

    for _ in range(10):  # it may be the machine that is slow
        took_s = asyncio.run(slowest())
        if took_s is not None and took_s < 1.5:
            return
    raise AssertionError(f"the slowest request took {took_s} s")


@pytest.mark.slow
def test_no_request_is_carried_out_in_a_later_session(servers: str, until: Until, expire: Expire) -> None:
    """Names carry the session in which they were asked for, owners the one in which ZooKeeper made them."""

    async def main() -> None:
        async with await Session.open(servers) as session, await Session.open(servers) as observer:
            await session.ensure("/made")
            made, lost = 0, 0
            stop = False

            async def pump(lane: int) -> None:
                nonlocal made, lost
                number = 0
                while not stop:
                    number += 1
                    asked_in = session.session_id
                    try:
                        node = await session.create(f"/made/{asked_in}-{lane}-{number}", ephemeral=True)
                        assert node.ephemeral_owner == asked_in
                        made += 1
                    except ConnectionLost:
                        lost += 1
                        # Not `connected()`: requests are to come at every moment of the change of sessions.
                        await asyncio.sleep(0.001)

            pumps = [asyncio.create_task(pump(lane)) for lane in range(20)]
            for round_number in range(1, 13):
                await until(lambda target=made + 50: made > target)
                await asyncio.to_thread(expire, session)
                await until(lambda generation=round_number: session.generation > generation)
            stop = True
            await asyncio.gather(*pumps)
            await observer.sync()
            for name in await observer.children("/made"):
                stat = await observer.exists(f"/made/{name}")
                assert stat is None or name.rpartition("-")[0].rpartition("-")[0] == str(stat.ephemeral_owner)
            assert made > 500
            assert lost >= 12

    asyncio.run(main())


def test_a_request_of_a_session_whose_end_the_loop_has_not_seen_is_refused(servers: str, expire: Expire) -> None:
    async def main() -> None:
        async with await Session.open(servers) as session:
            first = session.session_id
            expire(session)
            deadline = time.monotonic() + 60
            while session._channel.link.live_session_id in (None, first):
                assert time.monotonic() < deadline
                time.sleep(0.01)  # noqa: ASYNC251
            assert (session.session_id, session.state) == (first, SessionState.CONNECTED)
            with pytest.raises(ConnectionLost) as failure:
                await session.create("/late", ephemeral=True)
            assert failure.value.outcome == "not_done"
            await session.connected()
            assert session.generation == 2
            assert await session.exists("/late") is None

    asyncio.run(main())


def test_a_write_of_an_expired_session_says_that_its_outcome_is_unknown(
    servers: str, until: Until, expire: Expire
) -> None:
    async def main() -> None:
        async with await Session.open(servers) as session:
            await session.create("/n")
            seen: list[Exception] = []

            async def pump() -> None:
                while session.generation == 1:
                    try:
                        await session.set("/n", b"", ANY_VERSION)
                    except ConnectionLost as error:
                        seen.append(error)

            pumping = asyncio.create_task(pump())
            await asyncio.to_thread(expire, session)
            await asyncio.wait_for(pumping, 60)
            assert seen
            assert all(isinstance(error, SessionExpired) or error.retriable for error in seen)  # type: ignore[attr-defined]

    asyncio.run(main())


@pytest.mark.slow
def test_who_tries_again_at_once_does_not_hang_the_loop(victim: EmbeddedZooKeeper) -> None:
    async def main() -> None:
        async with await Session.open(victim.address, timeout_ms=8_000) as session:

            async def stubborn() -> Node:
                while True:
                    try:
                        return await session.create("/n", b"", makepath=True)
                    except NodeExists:
                        return await session.get("/n")
                    except ConnectionLost:
                        await session.connected()

            async def writes() -> None:
                while session.state is SessionState.CONNECTED:
                    await stubborn()

            writing = [asyncio.create_task(writes()) for _ in range(5)]
            await session.sync()
            victim.restart()
            await asyncio.wait_for(session.connected(), 60)
            for task in writing:
                task.cancel()
            await asyncio.gather(*writing, return_exceptions=True)

    asyncio.run(main())


def test_an_answer_that_came_while_the_loop_hung_counts(servers: str) -> None:
    async def main() -> None:
        async with (
            await Session.open(servers) as patient,
            await Session.open(servers, timeout_ms=1_000) as session,
        ):
            await patient.create("/n", b"x")
            for _ in range(20):
                await session.connected()
                request = asyncio.create_task(session.get("/n"))
                await asyncio.sleep(0)
                time.sleep(0.8)  # noqa: ASYNC251
                # On a machine under load it may take longer, and so short a session may end.
                with contextlib.suppress(ConnectionLost):
                    assert (await request).data == b"x"
                    return
            raise AssertionError("no answer counts")

    asyncio.run(main())


@pytest.mark.parametrize("fault", ["freeze", "kill"])
def test_close_is_quick_without_a_server(
    victim: EmbeddedZooKeeper, fault: str, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        threads = set(threading.enumerate())
        session = await Session.open(victim.address, timeout_ms=20_000)
        getattr(victim, fault)()
        started = time.monotonic()
        request = asyncio.create_task(session.get("/"))
        await asyncio.sleep(0)
        await session.close()
        assert time.monotonic() - started < 10  # the session has 20
        with pytest.raises(ConnectionLost):
            await request
        await until(lambda: set(threading.enumerate()) == threads)

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    if fault == "freeze":
        victim.thaw()
    assert all(record.exc_info is None for record in caplog.records)


def test_a_server_that_answers_nothing_is_given_up(victim: EmbeddedZooKeeper, until: Until) -> None:
    async def main() -> None:
        threads = set(threading.enumerate())
        with black_hole() as port:
            victim.freeze()
            for address in (f"127.0.0.1:{port}", victim.address):
                started = time.monotonic()
                with pytest.raises(ConnectError):
                    await Session.open(address, connect_timeout_s=0.3)
                assert time.monotonic() - started < 9  # of 10 by default
                await until(lambda: set(threading.enumerate()) == threads)
            victim.thaw()

    asyncio.run(main())


def test_a_host_in_the_dark_does_not_keep_from_the_others(
    zookeeper: EmbeddedZooKeeper, victim: EmbeddedZooKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    # kazoo begins with any of them: here with the first.
    monkeypatch.setattr("kazoo.protocol.connection.random.shuffle", lambda hosts: None)

    async def reached(servers: str) -> float:
        started = time.monotonic()
        async with await Session.open(servers, timeout_ms=2_000) as session:
            with contextlib.suppress(ConnectionLost):
                await session.sync()
            return time.monotonic() - started

    async def main() -> None:
        with black_hole() as port:
            victim.freeze()
            for dark in (f"127.0.0.1:{port}", victim.address):
                for _ in range(10):  # it may be the machine that is slow
                    took_s = await reached(f"{dark},{zookeeper.address}")
                    if took_s < 1.5:
                        break
                assert took_s < 1.5
            victim.thaw()

    asyncio.run(main())


def test_a_server_that_speaks_nonsense_is_survived(victim: EmbeddedZooKeeper, until: Until) -> None:
    """An answer to a request that was never sent ends kazoo's thread; here it ends the connection."""

    async def main() -> None:
        async with await Session.open(victim.address) as session:
            first = session.session_id
            session._channel.link._connection._xid = 77_000
            session._channel.link._client._pending.append((None, session._channel.link._handler.async_result(), 1))
            with pytest.raises(ConnectionLost) as failure:
                await session.get("/")
            assert failure.value.outcome == "unknown"
            await asyncio.wait_for(session.connected(), 60)
            await until(lambda: session.state is SessionState.CONNECTED)
            await session.sync()
            assert session.session_id == first

    asyncio.run(main())
