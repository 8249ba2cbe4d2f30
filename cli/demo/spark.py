"""`metamq demo --spark`: the flights in Spark, as a batch and as a stream, with the query killed on the way.

A batch query counts flights and delays per carrier. A streaming query counts them per hour of departure, into another
topic. On the way its driver dies by kill -9, with its JVM and its workers; another one continues from the checkpoint.
Both results must equal the CSV's, with each hour once. The second result becomes a picture.
"""

from __future__ import annotations

import importlib.util
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from metamq.cli.demo import spark_application as application
from metamq.cli.demo.flights import Tally, by_carrier, encode, flights, tally
from metamq.cli.demo.helpers import Application, Say, timed_lines
from metamq.cli.processes import StopSignals, find_java_and_jars
from metamq.errors import ConfigError, MetamqError
from metamq.testing import Cluster, cluster
from metamq.words import count

PARTITIONS = 4
BATCHES = 16
CHUNK = 2_000
DIES_AT = 0.4
"""The share of the hours that are in the result a moment before the query is killed."""
MOMENT_S = 0.5
LIMIT_S = 300.0
POLL_S = 0.05
IDLE_S = 20.0
PICTURE = "flights-delay-by-hour.svg"

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 760, 380, 60, 50, 50
"""The picture's measures."""

Hour = tuple[int, int, int, int]
"""Year, month, day and hour of departure."""


