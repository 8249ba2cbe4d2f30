"""A slave without room on its disk: it stores nothing more, lives on, and is back in sync when there is room."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from metamq.errors import DiskFull
from metamq.testing import BrokerProcess
from tests.broker.ha.test_replication import LAG_MS, SESSION_MS, Group, a_sync_topic, group, send
from tests.broker.test_disk import RESERVE_BYTES, SmallDisk, small_disk
from tests.parts import http_get, wait_until

__all__ = ["group", "small_disk"]


@pytest.fixture
def slave(group: Group, small_disk: SmallDisk) -> Iterator[BrokerProcess]:
    made = BrokerProcess(
        group.cluster.zookeeper, small_disk.folder / "replica-1", replica=1, session_timeout_ms=SESSION_MS,
        insync_lag_ms=LAG_MS, disk_reserve_bytes=RESERVE_BYTES,
    )  # fmt: skip
    group.replicas.append(made)
    made.start()
    yield made
    made.kill()
    shutil.rmtree(made.data, ignore_errors=True)


@pytest.mark.slow
def test_a_slave_without_room_stores_nothing_holds_nothing_up_and_comes_back(
    group: Group, slave: BrokerProcess, small_disk: SmallDisk
) -> None:
    topic = a_sync_topic(group)
    group.wait_insync(0, 1)
    values = send(group, topic, 5, b"before")
    group.wait_equal(0, 1)
    small_disk.fill()
    wait_until(lambda: "in reserve" in http_get(slave.http_port, "/readyz")[1], what="the full disk seen")
    before = group.ends(1)
    values += send(group, topic, 5, b"without room")
    group.wait_insync(0)
    assert slave.running
    assert group.ends(1) == before
    told = [line for line in slave.log_path.read_text().splitlines() if "no link to the master" in line]
    assert 1 <= len([line for line in told if "in reserve" in line]) <= 2, "not at each attempt"
    small_disk.empty()
    group.wait_insync(0, 1)
    assert "linked to the master" in slave.log_path.read_text()
    values += send(group, topic, 5, b"after")
    group.wait_equal(0, 1)
    assert sorted(group.read(topic)) == sorted(values)


@pytest.mark.slow
def test_a_slave_whose_disk_takes_no_file_lives_on_and_comes_back(
    group: Group, slave: BrokerProcess, small_disk: SmallDisk
) -> None:
    """Bytes are free, so that nothing warns it: the write itself is refused, of a segment as of a checkpoint."""
    topic = a_sync_topic(group, partitions=1, segment_bytes=2000)
    group.wait_insync(0, 1)
    values = send(group, topic, 20, b"before")
    group.wait_equal(0, 1)
    pid = slave.pid
    small_disk.use_up_files()
    values += send(group, topic, 60, b"without room" + bytes(100))
    wait_until(lambda: "no space is left on the disk" in slave.log_path.read_text(), what="the full disk met")
    group.wait_insync(0)
    assert (slave.running, slave.pid) == (True, pid)
    small_disk.empty()
    group.wait_insync(0, 1)
    values += send(group, topic, 5, b"after")
    group.wait_equal(0, 1)
    assert (slave.running, slave.pid) == (True, pid)
    assert sorted(group.read(topic)) == sorted(values)


def test_a_slave_that_cannot_note_its_term_is_not_promoted(
    group: Group, slave: BrokerProcess, small_disk: SmallDisk
) -> None:
    """The master stays the master: else there would be none until there is room."""
    topic = a_sync_topic(group, partitions=1)
    group.wait_insync(0, 1)
    small_disk.use_up_files()
    with pytest.raises(DiskFull):
        group.promote_once(1)
    assert group.state().master == 0
    send(group, topic, 5, b"at the former master")
    small_disk.empty()
    group.promote(1)
    group.wait_insync(0, 1, master=1)
