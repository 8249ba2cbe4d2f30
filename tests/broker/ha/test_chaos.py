"""Three replicas under load, and whatever may happen to machines, networks and ZooKeeper, at random.

METAMQ_SEED repeats a run's choices, not its timing.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import defaultdict
from pathlib import Path

import pytest

from tests.broker.ha.chaos import REPLICAS, Chaos, NetworkedGroup, networked_group
from tests.broker.ha.chaos_load import PARTITIONS, TOPIC, Load
from tests.broker.ha.history import Given, History, faults, faults_after_accepted_loss
from tests.parts import wait_until


def survive(group: NetworkedGroup, duration_s: float, seed: int, *, accept_loss: bool = False) -> None:
    """Chaos for so long; then all is mended, read to the end, and looked at."""
    print(f"METAMQ_SEED={seed}")
    group.cluster.create_topic(TOPIC, partitions=PARTITIONS, replication="async" if accept_loss else "sync")
    group.wait_insync(*range(REPLICAS))
    chaos = Chaos(group, seed, accept_loss=accept_loss)
    load = Load(group.zookeeper, group.cluster.zookeeper, seed, loss_accepted=accept_loss)
    try:
        chaos.run(time.monotonic() + duration_s)
        chaos.healed()
        load.stop_sending()
        logs = logs_of(group)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not load.missed(logs), limit_s=60)
        assert load.missed(logs)[:10] == []
    finally:
        load.stop()
        print(", ".join(f"{count} x {what}" for what, count in sorted(chaos.done.items())))
    with group.cluster.admin() as admin:
        generation = admin.replicas()[0].generation
    history = load.history
    stored = sum(map(len, logs.values()))
    print(
        f"{len(history.acknowledged):,} acknowledged, {stored:,} stored, {len(load.reader.seen):,} read, "
        f"{len(load.group.seen):,} handled by the group, {load.group.again:,} of them again, "
        f"{load.group.commits:,} commits seen, {sum(chaos.done.values())} faults, {generation - 1} losses accepted"
    )
    found = faults_after_accepted_loss(history, logs, generation) if accept_loss else faults(history, logs)
    assert load.faults + found == []
    assert len(history.acknowledged) > 100
    group.wait_equal(*range(REPLICAS))


def logs_of(group: NetworkedGroup) -> dict[str, list[bytes]]:
    logs: dict[str, list[bytes]] = defaultdict(list, {f"0-{n}": [] for n in range(PARTITIONS)})
    with group.cluster.consumer(topics=[TOPIC], idle_timeout_s=2) as consumer:
        for batch in consumer.batches():
            assert batch.offset == len(logs[batch.partition])
            logs[batch.partition] += batch.values
    return logs


def a_seed() -> int:
    return int(os.environ.get("METAMQ_SEED", random.randrange(1 << 32)))


@pytest.mark.timeout(300)
def test_nothing_acknowledged_is_lost_or_doubled_and_nothing_seen_is_taken_back(tmp_path: Path) -> None:
    with networked_group(tmp_path) as group:
        survive(group, float(os.environ.get("METAMQ_CHAOS_S", "60")), a_seed())


@pytest.mark.timeout(300)
def test_with_accepted_losses_nothing_is_doubled_and_readers_miss_nothing_of_what_stayed(tmp_path: Path) -> None:
    with networked_group(tmp_path) as group:
        survive(group, float(os.environ.get("METAMQ_CHAOS_S", "12")), a_seed(), accept_loss=True)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_for_ten_minutes(tmp_path: Path) -> None:
    with networked_group(tmp_path) as group:
        survive(group, 600, a_seed())


def test_the_check_bites() -> None:
    history = History({b"1-0": ("0-0", 0), b"1-1": ("0-0", 1)}, [(("0-0", 0), b"1-0")])
    assert faults(history, {"0-0": [b"1-0", b"1-1"]}) == []
    assert "was acknowledged" in faults(history, {"0-0": [b"1-0"]})[0]
    assert "is there 2 times" in faults(history, {"0-0": [b"1-0", b"1-1", b"1-1"]})[0]
    assert "not in the order" in faults(History(), {"0-0": [b"1-1", b"1-0"]})[0]
    assert "a reader saw" in faults(History(seen=[(("0-0", 0), b"1-9")]), {"0-0": [b"1-0"]})[0]


def test_the_check_of_consumers_bites() -> None:
    given = Given("g")
    given.batch("0-0", 0, [b"a", b"b"])
    given.batch("0-0", 1, [b"b", b"c"])
    given.committed("0-0", 3)
    assert (given.faults, given.again, given.commits) == ([], 1, 1)
    assert given.missed({"0-0": [b"a", b"b", b"c"]}) == []
    assert given.missed({"0-0": [b"a", b"b", b"d"]}) == ["g was not given b'd' at 0-0/2, but b'c'"]
    given.batch("0-0", 4, [b"e"])
    given.committed("0-0", 2)
    given.committed("0-0", 6)
    assert ["nothing from 3 on" in given.faults[0], "back to 2" in given.faults[1], "up to 5" in given.faults[2]] == [
        True, True, True,
    ]  # fmt: skip
