"""Topics that come, grow, change, go and come anew while brokers run, and while they are down."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from metamq.client.net.transport import BrokerConnection
from metamq.errors import MessageTooLarge, TopicNotFound
from metamq.testing import Cluster
from metamq.wire import status
from metamq.wire.columns import encode
from metamq.wire.commands import Command, PutEntry, PutResult
from metamq.wire.headers import unpack_list
from metamq.zk.cluster.topics import FlushEvery, TopicConfig, TopicStore
from metamq.zk.nodes import ANY_VERSION
from metamq.zk.paths import master_offer
from metamq.zk.session.session import Session
from tests.one_zookeeper import cluster
from tests.parts import SLOW_S, LocalBroker, http_get, read_topic, statistics, until_answered, wait_until

T = TypeVar("T")


@pytest.fixture(scope="module")
def parts() -> Iterator[Cluster]:
    with cluster(retention_check_s=0.1) as running:
        yield running


def store(parts: Cluster, work: Callable[[Session, TopicStore], Awaitable[T]]) -> T:
    """Changes topics in ZooKeeper without waiting for any broker, as when that is down."""

    async def run() -> T:
        async with await Session.open(parts.zookeeper) as session:
            return await work(session, TopicStore(session))

    return asyncio.run(run())


def offered(parts: Cluster, topic: str, kind: str = "topics-pub") -> bool:
    """Whether the broker offers the topic in ZooKeeper."""

    async def look(session: Session, _: TopicStore) -> bool:
        return await session.exists(session.paths.offered_topic(kind, topic, master_offer(0))) is not None

    return until_answered(lambda: store(parts, look))


def folders(parts: Cluster) -> set[str]:
    """The topic folders on the broker's disk."""
    return {path.name for path in (parts.broker.data / "topics").iterdir()}


def put(parts: Cluster, config: TopicConfig, value: bytes) -> PutResult:
    """A PUT to partition 0 under this very configuration's topic id."""

    async def send() -> PutResult:
        connection = await BrokerConnection.open("127.0.0.1", parts.broker.port)
        try:
            batch = encode([value], base_timestamp_us=1)
            response = await connection.send(Command.PUT, [PutEntry(config.topic, config.id, 0, len(batch))], [batch])
            return unpack_list(PutResult, response.header)[0]
        finally:
            await connection.close()

    return asyncio.run(send())


def values(parts: Cluster, config: TopicConfig) -> list[bytes]:
    return [m.value for messages in read_topic(parts.broker, config.topic, config.id).values() for m in messages]


def test_created_and_deleted(parts: Cluster) -> None:
    with parts.admin() as admin:
        config = admin.create_topic("come-and-go", partitions=2)
        assert offered(parts, "come-and-go")
        assert offered(parts, "come-and-go", "topics-sub")
        assert put(parts, config, b"x").status == status.OK
        admin.delete("come-and-go")
    assert not offered(parts, "come-and-go")
    assert not offered(parts, "come-and-go", "topics-sub")
    wait_until(lambda: not any(name.startswith("come-and-go@") for name in folders(parts)))
    refused = put(parts, config, b"x")
    assert isinstance(status.decode_error(refused.status, refused.error), TopicNotFound)


def test_made_anew_it_is_another_topic(parts: Cluster) -> None:
    with parts.admin() as admin:
        first = admin.create_topic("anew", partitions=1)
        assert put(parts, first, b"old").base_offset == 0
        admin.delete("anew")
        second = admin.create_topic("anew", partitions=1)
    assert second.id != first.id
    refused = put(parts, first, b"late")
    error = status.decode_error(refused.status, refused.error)
    assert isinstance(error, TopicNotFound)
    assert error.problem == f"topic {error.topic!r} was deleted and created again"
    assert error.hint == f"Its id is {second.id} now, and was {first.id}."
    assert put(parts, second, b"new").base_offset == 0
    assert values(parts, second) == [b"new"]


def test_enlarged_and_everything_stays(parts: Cluster) -> None:
    with parts.admin() as admin, parts.producer() as producer:
        config = admin.create_topic("grows", partitions=1)
        producer.send("grows", b"before").result(SLOW_S)
        admin.alter("grows", partitions=5)
        places = [producer.send("grows", b"after", partition=f"0-{i}").result(SLOW_S) for i in range(5)]
    assert [(r.partition, r.offset) for r in places] == [("0-0", 1), ("0-1", 0), ("0-2", 0), ("0-3", 0), ("0-4", 0)]
    parts.broker.restart()
    assert values(parts, config) == [b"before"] + [b"after"] * 5