class SparkDemo:
    """One run. `check` is called during waits; an exception that it raises ends the wait."""

    def __init__(self, running: Cluster, folder: Path, say: Say, check: Callable[[], None]) -> None:
        self._running = running
        self._folder = folder
        self._say = say
        self._check = check
        self._application = Application("Spark", "metamq.cli.demo.spark_application", check, folder / "spark.log")

    def run(self, rows: list[dict[str, Any]], picture: Path) -> bool:
        """Returns True if both results equal the counts of the rows. Raises MetamqError."""
        rows = sorted(rows, key=by_hour)
        for topic in (application.FLIGHTS, application.DELAYS):
            self._running.create_topic(topic, partitions=PARTITIONS)
        self._send(rows)
        expected = tally(rows, by_hour)
        try:
            self._start(len(rows), ends=False)
            self._until(lambda: (self._folder / application.BY_CARRIER).exists(), "the batch query")
            batch_is_equal = self._compare_carriers(tally(rows, by_carrier))
            self._until(lambda: self._stored() >= len(expected) * DIES_AT, "the hours of the streaming query")
            self._kill(len(expected))
            self._start(len(rows), ends=True)
            self._until(self._application.has_ended, "the streaming query")
        finally:
            self._application.kill()
        found, total = self._result()
        picture.write_text(_bars("Delay of departures from New York City in 2013", _by_hour_of_day(found)))
        self._say(f"the mean delay by hour of the day, from topic {application.DELAYS!r}: [bold]{picture}[/bold]")
        return self._compare_hours(expected, found, total) and batch_is_equal

    def _send(self, rows: list[dict[str, Any]]) -> None:
        with self._running.producer() as producer:
            for start in range(0, len(rows), CHUNK):
                self._check()
                chunk = rows[start : start + CHUNK]
                # Keyed by line: each partition has about as many flights of every day.
                keys = [str(row["id"]) for row in chunk]
                sent = producer.send_many(application.FLIGHTS, [encode(row) for row in chunk], keys=keys)
            sent.result()
            end = {"year": rows[-1]["year"] + 1, "month": 12, "day": 31, "hour": 0}
            # The last message moves the stream's clock: an hour's count is final after a much later flight.
            producer.send(application.FLIGHTS, json.dumps(end).encode()).result()
        self._say(f"{len(rows):,} flights, by hour of departure, are in topic {application.FLIGHTS!r}")

    def _start(self, total: int, *, ends: bool) -> None:
        each = max(total // BATCHES, 1)
        self._application.start(self._running.zookeeper, str(self._folder), str(each), str(int(ends)))

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        self._application.until(condition, what, limit_s=LIMIT_S, poll_s=POLL_S)

    def _kill(self, total: int) -> None:
        time.sleep(random.random() * MOMENT_S)
        self._application.kill()
        self._say(
            f"[bold red]kill -9 the query[/bold red], driver, JVM and workers, when {self._stored():,} of {total:,} "
            "hours are stored; another one continues from its checkpoint"
        )

    def _stored(self) -> int:
        with self._running.admin() as admin:
            return admin.describe_topic(application.DELAYS).messages or 0

    def _compare_carriers(self, expected: dict[str, Tally]) -> bool:
        rows = json.loads((self._folder / application.BY_CARRIER).read_text())
        found = {row["carrier"]: Tally(row["flights"], row["delayed"], row["delay_minutes"]) for row in rows}
        if found == expected:
            self._say(
                f"[bold green]equal[/bold green]: Spark's batch query has the flights and delays of {len(found)} "
                "carriers that the CSV has"
            )
            return True
        wrong = sorted(name for name in found | expected if found.get(name) != expected.get(name))
        self._say(f"[bold red]DIFFERENT[/bold red] from the CSV: {', '.join(wrong)}")
        return False

    def _result(self) -> tuple[dict[Hour, Tally], Counter[Hour]]:
        """Returns the tally of each hour in the topic, and the number of its messages."""
        found: dict[Hour, Tally] = {}
        times: Counter[Hour] = Counter()
        number = self._stored()
        with self._running.consumer(topics=[application.DELAYS], idle_timeout_s=IDLE_S) as consumer:
            for batch in consumer.batches():
                for value in batch.values:
                    row = json.loads(value)
                    day, _, hour = row["hour"].partition(" ")
                    year, month, day_number = map(int, day.split("-"))
                    key = (year, month, day_number, int(hour))
                    one = Tally(row["flights"], row["delayed"], row["delay_minutes"])
                    if found.setdefault(key, one) != one:
                        raise MetamqError(f"the topic has the hour {row['hour']} with {one}, and with {found[key]}")
                    times[key] += 1
                if times.total() >= number:
                    break
        return found, times

    def _compare_hours(self, expected: dict[Hour, Tally], found: dict[Hour, Tally], times: Counter[Hour]) -> bool:
        again = times.total() - len(times)
        if found == expected and not again:
            self._say(
                f"[bold green]equal[/bold green]: {len(found):,} hours, each there once, with the flights and delays "
                "that the CSV has"
            )
            return True
        wrong = sum(found.get(hour) != expected.get(hour) for hour in found | expected)
        self._say(
            f"[bold red]DIFFERENT[/bold red] from the CSV: {count(wrong, 'hour')} of {len(expected):,}; "
            f"{count(again, 'message')} too many"
        )
        return False


def by_hour(row: dict[str, Any]) -> Hour:
    """Returns the key of a tally per hour of departure."""
    return row["year"], row["month"], row["day"], row["hour"]


def _by_hour_of_day(found: dict[Hour, Tally]) -> dict[int, float]:
    tallies: dict[int, Tally] = {}
    for (_year, _month, _day, hour), one in found.items():
        entry = tallies.setdefault(hour, Tally())
        entry.delayed += one.delayed
        entry.delay_minutes += one.delay_minutes
    return {hour: entry.mean_delay for hour, entry in tallies.items()}


def _bars(title: str, means: Mapping[int, float]) -> str:
    """Returns an SVG with a bar for each hour of the day; an hour without flights has none."""
    highest = max([10.0, *means.values()])
    step = (WIDTH - LEFT - 20) / 24
    scale = (HEIGHT - TOP - BOTTOM) / highest
    base = HEIGHT - BOTTOM
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{WIDTH / 2}" y="26" text-anchor="middle" font-size="16">{title}</text>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">hour of scheduled departure</text>',
        f'<text transform="translate(16,{HEIGHT / 2}) rotate(-90)" text-anchor="middle">mean delay, minutes</text>',
    ]
    for value in range(0, int(highest) + 1, 5):
        y = base - value * scale
        lines.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - 20}" stroke="#ddd"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value}</text>')
    for hour in range(24):
        x = LEFT + hour * step
        lines.append(f'<text x="{x + step / 2:.1f}" y="{base + 16}" text-anchor="middle">{hour}</text>')
        height = max(means.get(hour, 0.0), 0.0) * scale
        lines.append(
            f'<rect x="{x + 2:.1f}" y="{base - height:.1f}" width="{step - 4:.1f}" height="{height:.1f}" fill="#36c"/>'
        )
    return "\n".join([*lines, "</svg>", ""])


def run_spark_demo(console: Console) -> int:
    """Runs this part; returns 0 if every figure is equal, else 1. Raises ConfigError without pyspark."""
    if importlib.util.find_spec("pyspark") is None:
        raise ConfigError("Spark is not installed", hint="Run `./dev demo`, or: pip install 'metamq[spark]'")
    say = timed_lines(console)
    with StopSignals() as signals:
        with signals.at_once():
            rows = list(flights())
        find_java_and_jars(signals)
        say("now Spark, in processes of its own")
        with tempfile.TemporaryDirectory(prefix="metamq-demo-") as folder, cluster() as running:
            demo = SparkDemo(running, Path(folder), say, signals.check)
            return 0 if demo.run(rows, Path(PICTURE).resolve()) else 1
