"""Two processes with one replica number: the second ends, says why, and takes nothing from the first.

The second may use an empty folder, or a copy of the first one's, which says of itself all that the first one does.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from metamq.errors import Fenced, MetamqError
from metamq.testing import BrokerProcess
from metamq.testing.network import Way
from tests.broker.ha.chaos import ZOOKEEPER, networked_group, party
from tests.broker.ha.direct_puts import DirectPuts
from tests.broker.ha.test_cuts import registered
from tests.broker.ha.test_replication import LAG_MS, SESSION_MS, Group, a_sync_topic, group, raises_fenced, send
from tests.parts import statistics, wait_until

__all__ = ["group"]

Copy = Callable[[int], BrokerProcess]
BOTH = pytest.mark.parametrize("number", [0, 1], ids=["of the master", "of a slave"])


def second_process(group: Group, data: Path, number: int) -> BrokerProcess:
    settings = {"session_timeout_ms": SESSION_MS, "insync_lag_ms": LAG_MS}
    return BrokerProcess(group.cluster.zookeeper, data, replica=number, **settings)


@pytest.fixture
def copy(group: Group, tmp_path: Path) -> Iterator[Copy]:
    """Makes a process over a copy of a replica's data folder; not started."""
    made = []

    def make(number: int) -> BrokerProcess:
        subprocess.run(["cp", "-r", str(group.replicas[number].data), str(tmp_path / "copy")], check=True)
        made.append(second_process(group, tmp_path / "copy", number))
        return made[-1]

    yield make
    for process in made:
        process.kill()


def incarnation(broker: BrokerProcess) -> int:
    found: int = json.loads((broker.data / "meta.json").read_text())["incarnation"]
    return found


def refused(second: BrokerProcess, first: BrokerProcess, number: int) -> str:
    """What a process says that ends because `first` is that replica, and loses nothing by it."""
    with pytest.raises(MetamqError, match="ended with status 1") as caught:
        second.start()
    said = caught.value.hint
    assert f"replica {number} of broker 0 runs already, at 127.0.0.1:{first.port}" in said
    assert "new incarnation" not in said
    return said


@pytest.mark.slow
@BOTH
def test_a_second_process_with_the_number_of_a_living_replica_ends(group: Group, tmp_path: Path, number: int) -> None:
    group.add_slave()
    topic = a_sync_topic(group)
    group.wait_insync(0, 1)
    second = second_process(group, tmp_path / "second", number)
    assert "Give this one another --replica or --id" in refused(second, group.replicas[number], number)
    group.wait_insync(0, 1)
    values = send(group, topic, 5, b"after")
    assert sorted(group.read(topic)) == sorted(values)


@pytest.mark.slow
@BOTH
def test_a_copy_of_the_folder_of_a_living_replica_ends(group: Group, copy: Copy, number: int) -> None:
    """However often it is started."""
    group.add_slave()
    topic = a_sync_topic(group)
    group.wait_insync(0, 1)
    values = send(group, topic, 5, b"before")
    second = copy(number)
    first, terms = group.replicas[number], [statistics(replica)["epoch"] for replica in group.replicas]
    for _ in range(2):
        assert "This data folder and the one in use there are copies of each other" in refused(second, first, number)
    assert incarnation(second) == incarnation(first)
    values += send(group, topic, 5, b"after")
    group.wait_equal(0, 1)
    assert sorted(group.read(topic)) == sorted(values)
    group.wait_insync(0, 1)
    assert [statistics(replica)["epoch"] for replica in group.replicas] == terms, "nobody lost its place"


@pytest.mark.slow
def test_an_older_copy_of_a_slaves_folder_is_not_the_member_that_was_in_sync(group: Group, copy: Copy) -> None:
    topic = a_sync_topic(group)
    slave = group.add_slave()
    group.wait_insync(0, 1)
    values = send(group, topic, 5, b"both")
    group.wait_equal(0, 1)
    second = copy(1)
    values += send(group, topic, 5, b"not in the copy")
    group.wait_equal(0, 1)
    slave.freeze()  # so that it stays in the set until the master is dead
    group.cluster.broker.kill()
    slave.kill()
    group.replicas[1] = second
    second.start()
    assert "this replica is a new incarnation" in second.log_path.read_text()
    assert "not in the in-sync set" in str(raises_fenced(lambda: group.promote_once(1)))
    group.cluster.broker.start()
    group.wait_insync(0, 1)
    values += send(group, topic, 5, b"after")
    group.wait_equal(0, 1)
    group.promote(1)
    assert sorted(group.read(topic)) == sorted(values)
    known = incarnation(second)
    second.restart()
    assert incarnation(second) == known, "a copy is one once"
    group.wait_insync(0, 1, master=1)


@pytest.mark.slow
def test_an_older_copy_of_a_masters_folder_waits_for_who_is_in_sync(group: Group, copy: Copy) -> None:
    topic = a_sync_topic(group)
    group.add_slave()
    group.wait_insync(0, 1)
    values = send(group, topic, 5, b"both")
    second = copy(0)
    values += send(group, topic, 5, b"not in the copy")
    group.wait_equal(0, 1)
    group.lose_master(group.cluster.broker.kill, 1)
    group.replicas[0] = second
    second.start()
    wait_until(lambda: group.replication(0)["role"] == "waiting", what="the role")
    assert "replica 1 may be ahead" in group.replication(0)["reason"]
    group.promote(1)
    group.wait_insync(0, 1, master=1)
    values += send(group, topic, 5, b"after")
    group.wait_equal(0, 1)
    assert sorted(group.read(topic)) == sorted(values)


@pytest.mark.slow
def test_an_original_that_was_cut_off_ends_when_a_copy_has_taken_its_place(tmp_path: Path) -> None:
    """Nobody can tell it meanwhile; afterwards it takes nothing back, and acknowledges nothing."""
    with networked_group(tmp_path, replicas=2) as group:
        original = group.replicas[0]
        group.cluster.create_topic("t", partitions=1)
        group.wait_insync(0, 1)
        with group.cluster.admin() as admin:
            config = admin.describe_topic("t").config
        way = Way(party(0), ZOOKEEPER)
        group.network.cut(way, way.back)
        wait_until(lambda: registered(group, "master") is None, what="the end of the original's session")
        subprocess.run(["cp", "-r", str(original.data), str(tmp_path / "copy")], check=True)
        second = second_process(group, tmp_path / "copy", 0)
        try:
            second.start()
            group.replicas[0] = second
            assert group.replication(0)["role"] == "waiting"
            epoch = group.promote(0, accept_loss=True)
            with DirectPuts(original, config) as puts:
                wait_until(lambda: puts.refused, what="refusals")
                group.network.heal(way, way.back)
                assert original.wait(60) == 1
            assert puts.acknowledged == []
            assert {type(one.error) for one in puts.refused} == {Fenced}
            said = original.log_path.read_text()
            assert f"replica 0 of broker 0 runs already, at 127.0.0.1:{second.port}" in said
            assert statistics(second)["epoch"] == epoch
            group.wait_insync(0, 1)
        finally:
            original.kill()
            second.kill()
