"""The demo's part with Spark to its end, on few flights; and that one wrong figure does not go unseen."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from metamq.cli.demo import spark as demo_spark
from metamq.cli.demo.flights import Tally, tally
from tests.one_zookeeper import cluster

DAYS = 60


def rows() -> list[dict[str, Any]]:
    """Flights of two months; some were cancelled."""
    made: list[dict[str, Any]] = []
    for day in range(DAYS):
        for number in range(50):
            delay = None if number % 11 == 0 else (number * 7 + day) % 90 - 10
            when = {"year": 2013, "month": 1 + day // 30, "day": 1 + day % 30 % 28, "hour": 5 + number % 18}
            made.append({"id": len(made) + 1, "carrier": f"C{number % 7}", "dep_delay": delay, **when})
    return made


@pytest.mark.long
@pytest.mark.timeout(900)
def test_batch_and_stream_give_what_the_rows_do_though_the_query_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_spark, "BATCHES", 5)
    said: list[str] = []
    picture = tmp_path / "picture.svg"
    with cluster() as running:
        demo = demo_spark.SparkDemo(running, tmp_path, said.append, lambda: None)
        assert demo.run(rows(), picture), said
        found, times = demo._result()
        story = "\n".join(said)
        assert "kill -9 the query" in story
        assert "equal[/bold green]: Spark's batch query has the flights and delays of 7 carriers" in story
        assert f"equal[/bold green]: {len(found):,} hours, each there once, " in story
        expected = tally(rows(), demo_spark.by_hour)
        wrong = {**found, next(iter(found)): Tally(1, 1, 1)}
        assert not demo._compare_hours(expected, wrong, times)
        times = Counter(dict.fromkeys(found, 1))
        assert demo._compare_hours(expected, found, times)
        times[next(iter(found))] += 1
        assert not demo._compare_hours(expected, found, times)
        assert said[-1].endswith("0 hours of " + f"{len(expected):,}" + "; 1 message too many")
    assert picture.read_text().count('fill="#36c"') == 24
