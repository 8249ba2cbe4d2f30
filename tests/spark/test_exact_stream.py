"""The life of a stream that is exactly once, on executors of its own: each fault comes in the middle of a batch."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from metamq.testing import Cluster, cluster
from tests.parts import wait_until
from tests.spark.conftest import send
from tests.spark.standalone import Standalone, session_on
from tests.spark.test_exact_sink import EXACTLY, open_branches
from tests.spark.test_sink import stored
from tests.spark.test_stream_faults import DAEMON, in_sync
from tests.spark.test_stream_source import numbers

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

A_FAULT = 400
ROWS_AT_ONCE = 10
HALF = 5
ROW_BYTES = 30_000
"""What comes before the half of a task's rows is more than a batch: some of it is at a broker."""
AWAY_S = 30


@pytest.fixture(scope="module")
def spark(executors: Standalone, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A session there, which runs a task twice that takes long."""
    conf = {"spark.speculation": "true", "spark.speculation.quantile": "0.5", "spark.speculation.multiplier": "3"}
    conf["spark.sql.execution.arrow.maxRecordsPerBatch"] = str(ROWS_AT_ONCE)
    with session_on(executors, tmp_path_factory.mktemp("driver"), conf) as started:
        yield started


def halting(place: str) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """For mapInArrow: makes large rows. While there is a file `place`/fault, the attempt at a task that is the first to
    come to half of them says so, and waits for a file with the name that stands in it; where one task is to, its number
    follows."""

    def each(batches: Iterator[Any]) -> Iterator[Any]:
        import contextlib
        import time
        from pathlib import Path

        import pyarrow as pa
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        fault = Path(place) / "fault"
        for number, batch in enumerate(batches):
            if number == HALF and fault.exists():
                name, _, only = fault.read_text().partition(" ")
                if only in ("", str(context.partitionId())):
                    # Its second attempt may be the first: Spark makes one where the executor starts slowly, too.
                    with contextlib.suppress(FileExistsError):
                        (fault.parent / f"{name}.{context.partitionId()}.halts").touch(exist_ok=False)
                        while not (fault.parent / name).exists():
                            time.sleep(0.01)
            yield pa.record_batch({"value": [value.ljust(ROW_BYTES) for value in batch.column(0).to_pylist()]})

    return each


class Life:
    """The stream, its topics, and the faults that come to it."""

    def __init__(self, spark: Any, own: Cluster, place: Path) -> None:
        self._own = own
        self._place = place
        self._sent = 0
        source = spark.readStream.format("metamq").options(
            zookeeper=own.zookeeper, subscribe="from", startingOffsets="earliest", minOffsetsPerTrigger=A_FAULT
        )
        frame = source.load().select("value").mapInArrow(halting(str(place)), "value binary")
        writer = frame.writeStream.format("metamq").options(
            zookeeper=own.zookeeper, topic="to", checkpointLocation=str(place / "checkpoint"), **EXACTLY
        )
        self.query = writer.trigger(processingTime="0 seconds").start()

    def goes_on(self, what: str) -> None:
        """Messages come, and all there ever were are there once."""
        first, self._sent = self._sent, self._sent + A_FAULT
        send(self._own, "from", numbers(first, self._sent), keys=numbers(first, self._sent))
        self.has_all(what)

    def has_all(self, what: str) -> None:
        def has_come() -> bool:
            self.is_well()
            return self._stored().total() >= self._sent

        wait_until(has_come, 150, what)
        assert self._stored() == Counter(numbers(0, self._sent)), what

    def _stored(self) -> Counter[bytes]:
        return Counter(message.value.rstrip() for message in stored(self._own, "to"))

    def is_well(self) -> None:
        assert self.query.exception() is None, str(self.query.exception())

    def suffers(self, what: str, fault: Callable[[], object]) -> None:
        """The fault comes while tasks are in the middle of a batch."""
        with self._halting(what) as goes_on:
            wait_until(lambda: open_branches(self._own), 30, "some rows at a broker")
            fault()
            goes_on.touch()
            self.has_all(what)

    def runs_twice(self, what: str, task: int) -> None:
        """One attempt at the task is never let go on: another has to end it."""
        with self._halting(what, str(task)):
            self.has_all(what)

    @contextlib.contextmanager
    def _halting(self, what: str, only: str = "") -> Iterator[Path]:
        """Messages come, and tasks halt in the middle of them (or `only` this one) until there is this file."""
        name = what.replace(" ", "-")
        goes_on = self._place / name
        (self._place / "fault").write_text(f"{name} {only}".strip())
        first, self._sent = self._sent, self._sent + A_FAULT
        try:
            send(self._own, "from", numbers(first, self._sent), keys=numbers(first, self._sent))
            wait_until(lambda: self.is_well() or list(self._place.glob(f"{name}.*.halts")), 90, what)
            yield goes_on
        finally:
            goes_on.touch()
            (self._place / "fault").unlink()


def test_a_stream_that_is_exactly_once_outlives_each_fault(spark: Any, executors: Standalone, tmp_path: Path) -> None:
    with cluster(brokers=2, folder=tmp_path / "cluster") as own:
        own.add_slave()
        for topic in ("from", "to"):
            own.create_topic(topic, partitions=4, replication="sync")
        wait_until(lambda: in_sync(own), what="a slave in sync")
        place = tmp_path / "life"
        place.mkdir()
        life = Life(spark, own, place)
        try:
            life.goes_on("no fault")
            wait_until(lambda: len(executors.executors()) == 2, 60, "two executors")
            life.runs_twice("a task is run twice at once", task=0)
            life.suffers("python workers are killed", lambda: kill_workers(executors))
            life.suffers("an executor is killed", lambda: executors.executors()[0].kill())
            life.suffers("a broker is killed", lambda: (own.brokers[1].kill(), own.brokers[1].start()))
            life.suffers("a slave is promoted", lambda: (own.broker.kill(), promote(own)))
            life.suffers("zookeeper is away", lambda: zookeeper_is_away(own, life))
            life.goes_on("no fault any more")
            assert open_branches(own) == []
        finally:
            own.zookeeper_server.thaw()
            life.query.stop()


def kill_workers(executors: Standalone) -> None:
    """kill -9 of every Python worker of one executor: those that read, map and write."""
    killed = 0
    for process in executors.executors()[0].children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            parent = process.parent()
            if parent is not None and process.cmdline()[-2:] == parent.cmdline()[-2:] == DAEMON:
                process.kill()
                killed += 1
    assert killed


def promote(own: Cluster) -> None:
    with own.admin() as admin:
        admin.promote(0, 1)


def zookeeper_is_away(own: Cluster, life: Life) -> None:
    """Three times its session's time-out, and the batch is to be decided meanwhile."""
    own.zookeeper_server.freeze()
    (life._place / "zookeeper-is-away").touch()
    until_s = time.monotonic() + AWAY_S
    while time.monotonic() < until_s:  # the length of the fault itself
        life.is_well()
        time.sleep(0.5)
    own.zookeeper_server.thaw()