def test_settings_change_at_run_time(parts: Cluster) -> None:
    with parts.admin() as admin, parts.producer() as producer:
        config = admin.create_topic("changes", partitions=1, flush="ack", segment_bytes=5000)
        for _ in range(20):
            producer.send("changes", b"x" * 900).result(SLOW_S)
        admin.alter("changes", max_message_bytes=500)

        def refused() -> bool:
            error = put(parts, config, b"y" * 900)
            return isinstance(status.decode_error(error.status, error.error), MessageTooLarge)

        wait_until(refused, what="the new limit")

        def raises() -> bool:  # in send(): the producer hears of it by its own watch
            try:
                producer.send("changes", b"y" * 900).exception(SLOW_S)
            except MessageTooLarge as error:
                return error.limit == 500
            return False

        wait_until(raises, what="the new limit in the producer")
        admin.alter("changes", retention_bytes=6000)
        wait_until(lambda: _partition(parts, "changes")["start_offset"] > 0, what="retention")
        wait_until(lambda: 0 < _partition(parts, "changes")["size_bytes"] <= 6000, what="its end")


def _partition(parts: Cluster, topic: str) -> dict[str, int]:
    found: dict[str, int] = next(p for p in statistics(parts.broker)["partitions"] if p["topic"] == topic)
    return found


def test_all_of_that_while_the_broker_is_down(parts: Cluster) -> None:
    with parts.admin() as admin:
        kept = admin.create_topic("kept", partitions=1)
        gone = admin.create_topic("gone", partitions=1)
        remade = admin.create_topic("remade", partitions=1)
        larger = admin.create_topic("larger", partitions=1)
    for config in (kept, gone, remade, larger):
        assert put(parts, config, b"before").base_offset == 0
    parts.broker.kill()

    async def change(_: Session, topics: TopicStore) -> tuple[TopicConfig, TopicConfig, TopicConfig]:
        await topics.delete("gone")
        await topics.delete("remade")
        again = await topics.create(TopicConfig("remade", {0: 1}))
        made = await topics.create(TopicConfig("made", {0: 2}))
        grown = await topics.alter("larger", lambda c: TopicConfig("larger", {0: 3}, id=c.id))
        return again, made, grown

    again, made, grown = store(parts, change)
    parts.broker.start()
    ours = ("kept", "gone", "remade", "made", "larger")
    wanted = {f"kept@{kept.id}", f"remade@{again.id}", f"made@{made.id}", f"larger@{grown.id}"}
    wait_until(lambda: {name for name in folders(parts) if name.split("@")[0] in ours} == wanted)
    assert f"ZooKeeper has no topic gone with id {gone.id}: " in parts.broker.log_path.read_text(), "it says what goes"
    assert not offered(parts, "gone")
    assert values(parts, kept) == values(parts, larger) == [b"before"]
    assert values(parts, again) == []
    for stale in (gone, remade):
        refused = put(parts, stale, b"late")
        assert isinstance(status.decode_error(refused.status, refused.error), TopicNotFound)
    assert [put(parts, config, b"after").base_offset for config in (kept, again, made, larger)] == [1, 0, 0, 1]


def test_a_topic_of_other_brokers_is_not_carried(parts: Cluster) -> None:
    config = store(parts, lambda _, topics: topics.create(TopicConfig("elsewhere", {7: 2})))
    with parts.admin() as admin:
        admin.create_topic("here", partitions=1)
    assert not offered(parts, "elsewhere")
    assert f"elsewhere@{config.id}" not in folders(parts)


@pytest.mark.slow
def test_many_topics_at_once(parts: Cluster) -> None:
    def theirs() -> list[str]:
        return [name for name in folders(parts) if "many-" in name]

    async def create(_: Session, topics: TopicStore) -> list[TopicConfig]:
        return list(await asyncio.gather(*(topics.create(TopicConfig(f"many-{n}", {0: 2})) for n in range(30))))

    async def delete(_: Session, topics: TopicStore) -> None:
        await asyncio.gather(*(topics.delete(f"many-{n}") for n in range(30)))

    configs = store(parts, create)
    wait_until(lambda: all(offered(parts, config.topic) for config in configs), what="all topics offered")
    assert all(put(parts, config, b"x").status == status.OK for config in configs)
    assert http_get(parts.broker.http_port, "/readyz")[0] == 200
    store(parts, delete)
    wait_until(lambda: not theirs(), what="all folders removed")


def test_a_topic_of_many_partitions_does_not_stop_the_loop_that_makes_them(parts: Cluster, tmp_path: Path) -> None:
    def noted(fd: int) -> None:
        waiting.append(threading.current_thread())
        os.fsync(fd)

    waiting: list[threading.Thread] = []
    with LocalBroker(parts.zookeeper, tmp_path / "local", id=1) as local, parts.admin() as admin:
        local.broker._files.sync, local.broker._files.sync_disk = noted, None
        admin.create_topic("wide", partitions=60, brokers=[1])
        assert len(waiting) >= 60
        waiting.clear()
        local.broker._files.sync_disk = noted
        admin.create_topic("wider", partitions=60, brokers=[1])
        assert 2 <= len(waiting) < 60, "the disk as a whole"
        assert local.loop_thread not in waiting


