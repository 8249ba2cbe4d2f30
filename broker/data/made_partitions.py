"""Which partitions a data folder has had, so that one whose files are missing is not taken for a new one, nor an older
copy of them for what was there.

    partitions      a line for each change: "+ <topic>@<topic id>/<index> <mark>" was made here, "- …" is not missed any
                    more. The mark is that of the partition's file `flushed` (metamq.broker.data.folder_lock)

Theory of operation. ZooKeeper lists a topic's partitions. One that this folder never had is new, and its log begins
empty. One that it had, and whose files are gone, is damaged: what was acknowledged in it is not here. The file tells
them apart. `flushed` is the same file for as long as the log is here. Another one in its place came from a copy, which
may lack what was acknowledged later: such a partition is damaged, too. In a data folder that is a copy as a whole, all
marks are new, and what it lacks is another question (metamq.broker.data.data_folder). A line is written after the
partition's log is durable, and is durable itself before anybody can store anything in that. So a crash in between
leaves a log without a line, which gets one at the next open.

The file is a second witness, beside the folders. Where it is missing, or lacks lines (it is of an older release,
somebody removed it or put an older one back), the logs that are there are added, with their marks. Half a line was
never durable. After a write that failed, "?" ends what it may have left, which then is no line. Who gives a log up
takes its line away, with `forget()`: `metamq log forget`, and the removal of a topic.
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
    """The record of one data folder; a partition's name is "<topic>@<topic id>/<index>".

    All methods raise OSError. Any thread.
    """

    def __init__(self, folder: Path, found: Mapping[str, str], *, is_copy: bool) -> None:
        """Reads it, and adds, durably, the partitions whose logs were `found` in the folder: name -> mark. Where the
        whole folder `is_copy`, the marks are those of the copy."""
        self._path = folder / FILE_NAME
        self._may_be_torn = False
        self._lock = threading.Lock()
        self.is_new = not self._path.exists()
        """Whether there was no record."""
        text = "" if self.is_new else self._path.read_text(errors="replace")
        self._marks = _marks_in(text)
        self._marks |= {name: mark for name, mark in found.items() if is_copy or not self._marks.get(name)}
        whole = "".join(f"{_line(name, mark)}\n" for name, mark in self._marks.items())
        if self.is_new or text != whole:  # so it stays short, too
            temporary = self._path.with_name(f"{FILE_NAME}.tmp")
            with open(temporary, "w", opener=opener) as file:
                file.write(whole)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(self._path)

    def mark(self, name: str) -> str | None:
        """Of the partition that was made; None when none was."""
        return self._marks.get(name)

    def add(self, made: Mapping[str, str]) -> None:
        """These partitions were made: name -> mark. Durable, with one fsync at most."""
        with self._lock:
            new = {name: mark for name, mark in made.items() if self._marks.get(name) != mark}
            self._append([_line(name, mark) for name, mark in new.items()])
            self._marks |= new

    def forget(self, names: Iterable[str]) -> None:
        """These are not missed: their topic was deleted, or somebody gave them up. Durable."""
        with self._lock:
            known = [name for name in names if name in self._marks]
            self._append([f"- {name}" for name in known])
            for name in known:
                del self._marks[name]

    def of(self, topic_folder: str) -> list[str]:
        """The partitions of a topic's folder."""
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
    """The partitions that a data folder's record names, with their marks; changes nothing. Raises OSError."""
    try:
        return _marks_in((folder / FILE_NAME).read_text(errors="replace"))
    except FileNotFoundError:
        return {}


def _line(name: str, mark: str) -> str:
    return f"+ {name} {mark}".rstrip()


def _marks_in(text: str) -> dict[str, str]:
    """Name -> mark; "" in a line of an older release."""
    marks: dict[str, str] = {}
    for match in map(_LINE.fullmatch, text.splitlines(keepends=True)):
        if match is not None and match[1] == "+":
            marks[match[2]] = match[3] or ""
        elif match is not None:
            marks.pop(match[2], None)
    return marks
