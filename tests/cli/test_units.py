"""Values with units, there and back."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metamq.cli.show.units import (
    parse_bytes,
    parse_flush,
    parse_ms,
    parse_place,
    parse_time,
    show_age,
    show_bytes,
    show_flush,
    show_ids,
    show_ms,
    show_retention,
)
from metamq.zk.cluster.topics import FlushEvery


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("500ms", 500),
        ("90s", 90_000),
        ("10m", 600_000),
        ("1.5h", 5_400_000),
        ("7d", 604_800_000),
        ("2 w", 1_209_600_000),
    ],
)
def test_times(text: str, ms: int) -> None:
    assert parse_ms(text) == ms


@pytest.mark.parametrize(
    ("text", "size"),
    [("1000", 1000), ("64KiB", 65_536), ("10MB", 10_000_000), ("1GiB", 1 << 30), ("1.5 k", 1500), ("2TiB", 2 << 40)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "d", "7", "7 days", "-1s", "1e3s"])
def test_no_times(text: str) -> None:
    with pytest.raises(ValueError, match="is not a time"):
        parse_ms(text)


@pytest.mark.parametrize("text", ["", "GiB", "1 giga", "-1"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


@given(st.integers(0, 10**15))
def test_what_is_shown_can_be_read(ms: int) -> None:
    assert parse_ms(show_ms(ms)) == ms


flushes = st.just("ack") | st.builds(FlushEvery, st.none() | st.integers(1, 10**6), st.none() | st.integers(1, 10**9))


@given(flushes)
def test_a_flush_policy_can_be_read(flush: FlushEvery) -> None:
    assert parse_flush(show_flush(flush)) == flush


def test_flush_policies() -> None:
    assert parse_flush("ACK") == "ack"
    assert parse_flush("1000/500ms") == FlushEvery(1000, 500)
    assert parse_flush("1s") == FlushEvery(None, 1000)
    assert parse_flush("never") == FlushEvery(None, None)


def test_an_error_lists_the_forms_of_a_place() -> None:
    with pytest.raises(ValueError, match="an offset, -10 for the last ten, or @2026"):
        parse_place("yesterday")


def test_places() -> None:
    assert [parse_place(text) for text in ("earliest", "end", "12", "-3")] == ["earliest", "latest", 12, -3]
    assert parse_place("@2026-11-01T00:00Z") == datetime(2026, 11, 1, tzinfo=UTC)
    with pytest.raises(ValueError, match="is not a place in a log"):
        parse_place("noon")


def test_points_in_time() -> None:
    assert parse_time("2026-11-01").tzinfo is not None
    assert parse_time("2026-11-01T13:30+02:00") == datetime(2026, 11, 1, 11, 30, tzinfo=UTC)
    assert 3590 < (datetime.now(UTC) - parse_time("-1h")).total_seconds() < 3610
    with pytest.raises(ValueError, match="is not a time"):
        parse_time("2026-13-01")


def test_for_people() -> None:
    assert [show_bytes(size) for size in (None, 0, 1000, 1 << 30, 1536)] == [
        "unlimited",
        "0B",
        "1000B",
        "1GiB",
        "1.5KiB",
    ]
    assert [show_age(ms) for ms in (12, 3_900, 125_000, 10**9)] == ["12ms", "3s", "2m", "11d"]
    assert show_ms(None) == "unlimited"
    assert [show_ids(ids) for ids in ([], [3], [0, 1], [7, 0, 2, 1])] == ["", "3", "0-1", "0-2,7"]
    kept = [show_retention(ms, size) for ms in (None, 86_400_000) for size in (None, 1 << 30)]
    assert kept == ["unlimited", "1GiB", "1d", "1d/1GiB"]
