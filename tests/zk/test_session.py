"""The session against the real server: operations, versions, transactions, watches."""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
from kazoo.security import make_acl

from metamq.errors import ClosedError, ConfigError, MessageTooLarge, NotAuthorized
from metamq.zk.errors import BadVersion, ConnectionLost, NodeExists, NoNode, NotEmpty, ZooKeeperError
from metamq.zk.nodes import ANY_VERSION, Check, Create, Delete, Node, SetData
from metamq.zk.session.session import Session, SessionState
from metamq.zk.session.watches import OneWatch

Until = Callable[..., Awaitable[None]]


def run(servers: str, scenario: Callable[[Session], Awaitable[None]]) -> None:
    async def main() -> None:
        async with await Session.open(servers, timeout_ms=30_000) as session:
            await scenario(session)

    asyncio.run(main())


def test_a_node_is_created_read_written_and_deleted(servers: str) -> None:
    async def scenario(session: Session) -> None:
        created = await session.create("/a/b", b"one", makepath=True)
        assert created == await session.get("/a/b") == await session.get_or_none("/a/b")
        assert (created.data, created.version, created.ephemeral_owner) == (b"one", 0, 0)
        assert created.czxid == created.mzxid > 0
        assert abs(created.ctime_ms - time.time() * 1000) < 60_000
        written = await session.set("/a/b", b"two", created.version)
        assert written == await session.get("/a/b")
        assert (written.data, written.version, written.czxid) == (b"two", 1, created.czxid)
        stat = await session.exists("/a/b")
        assert stat is not None
        assert stat.mzxid == written.mzxid
        assert await session.children("/a") == ["b"]
        await session.delete("/a/b", written.version)
        assert await session.get_or_none("/a/b") is None
        assert await session.exists("/a/b") is None
        assert await session.children("/a") == []

    run(servers, scenario)


def test_a_chroot_is_made_only_where_that_was_asked_for(servers: str) -> None:
    async def main() -> None:
        below = f"{servers}/one/two"
        async with await Session.open(below) as session, await Session.open(servers) as outside:
            assert (await session.get_or_none("/a"), await session.children_or_none("/")) == (None, None)
            missing = f"there is no /{below.partition('/')[2]} in ZooKeeper at {below}"
            for write in (session.ensure("/a/b"), session.create("/a/b", makepath=True)):
                with pytest.raises(ConfigError, match=missing) as caught:
                    await write
                assert "Give the chroot that the brokers have" in caught.value.hint
            with pytest.raises(NoNode):
                await session.create("/a")
            assert await outside.children("/") == []
            noticed = asyncio.Event()
            assert await session.children_or_none("/", noticed.set) is None
            async with await Session.open(below, make_chroot=True):
                assert await outside.children("/one") == ["two"]
            await noticed.wait()
            await session.ensure("/a/b")
            assert await outside.children("/one/two/a") == ["b"]

    asyncio.run(main())


def test_an_ephemeral_node_carries_the_session(servers: str) -> None:
    async def scenario(session: Session) -> None:
        node = await session.create("/e", ephemeral=True)
        assert node.ephemeral_owner == session.session_id

    async def main() -> None:
        run_in = await Session.open(servers)
        await scenario(run_in)
        async with await Session.open(servers) as other:
            assert await other.exists("/e")
            await run_in.close()
            assert await other.exists("/e") is None

    asyncio.run(main())


def test_a_stale_version_changes_nothing(servers: str) -> None:
    async def scenario(session: Session) -> None:
        await session.create("/n", b"0")
        await session.set("/n", b"1", 0)
        with pytest.raises(BadVersion) as failure:
            await session.set("/n", b"2", 0)
        assert (failure.value.path, failure.value.index, failure.value.outcome) == ("/n", None, "not_done")
        with pytest.raises(BadVersion):
            await session.delete("/n", 0)
        assert (await session.get("/n")).data == b"1"
        assert (await session.set("/n", b"3", ANY_VERSION)).version == 2

    run(servers, scenario)


