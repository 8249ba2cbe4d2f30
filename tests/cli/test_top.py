"""`metamq top`."""

from __future__ import annotations

import io
import os
import pty
import select
import termios
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from metamq.cli.commands import top as top_command
from metamq.cli.commands.top import _sampler, screen
from metamq.cli.show.top_view import ORDERS, ClusterLoad, GroupLoad, Sample, figures, ordered, sections
from metamq.client.admin.admin_model import (
    BrokerDescription,
    BrokerStatistics,
    GroupDescription,
    GroupPartition,
    PartitionStatistics,
)
from metamq.testing import Cluster
from metamq.zk.cluster.topics import TopicConfig
from tests.cli.conftest import COMMAND, LIMIT_S, Metamq, unset
from tests.one_zookeeper import cluster

PART = PartitionStatistics("t", "0-0", 10, 60, 60, 1024, 0)
COUNTERS = BrokerStatistics(
    broker_id=0, epoch=3, version="1", time_ms=5000, writes_refused=None, messages_in={"t": 100}, bytes_in={"t": 1000},
    batches_in={"t": 1}, bytes_out=50, fetches=0, repeats=0, replica=0, incarnation=0, partitions=(PART,),
)  # fmt: skip
GROUP = GroupDescription("g", None, None, (), (GroupPartition("t", "0-0", 20, 10, 60, None, None),), None)


def sample(at_s: float, **counters: Any) -> Sample:
    brokers = {0: BrokerDescription(0, 3, True, "h", 1, 0, "1"), 1: BrokerDescription(1, 3, False)}
    topics = {"t": TopicConfig(topic="t", id="id", partitions={0: 1, 1: 2})}
    return Sample(at_s, brokers, topics, {0: replace(COUNTERS, **counters)}, {"g": GROUP}, {})


def test_rates_are_between_two_samples() -> None:
    later = {"time_ms": 7000, "messages_in": {"t": 300}, "bytes_in": {"t": 5000}, "bytes_out": 150}
    after = sample(12, **later)
    committed = replace(GROUP, partitions=(GroupPartition("t", "0-0", 40, 10, 60, None, None),))
    found = figures(sample(10), replace(after, groups={"g": committed})).document()
    assert found["brokers"][0] == {
        "broker_id": 0, "address": "h:1", "state": "live", "messages_s": 100, "bytes_in_s": 2000, "bytes_out_s": 50,
        "partitions": 1, "size_bytes": 1024, "status": None,
    }  # fmt: skip
    assert found["topics"] == [
        {"topic": "t", "partitions": 3, "messages_s": 100, "bytes_in_s": 2000, "messages": None, "size_bytes": None}
    ]
    alone = replace(after, topics={"t": replace(after.topics["t"], partitions={0: 1})})
    (topic,) = figures(alone, alone).document()["topics"]
    assert (topic["messages"], topic["size_bytes"]) == (50, 1024)
    assert found["groups"] == [{"group": "g", "members": 0, "done_s": 10, "lag": 20}]
    assert (found["brokers"][1]["state"], found["brokers"][1]["messages_s"]) == ("down", None)


@pytest.mark.parametrize("change", [{"epoch": 4}, {"bytes_out": 1}, {"time_ms": 5000}])
def test_after_a_restart_a_rate_is_not_known(change: dict[str, Any]) -> None:
    found = figures(sample(10), sample(12, **{"time_ms": 7000, **change}))
    assert found.brokers[0].messages_s is None
    assert found.topics[0].messages_s is None


def test_a_document_has_the_wanted_order() -> None:
    groups = [GroupLoad(name, 1, rate, lag) for name, rate, lag in (("b", 1.0, 5), ("a", 2.0, 3), ("c", None, None))]
    names = {order: [one.group for one in ordered(ClusterLoad(1, [], [], groups), order).groups] for order in ORDERS}
    assert names == {"rate": ["a", "b", "c"], "size": ["b", "a", "c"], "name": ["a", "b", "c"]}


