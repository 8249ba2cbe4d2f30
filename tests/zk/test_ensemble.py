"""An ensemble of three servers: brokers and clients go on while one of them is killed or frozen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from metamq import Producer
from metamq.errors import ConfigError
from metamq.testing import Cluster, cluster
from metamq.zk.server.embedded import EmbeddedZooKeeper
from metamq.zk.server.ensemble import SYNC_MS, Ensemble
from tests.ensemble import Servers
from tests.parts import read_topic, wait_until

GIVEN_UP = "GOODBYE"
"""A leader's log says so when it ends its connection to a follower."""


@pytest.mark.parametrize(
    ("text", "servers"),
    [
        ("zk1,zk2,zk3", ("zk1:2888:3888", "zk2:2888:3888", "zk3:2888:3888")),
        ("a:1:2, b:3:4 ,[::1]", ("a:1:2", "b:3:4", "[::1]:2888:3888")),
        ("h:1:2,h:3:4,h:5:6,h:7:8,h:9:10", ("h:1:2", "h:3:4", "h:5:6", "h:7:8", "h:9:10")),
    ],
)
def test_the_servers_of_an_ensemble(text: str, servers: tuple[str, ...]) -> None:
    ensemble = Ensemble.parse(2, text)
    assert ensemble == Ensemble(2, servers)
    assert ensemble.quorum == {3: 2, 5: 3}[len(servers)]
    lines = ensemble.settings(500)
    assert [lines[f"server.{number}"] for number in range(1, len(servers) + 1)] == list(servers)
    assert lines["syncLimit"] == SYNC_MS // 500


@pytest.mark.parametrize(
    ("number", "text", "problem"),
    [
        (1, "zk1", "3 to 99 servers, not 1"),
        (1, "zk1,zk2", "3 to 99 servers, not 2"),
        (4, "a,b,c", "server 4 is not in the ensemble"),
        (1, "a,b,a", "the same host and port"),
        (1, "h:1:2,h:2:3,h:4:5", "the same host and port"),
        (1, "a,b,", "'' in the ensemble"),
        (1, "a,b,c:2181", "'c:2181' in the ensemble"),
        (1, "a,b,c:0:1", "'c:0:1' in the ensemble"),
        (1, "a,b,c:5:5", "'c:5:5' in the ensemble"),
        (1, "a,b,c:1:65536", "'c:1:65536' in the ensemble"),
        (1, "zk://a,b,c", "'zk://a' in the ensemble"),
    ],
)
def test_what_is_no_ensemble_is_refused(number: int, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as failure:
        Ensemble.parse(number, text)
    assert failure.value.hint


def kill_the_leader(servers: Servers) -> None:
    leader = servers.number_of("leader")
    servers.by_number[leader].kill()
    servers.wait_for_another_leader(leader)
    servers.by_number[leader].restart()


def freeze_the_leader(servers: Servers) -> None:
    leader = servers.number_of("leader")
    servers.by_number[leader].freeze()
    servers.wait_for_another_leader(leader)
    servers.by_number[leader].thaw()


def freeze_a_follower(servers: Servers) -> None:
    frozen = servers.by_number[servers.number_of("follower")]
    log = servers.by_number[servers.number_of("leader")].log_path
    given_up = log.read_text().count(GIVEN_UP)
    frozen.freeze()
    wait_until(lambda: log.read_text().count(GIVEN_UP) > given_up, what="a leader that gives its follower up")
    frozen.thaw()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(tmp_path, stack)


@pytest.fixture
def running(servers: Servers, tmp_path: Path) -> Iterator[Cluster]:
    with cluster(zookeeper=servers.address, folder=tmp_path / "cluster", failover="auto") as made:
        made.add_slave()
        yield made


@pytest.mark.slow
def test_the_folder_of_a_server_is_no_other_servers(tmp_path: Path) -> None:
    """Nor that of a single server: it would write what the others lack."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "myid").write_text("2\n")
    for ensemble in (None, Ensemble.parse(1, "a,b,c")):
        with pytest.raises(ConfigError, match="is the data folder of server 2 of an ensemble") as failure:
            EmbeddedZooKeeper(tmp_path, ensemble=ensemble).start()
        assert "--id 2" in failure.value.hint
    (tmp_path / "data" / "myid").unlink()
    (tmp_path / "data" / "version-2").mkdir()
    with pytest.raises(ConfigError, match="has the data of a single ZooKeeper server") as failure:
        EmbeddedZooKeeper(tmp_path, ensemble=Ensemble.parse(1, "a,b,c")).start()
    assert f"here 1 into {tmp_path / 'data' / 'myid'}" in failure.value.hint


@pytest.mark.slow
def test_writes_go_on_while_one_server_of_three_is_away(servers: Servers, running: Cluster) -> None:
    """No send fails, nothing is lost, and the master stays the master."""
    with running.admin() as admin:
        topic = admin.create_topic("t", partitions=1, replication="sync", min_insync=2)
        wait_until(lambda: sum(one.in_sync for one in admin.replicas()[0].replicas) == 2)
        epoch = admin.replicas()[0].epoch
        faults: list[Callable[[Servers], None]] = [kill_the_leader, freeze_the_leader, freeze_a_follower]
        sent = 0
        with Producer[bytes](running.zookeeper) as producer:
            for fault in faults:
                with ThreadPoolExecutor(1) as pool:
                    happens = pool.submit(fault, servers)
                    while not happens.done():
                        producer.send("t", b"%d" % sent).result()
                        sent += 1
                    happens.result()
                servers.wait_for_all()
                producer.send("t", b"%d" % sent).result()
                sent += 1
        assert admin.replicas()[0].epoch == epoch
    stored = read_topic(running.broker, "t", topic.id)["0-0"]
    assert [message.value for message in stored] == [b"%d" % number for number in range(sent)]
