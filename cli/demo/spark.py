"""`metamq demo --spark`: the flights in Spark, as a batch and as a stream, with the query killed on the way.

A batch query counts flights and delays per carrier; a streaming query counts them per hour of departure, into another
topic. Half way its driver dies with its JVM and its workers, by kill -9; another one goes on from the checkpoint. Both
results must be what the CSV itself gives, each hour there once. A picture is made of the second.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from metamq.cli.demo import spark_application as application
from metamq.cli.demo.flights import Tally, encode, flights, tally
from metamq.cli.demo.picture import bars
from metamq.cli.demo.waiting import wait_for
from metamq.cli.processes import StopSignals, find_java_and_jars
from metamq.errors import ConfigError, MetamqError
from metamq.testing import Cluster, cluster
from metamq.words import count

PARTITIONS = 4
BATCHES = 16
CHUNK = 2_000
DIES_AT = 0.4
"""Of the hours: so many are in the result when the query is killed, or a moment later."""
MOMENT_S = 0.5
LIMIT_S = 300.0
POLL_S = 0.05
IDLE_S = 20.0
PICTURE = "flights-delay-by-hour.svg"

Say = Callable[[str], None]
Key = tuple[int, int, int, int]


class SparkDemo:
    """One run of it. `check` is called while it waits; what it raises ends that."""

    def __init__(self, running: Cluster, folder: Path, say: Say, check: Callable[[], None]) -> None:
        self._running = running
        self._folder = folder
        self._say = say
        self._check = check
        self._application: subprocess.Popen[bytes] | None = None

    def run(self, rows: list[dict[str, Any]], picture: Path) -> bool:
        """Whether both results are equal to what the rows give. Raises MetamqError."""
        rows = sorted(rows, key=_hour)
        for topic in (application.FLIGHTS, application.DELAYS):
            self._running.create_topic(topic, partitions=PARTITIONS)
        self._send(rows)
        expected = by_hour(rows)
        try:
            self._start(len(rows), ends=False)
            self._until(lambda: (self._folder / application.BY_CARRIER).exists(), "the batch query")
            batch_is_equal = self._compare_carriers(tally(rows))
            self._until(lambda: self._stored() >= len(expected) * DIES_AT, "the hours of the streaming query")
            self._kill(len(expected))
            self._start(len(rows), ends=True)
            self._until(self._has_ended, "the streaming query")
        finally:
            self._end()
        found, total = self._result()
        picture.write_text(bars("Delay of departures from New York City in 2013", _by_hour_of_day(found)))
        self._say(f"the mean delay by hour of the day, from topic {application.DELAYS!r}: [bold]{picture}[/bold]")
        return self._compare_hours(expected, found, total) and batch_is_equal

    def _send(self, rows: list[dict[str, Any]]) -> None:
        with self._running.producer() as producer:
            for start in range(0, len(rows), CHUNK):
                self._check()
                chunk = rows[start : start + CHUNK]
                # By line: so each partition has of every day about as much.
                keys = [str(row["id"]) for row in chunk]
                sent = producer.send_many(application.FLIGHTS, [encode(row) for row in chunk], keys=keys)
            sent.result()
            end = {"year": rows[-1]["year"] + 1, "month": 12, "day": 31, "hour": 0}
            # The stream's clock: an hour's count is final when something much later has come.
            producer.send(application.FLIGHTS, json.dumps(end).encode()).result()
        self._say(f"{len(rows):,} flights, by hour of departure, are in topic {application.FLIGHTS!r}")

    def _start(self, total: int, *, ends: bool) -> None:
        command = [sys.executable, "-m", "metamq.cli.demo.spark_application", self._running.zookeeper]
        command += [str(self._folder), str(max(total // BATCHES, 1)), str(int(ends))]
        with (self._folder / "spark.log").open("ab") as log:
            # A session of its own: the JVM and the workers are killed with it.
            self._application = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )

    def _kill(self, total: int) -> None:
        time.sleep(random.random() * MOMENT_S)
        self._end()
        self._say(
            f"[bold red]kill -9 the query[/bold red], driver, JVM and workers, when {self._stored():,} of {total:,} "
            "hours are stored; another one goes on from its checkpoint"
        )

    def _end(self) -> None:
        if self._application is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._application.pid, signal.SIGKILL)
            self._application.wait()
            assert self._application.stdin is not None
            self._application.stdin.close()
            self._application = None

    def _has_ended(self) -> bool:
        return self._application is not None and self._application.poll() == 0

    def _stored(self) -> int:
        with self._running.admin() as admin:
            return admin.describe_topic(application.DELAYS).messages

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        wait_for(condition, what, self._check_application, limit_s=LIMIT_S, poll_s=POLL_S)

    def _check_application(self) -> None:
        self._check()
        status = self._application.poll() if self._application is not None else 0
        if status:
            tail = (self._folder / "spark.log").read_text(errors="replace")[-2000:]
            raise MetamqError(f"Spark ended with status {status}; the end of what it said: {tail}")

    def _compare_carriers(self, expected: dict[str, Tally]) -> bool:
        rows = json.loads((self._folder / application.BY_CARRIER).read_text())
        found = {row["carrier"]: Tally(row["flights"], row["delayed"], row["delay_minutes"]) for row in rows}
        if found == expected:
            self._say(
                f"[bold green]equal[/bold green]: Spark's batch query has the flights and delays of {len(found)} "
                "carriers as the CSV gives them"
            )
            return True
        wrong = sorted(name for name in found | expected if found.get(name) != expected.get(name))
        self._say(f"[bold red]DIFFERENT[/bold red] from what the CSV gives: {', '.join(wrong)}")
        return False

    def _result(self) -> tuple[dict[Key, Tally], Counter[Key]]:
        """What the topic has: the tally of each hour, and how often the hour is there."""
        found: dict[Key, Tally] = {}
        times: Counter[Key] = Counter()
        number = self._stored()
        with self._running.consumer(topics=[application.DELAYS], idle_timeout_s=IDLE_S) as consumer:
            for batch in consumer.batches():
                for value in batch.values:
                    row = json.loads(value)
                    day, _, hour = row["hour"].partition(" ")
                    year, month, day_number = map(int, day.split("-"))
                    key = (year, month, day_number, int(hour))
                    one = Tally(row["flights"], row["delayed"], row["delay_minutes"])
                    if found.setdefault(key, one) != one:  # whichever is right
                        raise MetamqError(f"the hour {row['hour']} is there with {one}, and with {found[key]}")
                    times[key] += 1
                if times.total() >= number:
                    break
        return found, times

    def _compare_hours(self, expected: dict[Key, Tally], found: dict[Key, Tally], times: Counter[Key]) -> bool:
        again = times.total() - len(times)
        if found == expected and not again:
            self._say(
                f"[bold green]equal[/bold green]: {len(found):,} hours, each there once, with the flights and delays "
                "that the CSV gives"
            )
            return True
        wrong = sum(found.get(hour) != expected.get(hour) for hour in found | expected)
        self._say(
            f"[bold red]DIFFERENT[/bold red] from what the CSV gives: {count(wrong, 'hour')} of {len(expected):,}; "
            f"{count(again, 'message')} too many"
        )
        return False


def _hour(row: dict[str, Any]) -> Key:
    return row["year"], row["month"], row["day"], row["hour"]


def by_hour(rows: list[dict[str, Any]]) -> dict[Key, Tally]:
    """Per hour of departure, counted from the rows themselves."""
    tallies: dict[Key, Tally] = {}
    for row in rows:
        entry = tallies.setdefault(_hour(row), Tally())
        entry.flights += 1
        if row["dep_delay"] is not None:
            entry.delayed += 1
            entry.delay_minutes += row["dep_delay"]
    return tallies


def _by_hour_of_day(found: dict[Key, Tally]) -> dict[int, float]:
    tallies: dict[int, Tally] = {}
    for (_year, _month, _day, hour), one in found.items():
        entry = tallies.setdefault(hour, Tally())
        entry.delayed += one.delayed
        entry.delay_minutes += one.delay_minutes
    return {hour: entry.mean_delay for hour, entry in tallies.items()}


def run_spark_demo(console: Console) -> int:
    """Runs this part; the exit status is 0 when every figure is equal. Raises ConfigError without pyspark."""
    if importlib.util.find_spec("pyspark") is None:
        raise ConfigError("Spark is not installed", hint="Run `./dev demo`, or: pip install 'metamq[spark]'")
    began = time.monotonic()

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:6.1f} s[/dim]  {text}", highlight=False, soft_wrap=True)

    with StopSignals() as signals:
        with signals.at_once():
            rows = list(flights())
        find_java_and_jars(signals)
        say("now Spark, in processes of its own")
        with tempfile.TemporaryDirectory(prefix="metamq-demo-") as folder, cluster() as running:
            demo = SparkDemo(running, Path(folder), say, signals.check)
            return 0 if demo.run(rows, Path(PICTURE).resolve()) else 1
