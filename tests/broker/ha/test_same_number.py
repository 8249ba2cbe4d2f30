"""Two processes with one replica number: the second ends, says why, and takes nothing from the first."""

from __future__ import annotations

from pathlib import Path

import pytest

from metamq.errors import MetamqError
from metamq.testing import BrokerProcess
from tests.broker.ha.test_replication import SESSION_MS, Group, a_sync_topic, group, send

__all__ = ["group"]


@pytest.mark.parametrize("number", [0, 1], ids=["of the master", "of a slave"])
def test_a_second_process_with_the_number_of_a_living_replica_ends(group: Group, tmp_path: Path, number: int) -> None:
    group.add_slave()
    topic = a_sync_topic(group)
    group.wait_insync(0, 1)
    first = group.replicas[number]
    second = BrokerProcess(group.cluster.zookeeper, tmp_path / "second", replica=number, session_timeout_ms=SESSION_MS)
    with pytest.raises(MetamqError, match="ended with status 1") as caught:
        second.start(timeout_s=20)
    said = caught.value.hint
    assert f"replica {number} of broker 0 runs already, at 127.0.0.1:{first.port}" in said
    assert "Give this one another --replica or --id" in said
    assert "new incarnation" not in said
    group.wait_insync(0, 1)
    values = send(group, topic, 5, b"after")
    assert sorted(group.read(topic)) == sorted(values)
