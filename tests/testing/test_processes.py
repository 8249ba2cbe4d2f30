"""metamq.testing: a cluster leaves nothing behind, whatever becomes of its parts or of the process that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from metamq.errors import ConfigError, Timeout
from metamq.testing import BrokerProcess, Cluster, cluster
from metamq.zk.server.ports import free_port
from tests.parts import gone, wait_until


@pytest.mark.slow
def test_a_broker_that_ended_by_itself_is_no_trouble_at_the_end() -> None:
    """An open pipe would fail this test with a ResourceWarning."""
    with cluster() as running:
        os.kill(running.broker.pid, signal.SIGKILL)
        wait_until(lambda: not running.broker.running)


def test_a_folder_is_for_one_cluster(metamq_cluster: Cluster) -> None:
    with (
        pytest.raises(ConfigError, match=r"has the data of a cluster.*a new folder"),
        cluster(folder=metamq_cluster.folder),
    ):
        pass


def test_a_broker_that_never_serves_is_given_up(tmp_path: Path) -> None:
    broker = BrokerProcess(f"127.0.0.1:{free_port()}", tmp_path / "broker")
    began = time.monotonic()
    with pytest.raises(Timeout, match=r"the start of broker 0 took longer than 0\.5 s") as caught:
        broker.start(timeout_s=0.5)
    assert time.monotonic() - began < 30  # of 60 by default
    assert f"Its log {broker.log_path}" in caught.value.hint
    assert not broker.running


def children_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def test_a_cluster_dies_with_its_process(metamq_cluster: Cluster) -> None:
    program = (
        "import sys; from pathlib import Path; from metamq.testing import BrokerProcess;"
        "broker = BrokerProcess(sys.argv[1], Path(sys.argv[2]), 7); broker.start(); print('up', flush=True); input()"
    )
    command = [sys.executable, "-c", program, metamq_cluster.zookeeper, str(metamq_cluster.folder / "orphan")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
        children = children_of(parent)
        assert children
        parent.kill()
        wait_until(lambda: gone(children), what="the end of the broker")
