"""Requests to a broker about any number of partitions, sent in pages that are within the limits of the protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from metamq.errors import MetamqError
from metamq.wire.commands import EARLIEST, LATEST, Command, OffsetsEntry, OffsetsResult, Stats
from metamq.wire.headers import unpack, unpack_list
from metamq.wire.limits import ENTRIES_TARGET

if TYPE_CHECKING:
    from metamq.client.net.transport import BrokerConnection

REQUEST_TIMEOUT_S = 10.0
TIMES_TARGET = 32
"""Entries per request that asks for times. A broker looks up each in its files, and limits the time of a request."""


async def ask_offsets(connection: BrokerConnection, entries: Sequence[OffsetsEntry]) -> list[OffsetsResult]:
    """Sends OFFSETS requests. Returns a result per entry, in order. Raises the broker's error, ConnectError,
    Timeout."""
    results: list[OffsetsResult] = []
    asks_for_times = any(entry.timestamp_us not in (EARLIEST, LATEST) for entry in entries)
    step = TIMES_TARGET if asks_for_times else ENTRIES_TARGET
    for first in range(0, len(entries), step):
        page = entries[first : first + step]
        header = await connection.request(Command.OFFSETS, page, timeout_s=REQUEST_TIMEOUT_S)
        results += unpack_list(OffsetsResult, header)
    return results


async def ask_statistics(connection: BrokerConnection) -> dict[str, Any]:
    """Sends STATS requests. Returns all pages in one map; each page has the values of its own moment.

    Raises the broker's error, ConnectError or Timeout, and MetamqError if the answer has the wrong structure.
    """
    found: dict[str, Any] = {}
    start: Stats | None = Stats("", 0)
    while start is not None:
        page = await connection.request(Command.STATS, start, timeout_s=REQUEST_TIMEOUT_S)
        try:
            if not found:
                found = page
            else:
                found["partitions"] += page["partitions"]
                for name, counts in page["counters"].items():
                    if isinstance(counts, dict):
                        found["counters"][name].update(counts)
            following = page["next"]
            start = unpack(Stats, following) if following is not None else None
        except (KeyError, TypeError, AttributeError) as error:
            problem = f"the statistics of the broker at {connection.address} have the wrong structure: {error!r}"
            raise MetamqError(problem, hint="It may run another metamq release: see `metamq doctor`.") from error
    return found