class HeldDisk:
    """fsync that waits for the test, from `hold` on; `let` ends those that wait, and not those that come later."""

    def __init__(self) -> None:
        self._gate: threading.Event | None = None
        self.waiting = 0

    def sync(self, fd: int) -> None:
        gate = self._gate
        if gate is not None:
            self.waiting += 1
            assert gate.wait(110)
        os.fsync(fd)

    def hold(self) -> None:
        self.waiting = 0
        self._gate = threading.Event()

    def let(self, *, hold: bool) -> None:
        gate = self._gate
        self._gate = threading.Event() if hold else None
        self.waiting = 0
        assert gate is not None
        gate.set()


@pytest.mark.slow
def test_a_flush_policy_takes_effect_on_a_living_master(parts: Cluster, tmp_path: Path) -> None:
    disk = HeldDisk()
    with (
        LocalBroker(parts.zookeeper, tmp_path / "local", id=2, retention_check_s=3600) as local,
        parts.admin() as admin,
    ):
        local.broker._files.sync = disk.sync
        topic = admin.create_topic("policy", partitions=1, brokers=[2], flush=FlushEvery(1, None))
        other = admin.create_topic("policy-other", partitions=1, brokers=[2], flush=FlushEvery(None, None))
        (partition,) = local.broker._topics.open["policy"].values()

        def alter(flush: Any) -> None:
            admin.alter("policy", flush=flush)
            wait_until(lambda: local.broker._topics.config("policy").flush == flush, what="the new policy")

        def seen() -> int:
            return len(read_topic(local, "policy", topic.id)["2-0"])

        # Nothing is repeated meanwhile: a repetition would be told what the first was not.
        with parts.producer(request_timeout_s=300, delivery_timeout_s=300) as producer:
            producer.send("policy", b"warm").result(SLOW_S)
            wait_until(lambda: not partition.flushing and partition.log.flushed_offset == 1)
            disk.hold()
            try:
                producer.send("policy", b"tail").result(SLOW_S)  # no flush is waited for
                wait_until(lambda: disk.waiting)
                assert seen() == 2
                alter("ack")
                assert seen() == 2, "what readers saw is not taken back"
                late = producer.send("policy", b"late")
                wait_until(lambda: partition.log.end_offset == 3)
                producer.send(other.topic, b"beside it").result(SLOW_S)
                assert (late.done(), seen()) == (False, 2)

                flushes = local.broker._flusher.flushes
                disk.let(hold=True)  # that of the tail: it began before `late` was there
                wait_until(lambda: local.broker._flusher.flushes > flushes and disk.waiting)
                producer.send(other.topic, b"beside it").result(SLOW_S)
                assert partition.log.flushed_offset == 2
                assert (late.done(), seen()) == (False, 2)
                disk.let(hold=True)
                assert late.result(SLOW_S).offset == 2
                assert (partition.log.flushed_offset, seen()) == (3, 3)

                waits = producer.send("policy", b"waits")
                wait_until(lambda: disk.waiting)
                assert (waits.done(), seen()) == (False, 3)
                alter(FlushEvery(None, None))
                assert waits.result(SLOW_S).offset == 3, "it waits for no flush any more, though one is under way"
                assert producer.send("policy", b"at once").result(SLOW_S).offset == 4
                assert (partition.log.flushed_offset, seen()) == (3, 5)
            finally:
                disk.let(hold=False)


def test_an_unflushed_tail_is_flushed_when_its_topic_begins_to_ask_for_it(parts: Cluster, tmp_path: Path) -> None:
    with (
        LocalBroker(parts.zookeeper, tmp_path / "local", id=3, retention_check_s=3600) as local,
        parts.admin() as admin,
    ):
        admin.create_topic("tail", partitions=1, brokers=[3], flush=FlushEvery(None, None))
        (partition,) = local.broker._topics.open["tail"].values()
        with parts.producer() as producer:
            producer.send_many("tail", [b"x"] * 10).result(SLOW_S)
        assert partition.log.flushed_offset == 0
        admin.alter("tail", flush="ack")
        wait_until(lambda: partition.log.flushed_offset == 10, what="the flush of the tail")


def test_a_configuration_that_cannot_be_read_is_reported_and_hurts_nobody_else() -> None:
    with cluster() as parts:
        with parts.admin() as admin:
            config = admin.create_topic("healthy", partitions=1)

        async def spoil(session: Session, topics: TopicStore) -> None:
            await session.create(session.paths.topic_config("spoilt"), b"not json")
            await topics.create(TopicConfig("later", {0: 1}))

        try:
            store(parts, spoil)
            wait_until(lambda: offered(parts, "later") or not parts.broker.running)
            assert put(parts, config, b"x").status == status.OK
            assert "the configuration of topic 'spoilt' in ZooKeeper" in parts.broker.log_path.read_text()
            store(
                parts, lambda session, _: session.set(session.paths.topic_config("healthy"), b"nor this", ANY_VERSION)
            )
            parts.broker.restart()
            assert f"healthy@{config.id}" in folders(parts)
        finally:
            parts.broker.kill()
