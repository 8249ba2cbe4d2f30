"""The Python snippets of docs/spark.md run as printed, one after the other, in one session."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from metamq.testing import Cluster
from tests.spark.conftest import send
from tests.spark.test_sink import values

DOCUMENT = Path(__file__).resolve().parent.parent.parent / "docs" / "spark.md"
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.timeout(240)
def test_the_snippets_of_spark_run_as_printed(
    spark: Any, running: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("METAMQ_ZOOKEEPER", running.zookeeper)
    for topic in ("flights", "loud", "copy"):
        running.create_topic(topic, partitions=2)
    send(running, "flights", [b"EWR to IAH"])
    found = SNIPPET.findall(DOCUMENT.read_text())
    assert len(found) >= 3
    names: dict[str, Any] = {}
    try:
        for snippet in found:
            # Relative paths would be below the JVM's working folder.
            here = re.sub(r'"(out|checkpoint[a-z-]*)"', lambda name: repr(str(tmp_path / name[1])), snippet)
            exec(compile(here, str(DOCUMENT), "exec"), names)
        streams = spark.streams.active
        assert len(streams) == 2
        for number in range(2):  # streams begin at the end: before the first message here they have found it
            for query in streams:
                query.processAllAvailable()
            send(running, "flights", [b"JFK to MIA %d" % number])
        for query in streams:
            query.processAllAvailable()
        parquet = spark.read.parquet(str(tmp_path / "out")).selectExpr("cast(value AS string) AS value").collect()
    finally:
        for query in spark.streams.active:
            query.stop()
        spark.sql("DROP TABLE IF EXISTS flights")
        if "lag" in names:
            spark.streams.removeListener(names["lag"])
    printed = capfd.readouterr().out
    assert "EWR to IAH" in printed
    assert "950.0" in printed, "the sum of a typed column"
    flown = {f"JFK to MIA {number}" for number in range(2)}
    assert sorted(row.value for row in parquet) == sorted(flown)
    assert values(running, "copy") == {value.encode(): 1 for value in flown}
    assert values(running, "loud") == {b"EWR TO IAH": 1}
