"""Makes the data of this release for the upgrade test: `python -m tests.upgrade.make` from the checkout.

It writes `tests/upgrade/<version>.tar.xz`: the folders of a ZooKeeper and a broker after an orderly stop, and what a
later release must find in them (`expected.json`). Do it once for each release, and never change a file of a release
that is out.
"""

from __future__ import annotations

import json
import tarfile
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import metamq
from metamq import DeadLetterQueue, Message
from metamq.testing import Cluster
from metamq.zk.cluster.schemas import Schema
from metamq.zk.server.embedded import EmbeddedZooKeeper
from tests.parts import read_to_end

HERE = Path(__file__).parent
WHEN = datetime(2026, 11, 27, 12, tzinfo=UTC)
COMPRESSIONS = {"plain": None, "lz4": "lz4", "zstd": "zstd"}
XID = "upgrade"


def seen(message: Message[bytes]) -> dict[str, Any]:
    """A message as JSON has it."""
    key = None if message.key is None else message.key.hex()
    headers = {name: value.hex() for name, value in message.headers.items()}
    place = {"topic": message.topic, "partition": message.partition, "offset": message.offset}
    return {**place, "key": key, "value": message.value.hex(), "headers": headers, "timestamp": message.timestamp}


def contents(running: Cluster, topics: list[str]) -> list[dict[str, Any]]:
    """All that readers of these topics see, in order."""
    with running.consumer(topics=topics, idle_timeout_s=0.5) as consumer:
        found = [seen(message) for message in read_to_end(consumer)]
    return sorted(found, key=lambda one: (one["topic"], one["partition"], one["offset"]))


def fill(running: Cluster) -> dict[str, Any]:
    """Makes the data. Returns what a later release must find."""
    for name, compression in COMPRESSIONS.items():
        running.create_topic(name, 2, flush="ack", segment_bytes=20_000)
        with running.producer(compression=compression) as producer:
            for number in range(300):
                key = None if number % 3 == 0 else b"k%d" % (number % 7)
                headers = {"n": b"%d" % number, "empty": b""} if number % 2 else None
                producer.send(name, b"%d " % number * (number % 40), key, headers, timestamp=WHEN).result(60)
    running.create_topic("orders", 2, flush="ack")
    with running.producer() as producer, running.admin() as admin:
        with producer.transaction():
            producer.send_many("orders", [b"committed-%d" % number for number in range(5)])
        try:
            with producer.transaction():
                producer.send("orders", b"rolled back")
                raise KeyError
        except KeyError:
            pass
        admin.register_schema("orders", Schema("json", '{"type": "object", "properties": {"id": {"type": "integer"}}}'))
        with running.consumer(topics="plain", group="etl", auto_commit=False, idle_timeout_s=0.5) as consumer:
            half = [message for message in read_to_end(consumer) if message.offset < 50]
            consumer.commit({metamq.TopicPartition("plain", one.partition): one.offset + 1 for one in half})

        def fail(_message: Message[bytes]) -> None:
            raise ValueError("odd")

        running.create_topic("odd", 1)
        producer.send("odd", b"given up", b"key").result(60)
        with running.consumer(topics="odd", group="failing", idle_timeout_s=0.5) as consumer:
            consumer.run(fail, max_attempts=1)
        producer.tpc_begin(producer.xid(1, XID))
        producer.send("orders", b"in doubt", partition="0-0")
        producer.tpc_prepare()
        topics = [*COMPRESSIONS, "orders", "odd"]
        return {
            "version": metamq.__version__,
            "messages": contents(running, topics),
            "groups": {"etl": committed(running, "etl"), "failing": committed(running, "failing")},
            "topics": {name: settings_of(config) for name, config in admin.topics().items()},
            "letters": [asdict_of(one) for one in letters(running)],
        }


def committed(running: Cluster, group: str) -> dict[str, int | None]:
    """The offsets of a group, by topic and partition."""
    with running.admin() as admin:
        return {f"{one.topic}/{one.partition}": one.committed for one in admin.describe_group(group).partitions}


def settings_of(config: Any) -> dict[str, Any]:
    """The settings of a topic as JSON has them."""
    document: dict[str, Any] = json.loads(json.dumps(asdict(config), default=str))
    return document


def letters(running: Cluster) -> list[Any]:
    """The dead letters of the group that failed."""
    with DeadLetterQueue("failing", running.zookeeper, security=running.security) as queue:
        return list(queue.letters())


def asdict_of(letter: Any) -> dict[str, Any]:
    """A letter as JSON has it."""
    return {"id": letter.id, "topic": letter.topic, "error": letter.error, "value": letter.value.hex()}


def main() -> None:
    """Writes the archive."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with EmbeddedZooKeeper(folder / "zookeeper") as server:
            running = Cluster(server, folder)
            running.add_broker()
            expected = fill(running)
            running.broker.stop()
        (folder / "expected.json").write_text(json.dumps(expected, indent=1))
        archive = HERE / f"{metamq.__version__}.tar.xz"
        with tarfile.open(archive, "w:xz", preset=9) as tar:
            for name in ("expected.json", "zookeeper", "broker-0"):
                tar.add(folder / name, name)
    print(f"{archive}: {archive.stat().st_size:,} bytes, {len(expected['messages']):,} messages")


if __name__ == "__main__":
    main()
