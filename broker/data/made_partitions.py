"""The record of all partitions that a data folder has had. Without it, a partition without files would look new, and an
older copy of its files would look like the original.

    partitions      a line for each change: "+ <topic>@<topic id>/<index> <mark>": made here; "- …": not expected.
                    The mark is that of the partition's file `flushed` (metamq.broker.data.folder_lock)

Theory of operation. ZooKeeper lists a topic's partitions. A partition that this folder never had is new, and its log
begins empty. A partition that it had, and whose files are missing, is damaged: its acknowledged messages are gone. This
record tells them apart. `flushed` is the same file as long as the log is here. Another file in its place comes from a
copy, which may lack messages that were acknowledged later: such a partition is damaged, too. In a data folder that is a
copy as a whole, all marks are new; metamq.broker.data.data_folder decides which data such a folder lacks. A line is
written after the partition's log is durable, and is durable before a client can store a message in the log. So a crash
in between leaves a log without a line, and the next open adds the line.

The record is a second witness, in addition to the folders. An older release may have made it, or an operator may have
removed it or restored an old one. So if lines are missing, the existing logs are added with their marks. A partial
line was never durable. After a failed write, "?" ends the partial line, which is then ignored. Giving a log up removes
its line by `forget()`: `metamq log forget` does this, and the removal of a topic.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

from metamq.private_files import opener

FILE_NAME = "partitions"
_LINE = re.compile(r"([+-]) ([^/@\n]+@[^/@\n]+/\d+)(?: ([\d.]+))?\n")


class MadePartitions:
    """The record of one data folder. A partition's name is "<topic>@<topic id>/<index>".

    All methods raise OSError. Any thread.
    """

    def __init__(self, folder: Path, found: Mapping[str, str], *, is_copy: bool) -> None:
        """Reads the record. Adds, durably, the partitions whose logs were `found` in the folder: name -> mark. If
        `is_copy`, the whole folder is a copy, and the found marks replace the recorded ones."""
        self._path = folder / FILE_NAME
        self._may_be_torn = False
        self._lock = threading.Lock()
        self.is_new = not self._path.exists()
        """True if there was no record."""
        text = "" if self.is_new else self._path.read_text(errors="replace")
        self._marks = _marks_in(text)
        self._marks |= {name: mark for name, mark in found.items() if is_copy or not self._marks.get(name)}
        whole = "".join(f"{_line(name, mark)}\n" for name, mark in self._marks.items())
        if self.is_new or text != whole:  # the rewrite also keeps the file short
            temporary = self._path.with_name(f"{FILE_NAME}.tmp")
            with open(temporary, "w", opener=opener) as file:
                file.write(whole)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(self._path)

    def mark(self, name: str) -> str | None:
        """The mark of a partition; None if it was never made."""
        return self._marks.get(name)

    def add(self, made: Mapping[str, str]) -> None:
        """Records new partitions: name -> mark. Durable, with at most one fsync."""
        with self._lock:
            new = {name: mark for name, mark in made.items() if self._marks.get(name) != mark}
            self._append([_line(name, mark) for name, mark in new.items()])
            self._marks |= new

    def forget(self, names: Iterable[str]) -> None:
        """Removes partitions from the record: their topic was deleted, or an operator gave them up. Durable."""
        with self._lock:
            known = [name for name in names if name in self._marks]
            self._append([f"- {name}" for name in known])
            for name in known:
                del self._marks[name]

    def of(self, topic_folder: str) -> list[str]:
        """The names of the partitions of a topic's folder."""
        with self._lock:
            return [name for name in self._marks if name.rpartition("/")[0] == topic_folder]

    def _append(self, lines: list[str]) -> None:
        if lines:
            begins, self._may_be_torn = "?\n" if self._may_be_torn else "", True
            with open(self._path, "a", opener=opener) as file:
                file.write(begins + "".join(f"{line}\n" for line in lines))
                file.flush()
                os.fsync(file.fileno())
            self._may_be_torn = False


def recorded(folder: Path) -> dict[str, str]:
    """The partitions in a data folder's record, with their marks; changes nothing. Raises OSError."""
    try:
        return _marks_in((folder / FILE_NAME).read_text(errors="replace"))
    except FileNotFoundError:
        return {}


def _line(name: str, mark: str) -> str:
    return f"+ {name} {mark}".rstrip()


def _marks_in(text: str) -> dict[str, str]:
    """Name -> mark; "" for a line of an older release."""
    marks: dict[str, str] = {}
    for match in map(_LINE.fullmatch, text.splitlines(keepends=True)):
        if match is not None and match[1] == "+":
            marks[match[2]] = match[3] or ""
        elif match is not None:
            marks.pop(match[2], None)
    return marks
