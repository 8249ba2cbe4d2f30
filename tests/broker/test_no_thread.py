"""Where the system gives no further thread: a broker that runs needs none, one that starts says what is missing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from metamq.client.background import BackgroundLoop
from metamq.errors import TooManyThreads
from metamq.testing import Cluster
from metamq.threads import start_pool
from tests.one_zookeeper import cluster
from tests.parts import SLOW_S, LocalBroker, until_answered, wait_until


@pytest.fixture(scope="module")
def parts() -> Iterator[Cluster]:
    with cluster(brokers=0) as running:
        yield running


def arm(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no thread can be started."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.mark.slow
def test_a_broker_that_runs_starts_no_thread(parts: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalBroker(parts.zookeeper, tmp_path / "b", id=1, retention_check_s=0.1) as broker, parts.admin() as admin:
        with parts.producer() as producer:
            arm(monkeypatch)
            for turn in range(3):
                admin.create_topic(f"t{turn}", partitions=4, brokers=[1], flush="ack", segment_bytes=1024)
                for number in range(40):
                    producer.send(f"t{turn}", b"%d" % number * 100, partition=f"1-{number % 4}").result(SLOW_S)
                admin.alter(f"t{turn}", retention_bytes=1)
                admin.delete(f"t{turn}")
            topics = tmp_path / "b" / "topics"
            wait_until(lambda: not [path for path in topics.iterdir() if path.name.startswith("t")])
            monkeypatch.undo()
        assert broker.broker.failure is None


@pytest.mark.parametrize(
    "refused", ["metamq-fsync-3", "metamq-topics_1", "metamq-housekeeping_0", "metamq-scrub_0", "metamq-http"]
)
def test_a_broker_that_starts_says_which_thread_it_lacks_and_lets_go_of_everything(
    parts: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    start = threading.Thread.start

    def some(thread: threading.Thread) -> None:
        if thread.name == refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    before = set(threading.enumerate())
    monkeypatch.setattr(threading.Thread, "start", some)
    with pytest.raises(TooManyThreads, match=rf"the thread '{refused.partition('_')[0]}' cannot be started.*ulimit -u"):
        LocalBroker(parts.zookeeper, tmp_path / "b", id=2).__enter__()
    monkeypatch.undo()
    wait_until(lambda: not {t.name for t in set(threading.enumerate()) - before if t.name.startswith("metamq-")})
    with LocalBroker(parts.zookeeper, tmp_path / "b", id=2) as broker:
        assert until_answered(lambda: broker.broker.readiness()[0])


def test_a_client_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    arm(monkeypatch)
    with pytest.raises(TooManyThreads, match="the thread 'metamq' cannot be started"):
        BackgroundLoop()
    with pytest.raises(TooManyThreads, match="the thread 'pool' cannot be started"):
        start_pool(2, "pool")
