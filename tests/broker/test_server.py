"""The broker's life: starts that are refused by name, stops that lose nothing, registration through every trouble."""

from __future__ import annotations

import asyncio
import os
import pkgutil
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from metamq import Producer
from metamq.broker.log.config import LogConfig
from metamq.broker.log.disk.files import FileCache
from metamq.broker.log.partition_log import PartitionLog
from metamq.client.net.transport import BrokerConnection
from metamq.client.producer.outgoing import Delivery
from metamq.errors import ConfigError, MetamqError
from metamq.testing import BrokerProcess, Cluster
from metamq.wire.columns import encode
from metamq.wire.commands import Command, PutEntry
from metamq.wire.connection import Response
from metamq.zk.cluster.brokers import BrokerState, read_state
from metamq.zk.cluster.topics import TopicConfig, TopicStore
from metamq.zk.errors import ConnectionLost
from metamq.zk.paths import master_offer
from metamq.zk.server.embedded import EmbeddedZooKeeper
from metamq.zk.server.ports import HeldPort
from metamq.zk.session.session import Session
from tests.one_zookeeper import cluster
from tests.parts import SLOW_S, LocalBroker, http_get, read_topic, statistics, until_answered, wait_until


@pytest.fixture(scope="module")
def parts() -> Iterator[Cluster]:
    # So long a drain would last that waited for what clients send meanwhile: longer than a stop may take here.
    with cluster(drain_timeout_s=600) as running:
        yield running


def broker_state(zookeeper: str, broker_id: int = 0) -> BrokerState:
    async def read() -> BrokerState:
        async with await Session.open(zookeeper) as session:
            found = await read_state(session, broker_id)
            assert found is not None
            return found[0]

    return until_answered(lambda: asyncio.run(read()))


def registered(zookeeper: str, topic: str, broker_id: int = 0) -> dict[str, int]:
    """Which sessions stand behind the broker's nodes: "master", "topics-pub", "topics-sub"."""

    async def look() -> dict[str, int]:
        async with await Session.open(zookeeper) as session:
            paths = {"master": session.paths.master(broker_id)}
            for kind in ("topics-pub", "topics-sub"):
                paths[kind] = session.paths.offered_topic(kind, topic, master_offer(broker_id))
            stats = {name: await session.exists(path) for name, path in paths.items()}
            return {name: stat.ephemeral_owner for name, stat in stats.items() if stat is not None}

    return until_answered(lambda: asyncio.run(look()))


class Stream:
    """A producer that never stops sending, from a thread of its own."""

    def __init__(self, zookeeper: str, topic: str) -> None:
        self._zookeeper = zookeeper
        self._topic = topic
        self._ending = threading.Event()
        self.deliveries: list[Delivery] = []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with Producer(self._zookeeper, delivery_timeout_s=4 * SLOW_S) as producer:
            while not self._ending.is_set():
                for _ in range(20):
                    self.deliveries.append(producer.send(self._topic, b"%d" % len(self.deliveries)))
                self._ending.wait(0.002)

    def __enter__(self) -> Stream:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(60)

    def acknowledged(self) -> int:
        """Messages so far."""
        return sum(delivery.done() for delivery in self.deliveries)

    def goes_on(self, limit_s: float = SLOW_S) -> None:
        """What is sent from now on is acknowledged."""
        now = len(self.deliveries)
        wait_until(lambda: len(self.deliveries) > now, limit_s)
        self.deliveries[now].result(limit_s)


# -- stopping ----------------------------------------------------------------------


def test_sigterm_under_load_answers_what_is_under_way_and_loses_nothing(parts: Cluster) -> None:
    broker = parts.broker
    with parts.admin() as admin:
        topic = admin.create_topic("drained", partitions=2, flush="ack")
    with Stream(parts.zookeeper, "drained") as stream:
        for _ in range(3):
            wanted = stream.acknowledged() + 200
            wait_until(lambda wanted=wanted: stream.acknowledged() >= wanted)  # type: ignore[misc]
            assert broker.stop() == 0, "the drain waits for what is under way, not for what clients send meanwhile"
            for index in range(2):
                folder = broker.data / "topics" / f"drained@{topic.id}" / str(index)
                log = PartitionLog.open(folder, "drained", LogConfig(), FileCache(), now_us=0)
                assert log.recovery.clean
                assert log.recovery.scanned_bytes == 0
                log.close()
            broker.start()
    receipts = [delivery.result(4 * SLOW_S) for delivery in stream.deliveries]
    stored = read_topic(broker, "drained", topic.id)
    found = {m.value: (name, m.offset) for name, messages in stored.items() for m in messages}
    assert sum(map(len, stored.values())) == len(receipts)
    assert found == {b"%d" % n: (r.partition, r.offset) for n, r in enumerate(receipts)}


