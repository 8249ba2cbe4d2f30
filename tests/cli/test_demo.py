"""The demo to its end, on a stand-in of few flights: what it tells, and that one wrong figure does not go unseen."""

from __future__ import annotations

import re
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.cli.conftest import FLIGHTS

ANOTHER_FLIGHT = "UPDATE booked SET flight = x'00' WHERE id = (SELECT min(id) FROM booked)"
ONE_MINUTE_MORE = """
UPDATE flights SET dep_delay = dep_delay + 1 WHERE id = (SELECT min(id) FROM flights WHERE carrier = 'C3')
"""

LIMIT_S = 560
pytestmark = pytest.mark.timeout(600)

Start = Callable[..., "subprocess.Popen[bytes]"]
Until = Callable[..., None]


@pytest.fixture
def demo(process: Start, flights: Path, temporary: Path) -> subprocess.Popen[bytes]:
    environment = {"TMPDIR": str(temporary), "PYTHONPATH": str(flights), "COLUMNS": "120"}
    return process("demo", env=environment, stderr=subprocess.STDOUT)


def talk_of(demo: subprocess.Popen[bytes]) -> str:
    talk, _ = demo.communicate(timeout=LIMIT_S)
    return talk.decode()


def doctored(temporary: Path, name: str, change: str) -> bool:
    """Whether there was a row in the demo's database to be changed, and it was."""
    path = next(temporary.glob(f"metamq-demo-*/{name}.sqlite3"), None)
    if path is None:
        return False
    with closing(sqlite3.connect(path, timeout=30)) as connection, connection:
        try:
            changed = connection.execute(change)
        except sqlite3.OperationalError:  # there is no table yet
            return False
        return changed.rowcount == 1


@pytest.mark.slow
def test_the_story_in_its_order_and_every_flight_counted_once(demo: subprocess.Popen[bytes], temporary: Path) -> None:
    talk = talk_of(demo)
    assert demo.returncode == 0, talk
    said = [line[10:] for line in talk.splitlines() if re.match(r" *\d+\.\d s  ", line)]
    story = (
        rf"read {FLIGHTS:,} flights of 2013 from 16 carriers",
        r"3 consumers in group 'delays'",
        r"kill -9 the master after ([\d,]+) flights",
        r"replica 1 has taken over by itself: \d\.\d\d s without an acknowledgement",
        r"kill -9 consumer-[123] when ([\d,]+) flights are counted: 0-.* move to the others",
        rf"all {FLIGHTS:,} flights are counted",
        r"the former master was started again, and is in sync: a slave",
        rf"equal: each of the {FLIGHTS:,} flights was counted once",
        rf"now transactions: {FLIGHTS:,} of the flights, 8 in each",
        *(rf"kill -9 the application, {number} of 20: [1-9]" for number in range(1, 21)),
        rf"all {FLIGHTS:,} are booked in .* s, including the kills",
        r"recovery has finished [1-9]\d* transactions? that a kill had cut off",
        rf"equal: {FLIGHTS:,} rows and {FLIGHTS:,} messages, each flight once",
    )
    lines = iter(said)
    for chapter in story:
        found = next((match for line in lines if (match := re.match(chapter, line))), None)
        assert found is not None, f"{chapter} is not there, or not in its turn:\n{talk}"
        for number in found.groups():
            assert int(number.replace(",", "")) >= FLIGHTS / 2, "half way"
    assert [line.count("│") for line in talk.splitlines() if " C3 " in line] == [7]
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_a_single_wrong_figure_ends_it_with_status_1_and_names_the_carrier(
    demo: subprocess.Popen[bytes], temporary: Path, until: Until
) -> None:
    until(lambda: doctored(temporary, "results", ONE_MINUTE_MORE), "a counted flight of C3", LIMIT_S)
    talk = talk_of(demo)
    assert demo.returncode == 1, talk
    wrong = [line for line in talk.splitlines() if "DIFFERENT" in line]
    assert len(wrong) == 1
    assert "DIFFERENT from the CSV: C3 has 313 flights, 313 of which left, " in wrong[0]
    late = [int(minutes.replace(",", "")) for minutes in re.findall(r"([\d,]+) minutes late", wrong[0])]
    assert late[0] == late[1] + 1
    assert "equal: " not in talk


@pytest.mark.long
def test_a_row_that_is_not_its_message_ends_it_with_status_1(
    demo: subprocess.Popen[bytes], temporary: Path, until: Until
) -> None:
    until(lambda: doctored(temporary, "bookings", ANOTHER_FLIGHT), "a booked flight", LIMIT_S)
    talk = talk_of(demo)
    assert demo.returncode == 1, talk
    wrong = [line[10:] for line in talk.splitlines() if "DIFFERENT" in line]
    assert wrong == [
        f"DIFFERENT: {FLIGHTS:,} flights, {FLIGHTS:,} rows, {FLIGHTS:,} messages; 1 row without its message, "
        "1 message without its row"
    ]
