"""The data of each earlier release, read and continued by this one. `make.py` has made the archives."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from metamq import DeadLetterQueue
from metamq.testing import Cluster
from metamq.zk.server.embedded import EmbeddedZooKeeper
from tests.parts import wait_until
from tests.upgrade.make import HERE, XID, asdict_of, committed, contents, letters, settings_of

RELEASES = sorted(HERE.glob("*.tar.xz"))


@dataclass(frozen=True, slots=True)
class Upgraded:
    """A cluster of this release on the data of another one."""

    running: Cluster
    expected: dict[str, Any]


@pytest.fixture(scope="module", params=RELEASES, ids=[path.name.removesuffix(".tar.xz") for path in RELEASES])
def upgraded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upgraded]:
    folder = tmp_path_factory.mktemp("upgrade")
    with tarfile.open(request.param) as archive:
        archive.extractall(folder, filter="data")
    with EmbeddedZooKeeper(folder / "zookeeper") as server:
        running = Cluster(server, folder)
        try:
            running.add_broker()
            yield Upgraded(running, json.loads((folder / "expected.json").read_text()))
        finally:
            running.close()


def test_there_is_an_archive() -> None:
    assert RELEASES


@pytest.mark.slow
def test_every_message_is_there(upgraded: Upgraded) -> None:
    topics = sorted({one["topic"] for one in upgraded.expected["messages"]})
    assert contents(upgraded.running, topics) == upgraded.expected["messages"]


@pytest.mark.slow
def test_settings_offsets_and_dead_letters_are_there(upgraded: Upgraded) -> None:
    running, expected = upgraded.running, upgraded.expected
    with running.admin() as admin:
        found = {name: settings_of(config) for name, config in admin.topics().items()}
    for name, settings in expected["topics"].items():
        assert found[name] | settings == found[name]
    assert {group: committed(running, group) for group in expected["groups"]} == expected["groups"]
    assert [asdict_of(one) for one in letters(running)] == expected["letters"]


@pytest.mark.slow
def test_work_continues(upgraded: Upgraded) -> None:
    """A transaction in doubt is committed, a group continues from its offsets, letters are sent again, logs grow."""
    running, expected = upgraded.running, upgraded.expected
    with running.producer() as producer:
        (xid,) = producer.tpc_recover()
        assert xid == producer.xid(1, XID)
        producer.tpc_commit(xid)
        wait_until(
            lambda: b"in doubt".hex() in [one["value"] for one in contents(running, ["orders"])], what="the message"
        )
        producer.send("plain", b"of the next release", partition="0-0").result(60)
    with running.consumer(topics="plain", group="etl", idle_timeout_s=0.5) as consumer:
        values = [message.value.hex() for message in consumer]
    old = [one["value"] for one in expected["messages"] if one["topic"] == "plain" and is_after(expected, one)]
    assert sorted(values) == sorted([*old, b"of the next release".hex()])
    with DeadLetterQueue("failing", running.zookeeper, security=running.security) as queue:
        assert queue.resend() == 1
    assert contents(running, ["odd"])[-1]["value"] == b"given up".hex()
    before = contents(running, ["plain", "orders", "odd"])
    running.broker.restart()
    assert contents(running, ["plain", "orders", "odd"]) == before


def is_after(expected: dict[str, Any], message: dict[str, Any]) -> bool:
    """True if the group had not committed the message."""
    done = expected["groups"]["etl"].get(f"plain/{message['partition']}")
    return bool(message["offset"] >= (done or 0))
