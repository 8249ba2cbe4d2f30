"""Reads a streaming query's checkpoint in the driver: the query's id, and the content of a batch.

Spark writes `metadata` with the id when the query is new. Before it runs a batch it writes `offsets/<batch>`: a
version, a line about the run, and a line for each source. If the batch runs again, the file is the same. The line of a
file source is only `{"logOffset":N}`. The names of its files are in `sources/<source>/N`, or in `N.compact` with those
before. Spark writes that file before the batch's own one, and keeps it until the batch is done.

For each batch, only a folder of this machine is read, mounted ones included: an object store or HDFS may be slow.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from metamq.errors import ConfigError

JUST_S = 5.0
"""The most seconds from the file of a batch's offsets to the batch's first check of the sink."""
RUNNER = ".python_streaming_sink_runner"
"""Spark's module that commits a stream's batches, in processes of its own."""


def named(sink_id: str | None, query: str | None, batch: str | None) -> tuple[str, int]:
    """Returns the sink's name and the batch id, from the properties of a task. Raises ConfigError."""
    sink = query or sink_id
    if sink is None:
        raise ConfigError("this Spark does not give a task its query's id", hint="Name the sink: option 'sinkId'.")
    if batch is None:
        hint = "Use delivery=at_least_once."
        raise ConfigError("this Spark does not give a task the id of its batch", hint=hint)
    return sink, int(batch)


def checkpoint_id(location: str | None) -> str:
    """Returns the id in a query's checkpoint, at any place that pyarrow can read. Raises ConfigError."""
    try:
        return str(json.loads(_read(location, "metadata"))["id"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = "Use delivery=at_least_once, or a checkpoint that the driver can read."
        raise ConfigError(f"the query's id is not in its checkpoint: {error}", hint=hint) from None


def known_id(folder: Path | None) -> str | None:
    """Returns the same id; None if the checkpoint is not a folder of this machine, or not there yet."""
    try:
        return None if folder is None else checkpoint_id(str(folder))
    except ConfigError:
        return None


def content(location: str | None, query: str, batch_id: int) -> str:
    """Returns a digest of what a batch reads; empty if the checkpoint is not a folder of this machine."""
    folder = local_folder(location)
    if folder is None or known_id(folder) != query:  # the folder at that place is another query's
        return ""
    try:
        lines = _source_lines(folder, batch_id)
        entries = _entries(folder, batch_id, lines)
    except OSError:
        return ""
    return hashlib.sha256(b"\n".join([*lines, *entries])).hexdigest()[:32] if lines else ""


def _source_lines(folder: Path, batch_id: int) -> list[bytes]:
    return (folder / "offsets" / str(batch_id)).read_bytes().splitlines()[2:]


def _entries(folder: Path, batch_id: int, lines: list[bytes]) -> list[bytes]:
    """Returns the files that the batch's file sources read, from their logs; none if it has no such source."""
    numbers = {index: number for index, line in enumerate(lines) if (number := _log_offset(line)) is not None}
    if not numbers:
        return []
    earlier: list[int | None] | None = None if batch_id else []
    with contextlib.suppress(FileNotFoundError):
        earlier = [_log_offset(line) for line in _source_lines(folder, batch_id - 1)]
    found: set[bytes] = set()
    for index, number in numbers.items():
        done = number - 1 if earlier is None else -1
        if earlier is not None and index < len(earlier):
            done = -1 if (last := earlier[index]) is None else last
        for source in sorted((folder / "sources").glob("*")):  # a source that is read twice has two lines, and one log
            for one in range(done + 1, number + 1):  # several if a driver died between the two files
                found |= {b"%s %s" % (source.name.encode(), entry) for entry in _logged(source, one, done + 1, number)}
    return sorted(found)


def _logged(source: Path, number: int, first: int, last: int) -> Iterator[bytes]:
    """Yields the entries from `first` to `last` in one file of a file source's log."""
    wanted = re.compile(rb'"batchId":\s*(\d+)')
    for name in (str(number), f"{number}.compact"):
        with contextlib.suppress(FileNotFoundError), (source / name).open("rb") as file:
            for line in file:
                at = wanted.search(line)
                if at is not None and first <= int(at[1]) <= last:
                    yield line.strip()


def _log_offset(line: bytes) -> int | None:
    """Returns the offset in a file source's line; None for another source's."""
    with contextlib.suppress(ValueError):
        fields = json.loads(line)
        if isinstance(fields, dict) and isinstance(number := fields.get("logOffset"), int):
            return number
    return None


def local_folder(location: str | None) -> Path | None:
    """Returns the folder of a checkpoint that is on this machine; None if it is not."""
    if location is None:
        return None
    if location.startswith("file:"):
        from urllib.parse import unquote, urlsplit

        return Path(unquote(urlsplit(location).path))
    return None if "://" in location else Path(location)


def newest_finished(folder: Path) -> int:
    """Returns the newest batch that Spark has recorded as done; -1 before the first."""
    return max((int(one.name) for one in (folder / "commits").glob("*") if one.name.isdecimal()), default=-1)


def is_ending_a_batch() -> bool:
    """True if this process of the driver commits and aborts batches: then their tasks have run."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return any(name.endswith(RUNNER) for name in (*sys.modules, "" if spec is None else spec.name))


def is_just_planned(folder: Path) -> bool:
    """True if Spark has just recorded the offsets of the next batch: then that batch does not run again."""
    try:
        age_s = time.time() - (folder / "offsets" / str(newest_finished(folder) + 1)).stat().st_mtime
    except OSError:
        return False
    return 0 <= age_s < JUST_S


def _read(location: str | None, name: str) -> bytes:
    if location is None:
        raise OSError("its place is not among the sink's options")
    folder = local_folder(location)
    if folder is not None:
        return (folder / name).read_bytes()
    from pyarrow import fs

    system, place = fs.FileSystem.from_uri(location)
    with system.open_input_stream(f"{place}/{name}") as file:
        return bytes(file.read())