def flood(port: int, topic: TopicConfig) -> None:
    """PUTs without a pause, twenty under way at any time, until the broker closes the connection."""

    async def run() -> None:
        connection = await BrokerConnection.open("127.0.0.1", port)
        batch = bytes(encode([b"x" * 1000], base_timestamp_us=1))
        entry = PutEntry(topic.topic, topic.id, 0, len(batch))
        under_way: set[asyncio.Future[Response]] = set()
        while connection.alive:
            while connection.alive and len(under_way) < 20:
                under_way.add(connection.send(Command.PUT, [entry], [batch]))
            _, under_way = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)

    asyncio.run(run())


def test_sigterm_is_quick_however_much_clients_send(parts: Cluster) -> None:
    with parts.admin() as admin:
        topic = admin.create_topic("flooded", partitions=1, flush="ack")
    threads = [threading.Thread(target=flood, args=(parts.broker.port, topic)) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: statistics(parts.broker)["counters"]["batches_in"].get("flooded", 0) > 500)
    status = parts.broker.stop()
    for thread in threads:
        thread.join(SLOW_S)
    parts.broker.start()
    assert status == 0


def test_sigterm_when_idle_is_quick_and_withdraws_from_zookeeper(parts: Cluster) -> None:
    with parts.admin() as admin:
        admin.create_topic("withdrawn", partitions=1)
    with parts.producer() as producer:
        producer.send("withdrawn", b"x").result(SLOW_S)
        assert registered(parts.zookeeper, "withdrawn").keys() == {"master", "topics-pub", "topics-sub"}
        assert parts.broker.stop() == 0
    assert registered(parts.zookeeper, "withdrawn") == {}
    parts.broker.start()


# -- starts that are refused ----------------------------------------------------------------------


def refused(broker: BrokerProcess) -> str:
    """What a broker that does not start says."""
    with pytest.raises(MetamqError) as caught:
        broker.start()
    return str(caught.value)


def refused_or_started(broker: BrokerProcess) -> str:
    """The same; empty when it does."""
    try:
        broker.start()
    except MetamqError as error:
        return str(error)
    return ""


def test_a_second_broker_on_one_data_folder(parts: Cluster) -> None:
    text = refused(BrokerProcess(parts.zookeeper, parts.broker.data))
    assert "ended with status 1" in text
    assert f"the data folder {parts.broker.data} is in use by process {parts.broker.pid}. Stop that process" in text


def test_a_port_that_is_taken(parts: Cluster, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        broker = BrokerProcess(parts.zookeeper, tmp_path / "b", 1)
        broker.port = port
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use. Choose another --port" in refused(broker)
        broker = BrokerProcess(parts.zookeeper, tmp_path / "b", 1, http_port=port)
        text = refused(broker)
        assert f"cannot serve metrics on 127.0.0.1:{port}: Address already in use. Choose another --http-port" in text
    assert registered(parts.zookeeper, "any", 1) == {}
    broker = BrokerProcess(parts.zookeeper, tmp_path / "b", 1)
    broker.start()
    assert broker.stop() == 0


def run_broker(environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "metamq.broker"],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("prot = 8123", "unknown setting 'prot' in [broker] of {file}. Did you mean 'port'?"),
        ("port = 'x'", "port in [broker] of {file} must be a whole number, not 'x'"),
        ("port = 70000", "the broker's `port` must be a whole number from 0 to 65,535, not 70000"),
    ],
)
def test_a_wrong_configuration(tmp_path: Path, section: str, said: str) -> None:
    file = tmp_path / "metamq.toml"
    file.write_text(f"[broker]\n{section}\n")
    with run_broker({"METAMQ_CONFIG": str(file), "METAMQ_ZOOKEEPER": "127.0.0.1:1"}) as process:
        _, text = process.communicate(timeout=SLOW_S)
    assert process.returncode not in (0, 3)
    assert said.format(file=file) in text
    assert "Traceback" not in text