def test_of_many_writers_of_one_version_one_wins(servers: str) -> None:
    async def scenario(session: Session) -> None:
        await session.create("/n")
        results = await asyncio.gather(
            *(session.set("/n", str(number).encode(), 0) for number in range(50)), return_exceptions=True
        )
        won = [result for result in results if isinstance(result, Node)]
        assert len(won) == 1
        assert all(isinstance(result, BadVersion) for result in results if result not in won)
        assert await session.get("/n") == won[0]

    run(servers, scenario)


def test_many_nodes_are_read_by_few_requests(servers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(session: Session) -> None:
        await session.ensure("/many")
        await session.multi([Create(f"/many/{number}", b"%d" % number) for number in range(250)])
        await session.set("/many/7", b"", 0)
        await session.create("/many/own", b"\xff", ephemeral=True)
        paths = [f"/many/{number}" for number in (7, 249, 999, 250, "own", 7, *range(250))]
        one_by_one = [await session.get_or_none(path) for path in paths]
        asked: list[int] = []
        submit = session._channel.link.submit
        monkeypatch.setattr(session._channel.link, "submit", lambda *given: asked.append(1) or submit(*given))
        assert await session.nodes(paths) == one_by_one
        assert len(asked) == 3
        assert await session.nodes([]) == []
        assert [node is None for node in one_by_one[:6]] == [False, False, True, True, False, False]

    run(servers, scenario)


def test_of_many_nodes_one_that_may_not_be_read_is_named(servers: str) -> None:
    async def scenario(session: Session) -> None:
        for name in ("one", "secret", "three"):
            await session.create(f"/read/{name}", makepath=True)
        await session.set_acl("/read/secret", [make_acl("world", "anyone", write=True)])
        with pytest.raises(NotAuthorized, match="/read/secret"):
            await session.nodes(["/read/one", "/read/secret", "/read/three"])
        with pytest.raises(ConfigError):
            await session.nodes(["/read/one", "read"])

    run(servers, scenario)


def test_refusals_name_the_node(servers: str) -> None:
    async def scenario(session: Session) -> None:
        await session.create("/p/c", makepath=True)
        await session.create("/e", ephemeral=True)
        refusals: list[tuple[Awaitable[object], type[ZooKeeperError], str]] = [
            (session.create("/p"), NodeExists, "/p"),
            (session.create("/x/y"), NoNode, "/x/y"),
            (session.get("/x"), NoNode, "/x"),
            (session.children("/x"), NoNode, "/x"),
            (session.set("/x", b"", ANY_VERSION), NoNode, "/x"),
            (session.delete("/x", ANY_VERSION), NoNode, "/x"),
            (session.delete("/p", ANY_VERSION), NotEmpty, "/p"),
            (session.create("/e/c", makepath=True), ZooKeeperError, "/e/c"),
        ]
        for operation, kind, path in refusals:
            with pytest.raises(kind, match=f"^znode {path}: ") as failure:
                await operation
            assert type(failure.value) is kind
            assert failure.value.path == path
            copy = pickle.loads(pickle.dumps(failure.value))
            assert (type(copy), str(copy), copy.path) == (kind, str(failure.value), path)

    run(servers, scenario)


def test_paths_that_are_none_and_data_too_large_are_refused_here(servers: str) -> None:
    async def scenario(session: Session) -> None:
        for path in ("", "x", "/x/", "//x", "/x//y"):
            with pytest.raises(ConfigError, match="is not a znode path"):
                await session.get(path)
        with pytest.raises(MessageTooLarge, match="the data of znode /x has 1,000,001 bytes"):
            await session.create("/x", bytes(1_000_001))
        with pytest.raises(MessageTooLarge):
            await session.multi([Create("/x", bytes(1_000_001))])
        await session.create("/x", bytes(1_000_000))

    run(servers, scenario)


def test_ensure_makes_what_is_missing_and_many_may_do_so_at_once(servers: str) -> None:
    async def scenario(session: Session) -> None:
        await asyncio.gather(*(session.ensure("/a/b/c/d") for _ in range(20)))
        await asyncio.gather(*(session.create(f"/a/x/y/{number}", makepath=True) for number in range(20)))
        assert len(await session.children("/a/x/y")) == 20
        await session.ensure("/a/b/c/d")

    run(servers, scenario)


def test_a_transaction_is_done_whole_and_tells_the_versions(servers: str) -> None:
    async def scenario(session: Session) -> None:
        await session.create("/n", b"0")
        await session.create("/old")
        versions = await session.multi(
            [
                Check("/n", 0),
                SetData("/n", b"1", 0),
                SetData("/n", b"2", 1),
                Create("/new", b"x", ephemeral=True),
                Delete("/old", 0),
            ]
        )
        assert versions == [None, 1, 2, 0, None]
        assert (await session.get("/n")).version == 2
        assert (await session.get("/new")).ephemeral_owner == session.session_id
        assert await session.exists("/old") is None
        assert await session.multi([]) == []

    run(servers, scenario)


def test_a_transaction_that_fails_changes_nothing_and_names_its_first_failure(servers: str) -> None:
    async def scenario(session: Session) -> None:
        await session.create("/n", b"0")
        cases: list[tuple[list[Create | SetData | Delete | Check], type[ZooKeeperError], int]] = [
            ([SetData("/n", b"1", 0), Create("/n"), SetData("/n", b"2", 7)], NodeExists, 1),
            ([SetData("/n", b"1", 3), Create("/n")], BadVersion, 0),
            ([SetData("/n", b"1", 0), Check("/n", 0)], BadVersion, 1),
            ([SetData("/n", b"1", 0), Create("/m"), Delete("/gone", 0)], NoNode, 2),
        ]
        for operations, kind, index in cases:
            with pytest.raises(kind, match=rf"\(operation {index} of the transaction\)") as failure:
                await session.multi(operations)
            assert (failure.value.index, failure.value.path) == (index, operations[index].path)
            assert (await session.get("/n")).data == b"0"
            assert await session.exists("/m") is None

    run(servers, scenario)


def test_a_watch_is_called_once_in_the_loop(servers: str, until: Until) -> None:
    async def scenario(session: Session) -> None:
        calls: list[str] = []
        loop_thread = threading.get_ident()

        def noting(name: str) -> Callable[[], None]:
            def note() -> None:
                assert threading.get_ident() == loop_thread
                calls.append(name)

            return note

        await session.create("/n")
        await session.get("/n", noting("get"))
        await session.get_or_none("/n", noting("get_or_none"))
        await session.exists("/n", noting("exists"))
        await session.children("/n", noting("children"))
        assert await session.get_or_none("/later", noting("created")) is None
        assert await session.exists("/later", noting("created, by exists")) is None
        await session.sync()
        assert calls == []

        await session.set("/n", b"1", 0)
        await until(lambda: len(calls) == 3)
        assert sorted(calls) == ["exists", "get", "get_or_none"]
        await session.create("/later")
        await session.create("/n/c")
        await until(lambda: len(calls) == 6)
        assert sorted(calls[3:]) == ["children", "created", "created, by exists"]

        for version in range(1, 4):
            await session.set("/n", b"more", version)
        await session.delete("/later", 0)
        await session.sync()
        assert len(calls) == 6

    run(servers, scenario)


def test_deleting_a_node_calls_the_watches_on_it(servers: str, until: Until) -> None:
    async def scenario(session: Session) -> None:
        calls: list[str] = []
        await session.create("/n")
        await session.get("/n", lambda: calls.append("get"))
        await session.children("/n", lambda: calls.append("children"))
        await session.delete("/n", 0)
        await until(lambda: sorted(calls) == ["children", "get"])

    run(servers, scenario)


def test_a_call_that_fails_leaves_no_watch(servers: str) -> None:
    async def scenario(session: Session) -> None:
        calls: list[int] = []
        with pytest.raises(NoNode):
            await session.get("/n", lambda: calls.append(1))
        with pytest.raises(NoNode):
            await session.children("/n", lambda: calls.append(2))
        await session.create("/n/c", makepath=True)
        await session.sync()
        assert calls == []

    run(servers, scenario)


def test_one_watch_is_left_however_often_something_is_read(servers: str, until: Until) -> None:
    async def scenario(session: Session) -> None:
        calls: list[None] = []
        one = OneWatch(lambda: calls.append(None))
        with pytest.raises(NoNode):
            await one.leave(partial(session.get, "/n"))
        await session.create("/n")
        for version in range(3):
            for _ in range(10):
                assert (await one.leave(partial(session.get, "/n"))).version == version
            await session.set("/n", b"", version)
            await until(lambda: calls)
            await session.sync()
            assert len(calls) == 1
            calls.clear()

    run(servers, scenario)


def test_no_watch_is_lost_to_a_change_at_the_same_moment(servers: str, until: Until) -> None:
    async def scenario(session: Session) -> None:
        await session.create("/n", b"0")
        async with await Session.open(servers) as other:

            async def change() -> None:
                for number in range(1, 201):
                    await other.set("/n", str(number).encode(), ANY_VERSION)

            changing = asyncio.create_task(change())
            changed = asyncio.Event()
            while (await session.get("/n", changed.set)).data != b"200":
                await asyncio.wait_for(changed.wait(), 60)
                changed.clear()
            await changing

    run(servers, scenario)


@pytest.mark.slow
def test_thousands_of_requests_at_once_do_not_block_the_loop(servers: str) -> None:
    async def scenario(session: Session) -> None:
        await session.create("/n", b"x")
        turns: list[int] = []
        # Some 600; some 30 when kazoo makes the loop wait, or now and then when the whole machine does.
        while not turns or (turns[-1] <= 100 and len(turns) < 10):
            turns.append(0)
            answers = asyncio.gather(*(session.get("/n") for _ in range(2_000)))
            while not answers.done():
                await asyncio.sleep(0.001)
                turns[-1] += 1
            assert {node.data for node in await answers} == {b"x"}
        assert turns[-1] > 100, turns

    run(servers, scenario)


def test_requests_that_nobody_waits_for_any_longer_give_their_place_back(servers: str) -> None:
    async def scenario(session: Session) -> None:
        for _ in range(5):
            requests = [asyncio.create_task(session.create("/x/y")) for _ in range(100)]
            await asyncio.sleep(0)
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
        assert await asyncio.wait_for(session.exists("/x"), 60) is None

    run(servers, scenario)


def test_after_close_everything_says_so(servers: str, until: Until, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        threads = set(threading.enumerate())
        session = await Session.open(servers)
        assert all(thread.daemon for thread in set(threading.enumerate()) - threads)
        calls: list[int] = []
        assert await session.get_or_none("/x", lambda: calls.append(1)) is None
        started = time.monotonic()
        await asyncio.gather(session.close(), session.close())
        await session.close()
        assert time.monotonic() - started < 9  # the session has 10
        assert session.closed
        assert session.state is SessionState.LOST
        await asyncio.sleep(0)
        assert calls == [1]
        with pytest.raises(ClosedError, match="this ZooKeeper session is closed"):
            await session.get("/x")
        with pytest.raises(ClosedError):
            await session.connected()
        await until(lambda: set(threading.enumerate()) == threads)

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    # Within a second all is gone, as a rule.
    assert [message for message in caplog.messages if "is still closing in the background" not in message] == []


def test_closing_fails_what_is_under_way(servers: str) -> None:
    async def main() -> None:
        session = await Session.open(servers)
        requests = [asyncio.create_task(session.get("/")) for _ in range(300)]
        waiter = asyncio.create_task(session.connected())
        await asyncio.sleep(0)
        await session.close()
        await waiter
        results = await asyncio.gather(*requests, return_exceptions=True)
        assert all(isinstance(result, Node | ConnectionLost) for result in results)

    asyncio.run(main())
