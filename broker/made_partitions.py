"""Which partitions a data folder has had, so that one whose files are missing is not taken for a new one.

    partitions      a line for each change: "+ <topic>@<topic id>/<index>" was made here, "- …" is not missed any more

Theory of operation. ZooKeeper lists a topic's partitions. One that this folder never had is new, and its log begins
empty. One that it had, and whose files are gone, is damaged: what was acknowledged in it is not here. The file tells
them apart. A line is written after the partition's log is durable, and is durable itself before anybody can store
anything in that. So a crash in between leaves a log without a line, which gets one at the next open.

The file is a second witness, beside the folders. Where it is missing, or lacks lines (it is of an older release,
somebody removed it or put an older one back), the logs that are there are added. Half a line was never durable. After a
write that failed, "?" ends what it may have left, which then is no line. Who gives a log up takes its line away, with
`forget()`: `metamq log forget`, and the removal of a topic.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable
from pathlib import Path

from metamq.private_files import opener

FILE_NAME = "partitions"
_LINE = re.compile(r"([+-]) ([^/@\n]+@[^/@\n]+/\d+)\n")


class MadePartitions:
    """The record of one data folder; a partition's name is "<topic>@<topic id>/<index>".

    All methods raise OSError. Any thread.
    """

    def __init__(self, folder: Path, found: Iterable[str]) -> None:
        """Reads it, and adds, durably, the partitions whose logs were `found` in the folder."""
        self._path = folder / FILE_NAME
        self._may_be_torn = False
        self._lock = threading.Lock()
        self.is_new = not self._path.exists()
        """Whether there was no record."""
        text = "" if self.is_new else self._path.read_text(errors="replace")
        self._names = _names_in(text) | dict.fromkeys(found)
        whole = "".join(f"+ {name}\n" for name in self._names)
        if self.is_new or text != whole:  # so it stays short, too
            temporary = self._path.with_name(f"{FILE_NAME}.tmp")
            with open(temporary, "w", opener=opener) as file:
                file.write(whole)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(self._path)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, names: Iterable[str]) -> None:
        """These partitions were made. Durable, with one fsync at most."""
        with self._lock:
            new = [name for name in names if name not in self._names]
            self._append("+", new)
            self._names |= dict.fromkeys(new)

    def forget(self, names: Iterable[str]) -> None:
        """These are not missed: their topic was deleted, or somebody gave them up. Durable."""
        with self._lock:
            known = [name for name in names if name in self._names]
            self._append("-", known)
            for name in known:
                del self._names[name]

    def of(self, topic_folder: str) -> list[str]:
        """The partitions of a topic's folder."""
        with self._lock:
            return [name for name in self._names if name.rpartition("/")[0] == topic_folder]

    def _append(self, sign: str, names: list[str]) -> None:
        if names:
            begins, self._may_be_torn = "?\n" if self._may_be_torn else "", True
            with open(self._path, "a", opener=opener) as file:
                file.write(begins + "".join(f"{sign} {name}\n" for name in names))
                file.flush()
                os.fsync(file.fileno())
            self._may_be_torn = False


def recorded(folder: Path) -> list[str]:
    """The partitions that a data folder's record names; changes nothing. Raises OSError."""
    try:
        return list(_names_in((folder / FILE_NAME).read_text(errors="replace")))
    except FileNotFoundError:
        return []


def _names_in(text: str) -> dict[str, None]:
    names: dict[str, None] = {}
    for match in map(_LINE.fullmatch, text.splitlines(keepends=True)):
        if match is not None and match[1] == "+":
            names[match[2]] = None
        elif match is not None:
            names.pop(match[2], None)
    return names