@pytest.mark.slow
def test_a_broker_id_that_another_live_broker_has(parts: Cluster, tmp_path: Path) -> None:
    first = BrokerProcess(parts.zookeeper, tmp_path / "first", 2, session_timeout_ms=1000)
    first.start()
    for number in range(5):  # a session that is so short may end while the first one lives: then it is not refused
        second = BrokerProcess(parts.zookeeper, tmp_path / f"second-{number}", 2, session_timeout_ms=1000)
        text = refused_or_started(second)
        if text:
            break
        second.stop()
        if not first.running:
            first.stop()
            first.start()
    assert f"replica 0 of broker 2 runs already, at 127.0.0.1:{first.port}" in text
    assert "Give this one another --replica or --id, or stop the other one." in text
    wait_until(lambda: statistics(first)["epoch"] == broker_state(parts.zookeeper, 2).epoch, what="one term")
    assert first.stop() == 0


def test_a_data_folder_of_another_broker_id(parts: Cluster, tmp_path: Path) -> None:
    first = BrokerProcess(parts.zookeeper, tmp_path / "data", 3)
    first.start()
    assert first.stop() == 0
    assert f"the data folder {tmp_path / 'data'} belongs to broker 3, not 4" in refused(
        BrokerProcess(parts.zookeeper, tmp_path / "data", 4)
    )


@pytest.mark.slow
def test_another_zookeeper_than_the_data_folders_own(tmp_path: Path) -> None:
    with cluster(folder=tmp_path) as parts, EmbeddedZooKeeper() as other:
        with parts.admin() as admin:
            topic = admin.create_topic("precious", partitions=1)
        with parts.producer() as producer:
            producer.send("precious", b"x").result(SLOW_S)
        assert parts.broker.stop() == 0
        lost = BrokerProcess(other.address, parts.broker.data)
        try:
            text = refused(lost)
        finally:
            lost.kill()
            parts.broker.start()
        assert f"holds 1 topic, but ZooKeeper at {other.address} does not know broker 0" in text
        assert [m.value for m in read_topic(parts.broker, "precious", topic.id)["0-0"]] == [b"x"]


