"""docker-compose.yml keeps its promises: programs reach it; a stop loses nothing, a crash nothing acknowledged."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import defaultdict

import pytest

from metamq import Admin, Consumer
from tests.containers.conftest import Composition
from tests.load import Load, blocking, check
from tests.parts import Stored, wait_until
from tests.test_docs import snippets

pytestmark = pytest.mark.containers

ENOUGH = 2000
"""Messages sent before and after what happens to the broker."""


def ten_lines() -> str:
    (snippet,) = snippets("README.md")
    return snippet


def assert_greeted(output: str) -> None:
    sent, received = output.splitlines()
    assert received == f"{sent} b'hello'"


def test_the_readmes_ten_lines_run_outside_the_containers(composition: Composition) -> None:
    environment = {**os.environ, "METAMQ_ZOOKEEPER": composition.zookeeper}
    done = subprocess.run(
        [sys.executable, "-c", ten_lines()], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert_greeted(done.stdout)


def test_the_readmes_ten_lines_run_in_another_container(composition: Composition) -> None:
    composition.up(advertise="broker")
    output = composition.engine.containers.run(
        composition.image,
        entrypoint=["python", "-c", ten_lines()],
        environment={"METAMQ_ZOOKEEPER": "zookeeper:2181"},
        network=f"{composition.project}_default",
        remove=True,
    )
    assert_greeted(output.decode())


def test_the_health_check_follows_the_broker(composition: Composition) -> None:
    wait_until(lambda: composition.state("broker")["Health"]["Status"] == "healthy", what="the engine's own check")
    broker = composition.container("broker")
    # As any user of a container: all its processes but the first, which only starts and reaps the broker.
    assert broker.exec_run(["sh", "-c", "kill -STOP -1"]).exit_code == 0
    assert not composition.check_health("broker")
    assert broker.exec_run(["sh", "-c", "kill -CONT -1"]).exit_code == 0
    wait_until(lambda: composition.check_health("broker"), what="a ready broker")


def under_load(composition: Composition) -> list[Load]:
    """Producers that have sent enough; what happens to the broker happens to them."""
    with Admin(composition.zookeeper) as admin:
        admin.create_topic("t", partitions=3)
    kinds = [blocking(composition.zookeeper, keyed=True), blocking(composition.zookeeper, keyed=False)]
    loads = [Load(number, 0, kind) for number, kind in enumerate(kinds)]
    wait_for_more(loads)
    return loads


def wait_for_more(loads: list[Load]) -> None:
    """Returns once each producer was told of many more messages."""
    for load in loads:
        wanted = len(load.told.acknowledged) + ENOUGH
        wait_until(lambda: load.problem or len(load.told.acknowledged) >= wanted, 60, "acknowledgements")  # noqa: B023


def read_all(zookeeper: str) -> dict[str, list[Stored]]:
    """All that is in the topic, by partition."""
    stored: dict[str, list[Stored]] = defaultdict(list)
    with Consumer[bytes](zookeeper, topics=["t"], start="earliest", idle_timeout_s=2) as consumer:
        for message in consumer:
            stored[message.partition].append(Stored(message.offset, message.key, message.value))
    return stored


def assert_nothing_lost(composition: Composition, loads: list[Load]) -> None:
    told = [load.join() for load in loads]
    assert [one.failed for one in told] == [{}, {}]
    check(told, read_all(composition.zookeeper))


def test_sigterm_under_load_drains_in_time_and_loses_nothing(composition: Composition) -> None:
    loads = under_load(composition)
    try:
        before = time.monotonic()
        composition.compose("stop", "broker")
        assert time.monotonic() - before < 20, "it took longer than the broker gives itself"
        state = composition.state("broker")
        # 137 would be the engine's SIGKILL after the time given in docker-compose.yml.
        assert (state["Status"], state["ExitCode"]) == ("exited", 0)
        composition.compose("start", "broker")
        wait_for_more(loads)
    finally:
        for load in loads:
            load.ending.set()
    assert_nothing_lost(composition, loads)


def test_after_kill_9_under_load_it_comes_back_with_what_was_acknowledged(composition: Composition) -> None:
    loads = under_load(composition)
    try:
        started = composition.state("broker")["StartedAt"]
        # From inside, as a crash: the engine does not restart what was killed through it.
        composition.container("broker").exec_run(["sh", "-c", "kill -KILL -1"])
        wait_until(lambda: composition.state("broker")["StartedAt"] != started, what="the engine's restart")
        wait_for_more(loads)
    finally:
        for load in loads:
            load.ending.set()
    assert_nothing_lost(composition, loads)
