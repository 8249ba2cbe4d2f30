"""`metamq plan`: its arithmetic, and the sources of its figures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metamq.broker.config import BrokerConfig
from metamq.cli.sizing.measures import MEASURES
from metamq.cli.sizing.needs import FULL, Workload, sized

ROOT = Path(__file__).parent.parent.parent
LOAD = Workload(
    topics=50, partitions=20, rate=20_000, size=1000, producers=10, consumers=200, groups=1, replicas=2,
    keep_s=7 * 86_400, batch=100, commit_s=1,
)  # fmt: skip
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
WORKLOADS = st.builds(
    Workload,
    topics=st.integers(1, 1000), partitions=st.integers(1, 1000), rate=st.floats(1, 1e6), size=st.integers(1, 10**6),
    producers=st.integers(0, 10_000), consumers=st.integers(0, 10_000), groups=st.integers(0, 50),
    replicas=st.integers(1, 16), keep_s=st.floats(1, 1e8), batch=st.integers(1, 10_000), commit_s=st.floats(0.1, 60),
)  # fmt: skip


@pytest.mark.parametrize("name", MEASURES)
def test_a_figure_is_that_of_its_source(name: str) -> None:
    measure = MEASURES[name]
    file, place = measure.source.split(" ", 1)
    if file == "docs/scaling.md":
        rows = [line for line in (ROOT / file).read_text().splitlines() if place in line]
        numbers = {float(one.replace(",", "")) for row in rows for one in NUMBER.findall(row)}
        assert measure.value in numbers, rows
        return
    found: Any = json.loads((ROOT / "bench" / "results" / file).read_text())
    for step in place.split("."):
        found = found[int(step) if isinstance(found, list) else step]
    assert measure.value == pytest.approx(found, rel=0.02)


def test_the_disk_keeps_a_week_of_messages() -> None:
    cluster = sized(LOAD)
    written = cluster.broker.disk_bytes * cluster.broker_ids
    assert written == pytest.approx(20_000 * 1000 * 7 * 86_400 * 1.25)
    assert cluster.processes == cluster.broker_ids * 2


def test_nodes_are_those_of_topics_groups_and_brokers() -> None:
    quiet = replace(LOAD, groups=0, consumers=0, replicas=1)
    less = sized(quiet).zookeeper.nodes
    assert less == 50 * (1 + 2 + 2) + 5  # a configuration, two folders and two offers of each topic; a broker id
    with_group = sized(replace(quiet, groups=1, consumers=200)).zookeeper.nodes
    assert with_group - less == 2 * 1000 + 2 * 50 + 5 + 200


def test_commits_are_no_more_than_messages() -> None:
    assert sized(LOAD).zookeeper.commits_per_s == 1000
    assert sized(replace(LOAD, rate=10)).zookeeper.commits_per_s == 10
    assert sized(replace(LOAD, commit_s=10)).zookeeper.commits_per_s == 100


def test_partitions_alone_ask_for_broker_ids() -> None:
    cluster = sized(replace(LOAD, topics=1000, partitions=100, rate=1))
    assert (cluster.broker_ids, cluster.reason) == (20, "the partitions")


def test_the_first_limit_is_the_most_used_one() -> None:
    assert sized(LOAD).first.what == "processor of a broker id, cores"
    many_groups = sized(replace(LOAD, groups=50, consumers=200, rate=1000, partitions=10))
    assert many_groups.first.what == "processor of ZooKeeper, cores"


def test_sizes_beyond_the_measured_ones_are_named() -> None:
    assert "members of a group" not in [one.what for one in sized(LOAD).untried]
    beyond = {one.what: one for one in sized(replace(LOAD, consumers=1000)).untried}
    assert (beyond["members of a group"].used, beyond["members of a group"].limit) == (1000, 200)


def test_more_clients_than_connections_max_need_another_setting() -> None:
    assert sized(LOAD).broker.connections_max == BrokerConfig().connections_max == 10_000
    many = sized(replace(LOAD, consumers=12_000))
    (limit,) = [one for one in many.limits if "connections_max" in one.what]
    assert (limit.used, limit.limit, limit.is_hard) == (12_010, 10_000, True)
    assert (many.broker.connections_max, many.broker.descriptors) == (24_020, 65_536)
    assert sized(replace(LOAD, consumers=20_000)).broker.descriptors == 2 * 40_020
    assert many.broker_ids == sized(LOAD).broker_ids  # each client has a connection to each of them


@given(WORKLOADS)
def test_every_workload_gets_a_cluster_that_is_half_full(load: Workload) -> None:
    cluster = sized(load)
    assert cluster.broker.cores <= FULL + 1e-9
    assert cluster.broker.partitions <= MEASURES["partitions_tried"].value * FULL
    assert load.clients <= cluster.broker.connections_max
    assert [one.share for one in cluster.limits] == sorted((one.share for one in cluster.limits), reverse=True)


@given(WORKLOADS)
def test_more_work_needs_no_less(load: Workload) -> None:
    now, later = sized(load), sized(load.times(10))
    assert later.broker_ids >= now.broker_ids
    assert later.zookeeper.nodes >= now.zookeeper.nodes
    assert later.zookeeper.cores >= now.zookeeper.cores


def test_the_command_names_each_limit_that_is_passed(offline: Callable[..., Any]) -> None:
    shown = offline(*ARGUMENTS[:-1], 12_000)
    assert "of a process: connections_max 24,020 " in " ".join(shown.text.split())
    assert "Also passed: connections of clients, by the default of connections_max, 120% used. Remedy: " in shown.text


ARGUMENTS = ("plan", "--topics", 50, "--partitions", 20, "--rate", 20_000, "--size", 1000, "--consumers", 200)


def test_the_command_prints_needs_and_limits(offline: Callable[..., Any]) -> None:
    shown = offline(*ARGUMENTS, "--keep", "7d", "--replicas", 2)
    assert shown.status == 0, shown.talk
    for words in ("broker ids", "ZooKeeper: nodes", "10 TIMES", "First limit:", "First limit at 10 times:"):
        assert words in shown.text


def test_json_has_the_sources_of_the_figures(offline: Callable[..., Any]) -> None:
    printed = json.loads(offline(*ARGUMENTS, "-o", "json").text)
    assert printed["cluster"]["broker_ids"] == sized(LOAD).broker_ids
    assert printed["measures"]["commit_us"]["source"]
    assert printed["ten_times"]["zookeeper"]["sessions"] > printed["cluster"]["zookeeper"]["sessions"]
