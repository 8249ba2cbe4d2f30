"""The asyncio Coordinator: two databases and the queue, all or nothing, also when its task is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import metamq.tx.aio
from metamq import Producer, aio
from metamq.errors import BranchMisuse, ClosedError, ConfigError, OutcomeUnknown, StorageError
from metamq.tx import Coordinator, Settled
from metamq.tx.database import aio_coordinator
from metamq.tx.database.coordinator_core import Part
from metamq.tx.database.decision_log import DecisionLog
from tests.parts import SLOW_S, wait_until
from tests.tx.coordinated import aio_work as work
from tests.tx.two_databases import Databases, holds

if TYPE_CHECKING:
    from tests.tx.conftest import Shop


@pytest.fixture
def topic(shop: Shop) -> str:
    return shop.topic()


Opens = Callable[..., Any]


@pytest.fixture
def opened(shop: Shop, databases: Databases, tmp_path: Path) -> Opens:
    """Opens a Coordinator over both databases and the queue."""

    @asynccontextmanager
    async def opens(**options: Any) -> AsyncIterator[metamq.tx.aio.Coordinator]:
        async with aio.Producer[bytes](shop.cluster.zookeeper) as producer:
            resources = {
                "a": lambda: psycopg.AsyncConnection.connect(f"{databases.dsn} dbname=a"),
                "queue": producer,
                "b": lambda: psycopg.AsyncConnection.connect(f"{databases.dsn} dbname=b"),
            }
            async with metamq.tx.aio.Coordinator(tmp_path, resources, **options) as coordinator:
                yield coordinator

    return opens


def test_all_of_it_happens_or_nothing(shop: Shop, databases: Databases, opened: Opens, topic: str) -> None:
    async def scenario() -> None:
        async with opened() as coordinator:
            for number in range(3):
                async with coordinator.begin() as tx:
                    await work(tx, topic, str(number))
            with pytest.raises(KeyError):  # noqa: PT012
                async with coordinator.begin() as tx:
                    await work(tx, topic, "failed")
                    raise KeyError
            with pytest.raises(psycopg.errors.UniqueViolation):
                async with coordinator.begin() as tx:
                    await work(tx, topic, "2")
            async with coordinator.begin() as tx:
                await (await tx["a"]).execute("DELETE FROM orders WHERE body = 'nothing'")
            assert await coordinator.recover() == Settled(0, 0)

    asyncio.run(scenario())
    holds(shop, databases, topic, list("012"))


def test_tasks_that_commit_at_the_same_time_share_a_flush(
    shop: Shop,
    databases: Databases,
    opened: Opens,
    topic: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flushes = 0
    flush = DecisionLog._flush

    def counted(self: DecisionLog) -> None:
        nonlocal flushes
        flushes += 1
        flush(self)

    monkeypatch.setattr(DecisionLog, "_flush", counted)
    begun = asyncio.Barrier(6)
    write = metamq.tx.aio.Coordinator._write_decision

    async def together(self: Any, tx: Any, names: tuple[str, ...]) -> None:
        await begun.wait()
        await write(self, tx, names)

    monkeypatch.setattr(metamq.tx.aio.Coordinator, "_write_decision", together)

    async def scenario() -> None:
        async with opened() as coordinator:

            async def one(number: int) -> None:
                async with coordinator.begin() as tx:
                    await work(tx, topic, str(number))

            await asyncio.gather(*map(one, range(6)))

    asyncio.run(scenario())
    assert 1 <= flushes <= 2
    holds(shop, databases, topic, list("012345"))


@pytest.mark.parametrize("where", ["block", "prepare", "decision", "commit"])
def test_a_block_that_is_cancelled(
    shop: Shop,
    databases: Databases,
    opened: Opens,
    topic: str,
    where: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the decision nothing happens; from then on, all of it. The producer is free again at once."""

    def cancels(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        async def cancelled(*arguments: Any) -> Any:
            if (task := asyncio.current_task()) is not None and task.get_name() == "cancelled":
                task.cancel()
            return await original(*arguments)

        monkeypatch.setattr(owner, name, cancelled)

    async def scenario() -> None:
        inside = asyncio.Event()
        async with opened(recover_every_s=0.05) as coordinator:

            async def one() -> None:
                async with coordinator.begin() as tx:
                    await work(tx, topic, "1")
                    if where == "block":
                        inside.set()
                        await asyncio.Event().wait()

            steps: dict[str, tuple[Any, str]] = {"prepare": (Part, "prepare"), "commit": (Part, "commit")}
            steps["decision"] = (metamq.tx.aio.Coordinator, "_write_decision")
            if where in steps:
                cancels(*steps[where])
            task = asyncio.create_task(one(), name="cancelled")
            if where == "block":
                await inside.wait()
                task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(
                wait_until, lambda: not coordinator._unfinished.is_set() and not coordinator._log.open
            )
            queue = coordinator._resources["queue"]
            await queue.send(topic, b"2", partition="0-0")

    asyncio.run(scenario())
    bodies = ["1"] if where in ("decision", "commit") else []
    assert databases.rows("a") == databases.rows("b") == bodies
    assert shop.seen(topic) == sorted([b"1", b"1"] * len(bodies) + [b"2"])
    assert databases.prepared() == 0


def test_the_loop_is_free_while_the_log_is_made_short(
    shop: Shop, databases: Databases, opened: Opens, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while another task decides; a task that is cancelled then has committed."""
    rewrites, goes, rewrite = 0, threading.Event(), DecisionLog._rewrite
    waits, begun = list[bool](), asyncio.Event()
    loop: Any = None

    def slow(self: DecisionLog) -> None:
        nonlocal rewrites
        rewrites += 1
        if rewrites == 2:  # the first one opens the log
            loop.call_soon_threadsafe(begun.set)
            waits.append(goes.wait(20))
        rewrite(self)

    async def scenario() -> None:
        nonlocal loop
        loop, deciding = asyncio.get_running_loop(), asyncio.Event()
        decide = metamq.tx.aio.Coordinator._write_decision

        async def decides(self: Any, tx: Any, names: tuple[str, ...]) -> None:
            deciding.set()
            await decide(self, tx, names)

        async def one(number: int) -> None:
            async with coordinator.begin() as tx:
                await work(tx, topic, str(number))

        async with opened() as coordinator:
            first = asyncio.create_task(one(1))
            await begun.wait()
            monkeypatch.setattr(metamq.tx.aio.Coordinator, "_write_decision", decides)
            second = asyncio.create_task(one(2))
            await deciding.wait()
            await asyncio.sleep(0)
            first.cancel()
            await asyncio.sleep(0)
            goes.set()
            await asyncio.wait([first, second])
            assert first.cancelled()
            await second

    monkeypatch.setattr(DecisionLog, "_is_long", property(lambda self: not self.open))
    monkeypatch.setattr(DecisionLog, "_rewrite", slow)
    asyncio.run(scenario())
    assert waits == [True]
    holds(shop, databases, topic, ["1", "2"])


def test_a_decision_that_cannot_be_written_is_found_by_the_next(
    shop: Shop,
    databases: Databases,
    opened: Opens,
    topic: str,
) -> None:
    def fails(_file: int) -> None:
        raise OSError(5, "Input/output error")

    async def scenario() -> None:
        async with opened() as coordinator:
            coordinator._log._fsync = fails
            with pytest.raises(OutcomeUnknown, match="Begin again"):
                async with coordinator.begin() as tx:
                    await work(tx, topic, "1")
            with pytest.raises(StorageError):
                await coordinator.recover()
            assert databases.prepared() == 2
        async with opened():
            pass

    asyncio.run(scenario())
    holds(shop, databases, topic, ["1"])


def test_misuse(shop: Shop, opened: Opens, tmp_path: Path) -> None:
    connect = lambda: psycopg.AsyncConnection.connect("dbname=nowhere")  # noqa: E731
    wrong: Any = {"orders": connect}
    with Coordinator(tmp_path / "blocking", wrong) as coordinator:
        assert coordinator.recover().left == ("orders",)
        refused = pytest.raises(ConfigError, match=r"'orders' is for asyncio.*metamq\.tx\.aio\.Coordinator")
        with refused, coordinator.begin() as tx:
            tx["orders"]

    async def scenario() -> None:
        async with aio.Producer[bytes](shop.cluster.zookeeper) as producer:
            resources: Any = {"queue": producer}
            with pytest.raises(ConfigError, match="is for asyncio"):
                Coordinator(tmp_path / "other", resources)
        closed = metamq.tx.aio.Coordinator(tmp_path / "never", {})
        with pytest.raises(ClosedError, match="never opened"):
            await closed.recover()
        await closed.close()
        with pytest.raises(ClosedError):
            await closed.open()
        async with opened() as coordinator:
            with pytest.raises(ConfigError, match="in use by another Coordinator"):
                await metamq.tx.aio.Coordinator(tmp_path, {}).open()
        with pytest.raises(ClosedError):
            await coordinator.recover()

    asyncio.run(scenario())
    with Producer(shop.cluster.zookeeper) as blocking, pytest.raises(ConfigError, match="would block the loop"):
        metamq.tx.aio.Coordinator(tmp_path, {"queue": blocking})  # type: ignore[dict-item]


@pytest.mark.parametrize("is_gathered", [False, True])
def test_another_task_cannot_bring_in_the_queue(
    shop: Shop, databases: Databases, opened: Opens, topic: str, is_gathered: bool
) -> None:
    """A Producer would send this task's messages outside of the transaction."""

    async def scenario() -> None:
        async with opened() as coordinator, coordinator.begin() as tx:
            if is_gathered:
                await asyncio.gather(tx["a"], tx["queue"])
            else:
                await asyncio.create_task(tx["queue"])  # as asyncio.wait_for before Python 3.12

    with pytest.raises(BranchMisuse, match="another task"):
        asyncio.run(scenario())
    assert (databases.rows("a"), shop.seen(topic)) == ([], [])


def test_tasks_that_bring_in_one_database_share_its_connection(databases: Databases, opened: Opens) -> None:
    async def scenario() -> None:
        async with opened() as coordinator, coordinator.begin() as tx:
            first, second = await asyncio.gather(tx["a"], tx["a"])
            assert first is second
            await first.execute("INSERT INTO orders VALUES ('x')")

    asyncio.run(scenario())
    assert databases.rows("a") == ["x"]


class Slow:
    """A connection whose calls wait for `answers`, and whose commit fails once."""

    def __init__(self, answers: asyncio.Event) -> None:
        self.answers = answers
        self.fails = True

    def xid(self, *parts: Any) -> Any:
        return parts

    async def tpc_begin(self, _xid: Any) -> None: ...

    async def tpc_prepare(self) -> None: ...

    async def tpc_rollback(self, _xid: Any = None) -> None: ...

    async def tpc_commit(self, _xid: Any = None) -> None:
        if self.fails:
            raise OSError("down")

    async def tpc_recover(self) -> list[Any]:
        await self.answers.wait()
        return []


def test_a_recovery_that_is_cancelled_is_made_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        answers = asyncio.Event()
        answers.set()
        resources = {"a": Slow(answers), "b": Slow(answers)}
        async with metamq.tx.aio.Coordinator(tmp_path, resources, recover_every_s=0.05) as coordinator:
            answers.clear()
            async with coordinator.begin() as tx:
                await tx["a"]
                await tx["b"]
            assert coordinator._log.open
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(coordinator.recover(), 0.2)
            answers.set()
            async with asyncio.timeout(SLOW_S):
                while coordinator._log.open:  # noqa: ASYNC110 - the state is of another task
                    await asyncio.sleep(0.01)

    asyncio.run(scenario())


def test_a_cancelled_open_or_close_frees_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        answers, may_open = asyncio.Event(), threading.Event()
        resources = {"a": Slow(answers)}

        def opens(folder: Path) -> DecisionLog:
            may_open.wait(SLOW_S)
            return DecisionLog(folder)

        with monkeypatch.context() as patched:
            patched.setattr(aio_coordinator, "DecisionLog", opens)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(metamq.tx.aio.Coordinator(tmp_path, resources).open(), 0.1)
        may_open.set()
        answers.set()
        coordinator = await until_free(tmp_path, resources)
        answers.clear()
        recovering = asyncio.create_task(coordinator.recover())
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(coordinator.close(), 0.1)
        answers.set()
        with contextlib.suppress(ClosedError):
            await recovering
        await coordinator.close()
        await (await metamq.tx.aio.Coordinator(tmp_path, resources).open()).close()

    async def until_free(folder: Path, resources: dict[str, Any]) -> metamq.tx.aio.Coordinator:
        async with asyncio.timeout(SLOW_S):
            while True:
                with contextlib.suppress(ConfigError):
                    return await metamq.tx.aio.Coordinator(folder, resources).open()
                await asyncio.sleep(0.01)

    asyncio.run(scenario())