def test_another_cluster_that_has_a_broker_of_the_same_id(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    with cluster(folder=tmp_path / "one") as one, cluster(folder=tmp_path / "two") as two:
        with one.admin() as admin:
            topic = admin.create_topic("precious", partitions=1)
        with one.producer() as producer:
            producer.send("precious", b"x").result(SLOW_S)
        assert one.broker.stop() == 0
        two.broker.stop()
        lost = BrokerProcess(two.zookeeper, one.broker.data)
        try:
            text = refused(lost)
        finally:
            lost.kill()
            one.broker.start()
        assert f"the data folder {one.broker.data} belongs to cluster" in text
        assert [m.value for m in read_topic(one.broker, "precious", topic.id)["0-0"]] == [b"x"]


# -- registration ----------------------------------------------------------------------


def test_registered_only_when_recovery_is_finished(tmp_path: Path) -> None:
    """No node of the new process is there before it serves all that is stored: the master's, nor that of a topic."""
    with cluster() as parts:
        with parts.admin() as admin:
            admin.create_topic("recovered", partitions=1)
        with parts.producer() as producer:
            producer.send_many("recovered", [b"x" * 1000] * 60_000).result(60)
        before = registered(parts.zookeeper, "recovered")
        parts.broker.kill()
        parts.broker.start(wait=False)

        async def first_node() -> None:
            async with await Session.open(parts.zookeeper) as session:
                paths = {"master": session.paths.master(0)}
                for kind in ("topics-pub", "topics-sub"):
                    paths[kind] = session.paths.offered_topic(kind, "recovered", master_offer(0))
                while True:
                    for name, path in paths.items():
                        stat = await session.exists(path)
                        if stat is not None and stat.ephemeral_owner != before[name]:
                            return
                    await asyncio.sleep(0.001)

        asyncio.run(asyncio.wait_for(first_node(), SLOW_S))
        (partition,) = statistics(parts.broker)["partitions"]
        assert partition["end_offset"] == 60_000
        parts.broker.wait_ready()
        (partition,) = statistics(parts.broker)["partitions"]
        assert partition["stable_offset"] == 60_000


def test_while_logs_are_recovered_no_node_is_there(
    metamq_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zookeeper, data = metamq_cluster.zookeeper, tmp_path / "broker"
    with LocalBroker(zookeeper, data, id=31), metamq_cluster.admin() as admin:
        admin.create_topic("in-turn", partitions=3, brokers=[31])
        assert registered(zookeeper, "in-turn", 31).keys() == {"master", "topics-pub", "topics-sub"}
    seen: list[dict[str, int]] = []
    proper = PartitionLog.open.__func__  # type: ignore[attr-defined]

    def watched(*arguments: Any, **settings: Any) -> Any:
        opened = proper(*arguments, **settings)
        with ThreadPoolExecutor(1) as another:  # this one runs the broker's loop
            seen.append(another.submit(registered, zookeeper, "in-turn", 31).result(SLOW_S))
        return opened

    monkeypatch.setattr(PartitionLog, "open", classmethod(watched))
    with LocalBroker(zookeeper, data, id=31):
        assert seen == [{}] * 4, "of the journal of transactions, too"
        assert registered(zookeeper, "in-turn", 31).keys() == {"master", "topics-pub", "topics-sub"}


def all_registered(broker: BrokerProcess, zookeeper: str, topic: str) -> bool:
    """Whether one living session stands behind all of the broker's nodes, and it knows."""
    sessions = registered(zookeeper, topic)
    return len(sessions) == 3 and len(set(sessions.values())) == 1 and http_get(broker.http_port, "/readyz")[0] == 200


@pytest.mark.slow
@pytest.mark.parametrize(
    "absences",
    [
        [(0.3, "freeze"), (2.0, "freeze"), (1.5, "kill")],
        pytest.param(
            [(0.5, "freeze"), (4.0, "freeze"), (0.1, "kill"), (4.0, "kill")] * 3,
            marks=[pytest.mark.long, pytest.mark.timeout(400)],  # the waits within say what did not happen
        ),
    ],
    ids=["once", "often"],
)
def test_zookeeper_away_for_less_and_for_longer_than_the_session_lives(
    tmp_path: Path, absences: list[tuple[float, str]]
) -> None:
    with EmbeddedZooKeeper(tmp_path / "zookeeper") as zookeeper:
        broker = BrokerProcess(zookeeper.address, tmp_path / "broker", session_timeout_ms=1000)
        broker.start()
        parts = Cluster(zookeeper, tmp_path)
        parts.brokers.append(broker)
        with parts.admin() as admin:
            topic = admin.create_topic("t", partitions=2, flush="ack")
        with Stream(zookeeper.address, "t") as stream:
            stream.goes_on()
            for number, (away_s, how) in enumerate(absences):
                zookeeper.kill() if how == "kill" else zookeeper.freeze()
                deadline = time.monotonic() + away_s
                while time.monotonic() < deadline:
                    stream.goes_on()
                zookeeper.restart() if how == "kill" else zookeeper.thaw()
                wait_until(lambda: all_registered(broker, zookeeper.address, "t"), what="registration")
                stream.goes_on()
                with parts.producer() as fresh:
                    fresh.send("t", b"fresh-%d" % number).result(SLOW_S)
        receipts = [delivery.result(4 * SLOW_S) for delivery in stream.deliveries]
        values = [m.value for messages in read_topic(broker, "t", topic.id).values() for m in messages]
        assert len(values) == len(set(values)) == len(receipts) + len(absences)
        assert broker.stop() == 0


def enlarge(zookeeper: str, topic: str, partitions: int) -> None:
    async def alter() -> None:
        async with await Session.open(zookeeper) as session:
            await TopicStore(session).alter(topic, lambda config: replace(config, partitions={0: partitions}))

    asyncio.run(alter())


@pytest.mark.slow
def test_a_lost_session_is_replaced_and_everything_registered_anew(tmp_path: Path) -> None:
    with cluster(folder=tmp_path, session_timeout_ms=1000) as parts:
        broker = parts.broker
        with parts.admin() as admin:
            topic = admin.create_topic("t", partitions=2, flush="ack")
        epoch, before = statistics(broker)["epoch"], registered(parts.zookeeper, "t")
        with Stream(parts.zookeeper, "t") as stream:
            stream.goes_on()
            broker.freeze()
            wait_until(lambda: registered(parts.zookeeper, "t") == {}, what="the end of the session")
            enlarge(parts.zookeeper, "t", 3)
            broker.thaw()
            wait_until(lambda: all_registered(broker, parts.zookeeper, "t"), what="registration")
            stream.goes_on()
            with parts.producer() as fresh:
                wait_until(lambda: len(read_topic(broker, "t", topic.id)) == 3, what="the partition added meanwhile")
                assert fresh.send("t", b"fresh", partition="0-2").result(SLOW_S).partition == "0-2"
        after = registered(parts.zookeeper, "t")
        assert not set(before.values()) & set(after.values())
        wait_until(
            lambda: epoch < statistics(broker)["epoch"] == broker_state(parts.zookeeper).epoch, what="a new term"
        )
        receipts = [delivery.result(4 * SLOW_S) for delivery in stream.deliveries]
        values = [m.value for messages in read_topic(broker, "t", topic.id).values() for m in messages]
        assert len(values) == len(set(values)) == len(receipts) + 1


# -- what it says of itself ----------------------------------------------------------------------


def fsyncs(port: int) -> dict[str, float]:
    """What /metrics says of the disk."""
    lines = http_get(port, "/metrics")[1].replace('{broker="0"}', "").replace('broker="0",', "").splitlines()
    found = [line.rsplit(" ", 1) for line in lines if line.startswith(("metamq_disk_", "metamq_broker_flushes"))]
    return {name: float(value) for name, value in found}


METRIC = re.compile(r"`(metamq_\w+)`")


def test_every_metric_is_documented(parts: Cluster) -> None:
    metrics = http_get(parts.broker.http_port, "/metrics")[1]
    kinds = re.findall(r"^# TYPE (metamq_\w+) (\w+)$", metrics, re.MULTILINE)
    docs = Path(__file__).parents[2] / "docs"
    told = {name for page in ("operating.md", "monitoring.md") for name in METRIC.findall((docs / page).read_text())}
    others = tuple(f"metamq_{one}_" for one in ("producer", "consumer", "dbtx", "worker", "recovery"))
    assert {name for name, _kind in kinds} == {name for name in told if not name.startswith(others)}


def test_metrics_and_pages(parts: Cluster) -> None:
    with parts.admin() as admin:
        admin.create_topic("measured", partitions=1)
    with parts.producer() as producer:
        producer.send_many("measured", [b"x"] * 30).result(SLOW_S)
    port = parts.broker.http_port
    code, metrics = http_get(port, "/metrics")
    assert code == 200
    for line in (
        'metamq_broker_messages_in_total{broker="0",topic="measured"} 30.0',
        'metamq_broker_batches_in_total{broker="0",topic="measured"} 1.0',
        'metamq_log_stable_offset{broker="0",partition="0",topic="measured"} 30.0',
        'metamq_broker_ready{broker="0"} 1.0',
    ):
        assert line in metrics.splitlines(), metrics
    before = fsyncs(port)
    with parts.admin() as admin:
        admin.create_topic("flushed", partitions=1, flush="ack")
    with parts.producer() as producer:
        for _ in range(10):
            producer.send("flushed", b"x").result(SLOW_S)
    after = fsyncs(port)
    assert after["metamq_broker_flushes_total"] >= before["metamq_broker_flushes_total"] + 10
    assert after["metamq_disk_fsync_seconds_count"] >= before["metamq_disk_fsync_seconds_count"] + 10
    assert after["metamq_disk_fsync_seconds_sum"] > before["metamq_disk_fsync_seconds_sum"]
    buckets = [value for name, value in after.items() if "_bucket" in name]
    assert buckets == sorted(buckets)
    assert buckets[-1] == after["metamq_disk_fsync_seconds_count"]
    assert http_get(port, "/healthz")[0] == 200
    code, text = http_get(port, "/readyz")
    assert (code, text.startswith("epoch ")) == (200, True)
    assert http_get(port, "/other") == (404, "/metrics, /healthz and /readyz are here.\n")


@pytest.mark.parametrize("alarm", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_loop_that_hangs_shows(parts: Cluster, tmp_path: Path, alarm: bool) -> None:
    hanging = threading.Event()
    with LocalBroker(parts.zookeeper, tmp_path / "local", id=5) as local:
        port = local.broker.http_port

        def turned_s_ago() -> float:
            found = re.match(r"the event loop last turned ([0-9.]+) s ago", http_get(port, "/healthz")[1])
            assert found is not None
            return float(found[1])

        wait_until(lambda: http_get(port, "/healthz")[0] == 200)
        local.loop.call_soon_threadsafe(hanging.wait)
        wait_until(lambda: turned_s_ago() > 1)
        if alarm:
            wait_until(lambda: http_get(port, "/healthz")[0] == 503, what="the alarm")
        assert http_get(port, "/metrics")[0] == 200
        hanging.set()
        wait_until(lambda: turned_s_ago() < 1)
        wait_until(lambda: http_get(port, "/healthz")[0] == 200)


@contextmanager
def waiting_for_zookeeper(data: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A broker, and the address where it looks for a ZooKeeper in vain."""
    held = HeldPort("127.0.0.1")  # else it may be taken before the ZooKeeper comes
    address = f"127.0.0.1:{held.number}"
    settings = {"ZOOKEEPER": address, "BROKER_PORT": "0", "BROKER_HTTP_PORT": "-1", "BROKER_DATA": str(data)}
    with run_broker({f"METAMQ_{name}": value for name, value in settings.items()}) as process:
        try:
            wait_until((data / "lock").exists)
            yield process, address
        finally:
            process.kill()


@pytest.mark.slow
def test_a_broker_waits_for_its_zookeeper_and_says_so(tmp_path: Path) -> None:
    with waiting_for_zookeeper(tmp_path / "data") as (process, address):
        assert process.stderr is not None
        assert process.stdout is not None
        told = process.stderr.readline()
        assert f"WARNING metamq.zk: waiting for ZooKeeper at {address}: connection refused. Start one with " in told
        with EmbeddedZooKeeper(port=int(address.rpartition(":")[2])):
            assert process.stdout.readline().startswith("ready ")
            process.terminate()
            _, text = process.communicate(timeout=SLOW_S)
    assert (process.returncode, "Traceback" in text) == (0, False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_broker_that_is_not_up_yet_stops_when_asked_to(tmp_path: Path, number: signal.Signals) -> None:
    with waiting_for_zookeeper(tmp_path / "data") as (process, _address):
        process.send_signal(number)
        out, text = process.communicate(timeout=SLOW_S)
    assert (process.returncode, out) == (0, "")
    assert "Traceback" not in text


def test_a_start_that_failed_leaves_nothing_open(parts: Cluster, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for setting in ("port", "http_port"):
            with (
                pytest.raises(ConfigError, match=f":{port}: "),
                LocalBroker(parts.zookeeper, tmp_path / "data", id=6, **{setting: port}),
            ):
                pass
    with LocalBroker(parts.zookeeper, tmp_path / "data", id=6) as local:
        assert local.broker.epoch > 0


@pytest.mark.parametrize("step", ["process.server.TopicStore.listing", "roles.keeper.become_master"])
def test_zookeeper_goes_away_in_the_middle_of_a_start(
    step: str, metamq_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker waits for it, as it does before: it may be restarted when the broker is."""
    place, _, name = f"metamq.broker.{step}".rpartition(".")
    with LocalBroker(metamq_cluster.zookeeper, tmp_path / "broker", id=29):
        pass
    owner = pkgutil.resolve_name(place)
    proper, lost = getattr(owner, name), []

    async def answers_late(*args: object) -> object:
        if not lost:
            lost.append(step)
            raise ConnectionLost(metamq_cluster.zookeeper, "the test cuts it")
        return await proper(*args)

    monkeypatch.setattr(owner, name, answers_late)
    with LocalBroker(metamq_cluster.zookeeper, tmp_path / "broker", id=29) as local:
        assert local.broker.readiness()[0]
    assert lost