def test_what_fits_is_shown_on_any_screen() -> None:
    one = figures(sample(10), sample(12, time_ms=7000))
    topics = [replace(one.topics[0], topic=f"topic-{number}\x1b[2J", messages_s=number) for number in range(1000)]
    for width, height in ((200, 50), (80, 24), (40, 12), (20, 12)):
        out = io.StringIO()
        for order in ORDERS:
            parts = sections(replace(one, topics=topics), order)
            Console(file=out, width=width, height=height).print(screen(parts, height, order, "no \x1b answer"))
        text = out.getvalue()
        assert "\x1b" not in text
        assert len(text.splitlines()) <= height * len(ORDERS)
        assert "and 9" in text


@pytest.fixture
def _busy(running: Cluster, topic: str) -> Iterator[None]:
    """Somebody sends to the topic all the time."""
    ended = threading.Event()

    def send() -> None:
        with running.producer() as producer:
            while not ended.wait(0.01):
                producer.send(topic, b"x").result(60)

    sending = threading.Thread(target=send)
    sending.start()
    yield
    ended.set()
    sending.join()


@pytest.mark.usefixtures("_busy")
def test_a_snapshot_has_rates(metamq: Metamq, topic: str) -> None:
    metamq("consume", topic, "-g", topic, "-n", 1)
    found = metamq("top", "--once", "-o", "json", "--interval", "1s").json
    (broker,) = found["brokers"]
    assert broker["messages_s"] > 0
    assert broker["bytes_in_s"] > 0
    (mine,) = [one for one in found["topics"] if one["topic"] == topic]
    assert mine["messages_s"] > 0
    assert mine["messages"] > 0
    (group,) = [one for one in found["groups"] if one["group"] == topic]
    assert group["lag"] > 0
    lines = metamq("top", "--sort", "name", "--interval", "100ms").text.splitlines()
    assert lines[0].split() == ["BROKER", "ADDRESS", "MSG/S", "IN/S", "OUT/S", "PARTS", "SIZE", "STATE"]
    assert lines[1].split()[-1] == "live"


@pytest.mark.slow
def test_a_broker_that_is_away_hides_no_other(offline: Metamq) -> None:
    with cluster() as running:
        other = running.add_broker(id=1)
        running.create_topic("t", partitions=2)
        options = ("-o", "json", "--interval", "100ms", "--zookeeper", running.zookeeper)
        other.freeze()
        try:
            states = [one["state"] for one in offline("top", *options).json["brokers"]]
        finally:
            other.thaw()
        assert states[0] == "live"
        assert "answer" in states[1] or states[1] == "down"
        other.stop()
        found = offline("top", *options).json
    assert [one["state"] for one in found["brokers"]] == ["live", "down"]
    assert found["topics"][0]["partitions"] == 2


@pytest.mark.slow
def test_many_groups_of_a_frozen_broker_hide_no_other_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_command, "ANSWER_S", 1.0)
    with cluster() as running:
        other = running.add_broker(id=1)
        running.create_topic("t", partitions=2)
        for number in range(2 * top_command.THREADS):
            with running.consumer(topics="t", group=f"g{number}"):
                pass
        with running.admin() as admin, _sampler(admin) as sampler:
            other.freeze()
            try:
                samples = [sampler.sample() for _ in range(3)]
            finally:
                other.thaw()
    assert [list(one.statistics) for one in samples] == [[0]] * 3
    assert [list(one.problems) for one in samples] == [[1]] * 3


@pytest.mark.parametrize("ending", [b"q", b"\x03"])
def test_on_a_terminal_it_ends_by_a_key(
    running: Cluster, topic: str, ending: bytes, until: Callable[..., None]
) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        variables = {"METAMQ_ZOOKEEPER": running.zookeeper, "TERM": "xterm", "COLUMNS": "100"}
        variables["LINES"] = "1000"  # the cluster has topics of other tests
        os.execve(COMMAND[0], [*COMMAND, "top", "--interval", "100ms"], {**unset(os.environ), **variables})
    try:
        written = b""

        def shows(*words: bytes) -> bool:
            nonlocal written
            if select.select([terminal], [], [], 0.1)[0]:
                written += os.read(terminal, 65536)
            return all(word in written for word in words)

        until(lambda: shows(b"sorted by rate", topic.encode(), b"live"))
        os.write(terminal, b"s")
        until(lambda: shows(b"sorted by size"))
        os.write(terminal, ending)
        until(lambda: shows(b"\x1b[?1049l"), "the former screen", LIMIT_S)
        _pid, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert termios.tcgetattr(terminal)[3] & termios.ECHO
    finally:
        os.close(terminal)
