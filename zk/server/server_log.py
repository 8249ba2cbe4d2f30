"""Finds the line with the reason of a failure in the log of ZooKeeper, or of Java.

An entry is "[thread] LEVEL class - text". An exception may follow it: its own line, its frames, its causes. The output
of Java before ZooKeeper runs does not have this form. The log continues over restarts, so only entries since the start
count.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

_ENTRY = re.compile(r"\[.+?\] (?P<level>[A-Z]+) \S+ - (?P<text>.*)")
_FRAME = re.compile(r"\s+(at |\.\.\. )")
_CAUSE = "Caused by: "
_PACKAGES = re.compile(r"^(?:[a-z]\w*\.)+(?=[A-Z])")
_CHATTER = ("SLF4J", "OpenJDK", "WARNING:")
_IRRELEVANT = (
    "Exiting JVM with code",  # after the error
    "Error closing a command socket",  # our own probe, which came too early
)
_OUT_OF_MEMORY = b"Terminating due to java.lang.OutOfMemoryError"
_TAIL_BYTES = 64 << 10


def what_went_wrong(log: Path, since_byte: int) -> str:
    """Returns the line with the reason; "" if the log has none."""
    try:
        with log.open("rb") as file:
            file.seek(since_byte)
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    entries = list(_entries(lines))
    if not entries:  # Java ended before ZooKeeper ran
        return next((line.strip() for line in lines if line.strip() and not line.startswith(_CHATTER)), "")
    errors = [text for level, text in entries if level == "ERROR" and not text.startswith(_IRRELEVANT)]
    return errors[-1] if errors else ""


def ran_out_of_memory(log: Path, since_byte: int) -> bool:
    """True if Java's last output says that no memory was left. Its exit status 3 also has other meanings."""
    try:
        with log.open("rb") as file:
            file.seek(max(since_byte, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return _OUT_OF_MEMORY in file.read()
    except OSError:
        return False


def _entries(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(level, text with the exception's cause) of each entry."""
    level, text, exception = "", "", ""
    for line in lines:
        entry = _ENTRY.match(line)
        if entry is not None:
            if level:
                yield level, _joined(text, exception)
            level, text, exception = entry["level"], entry["text"].strip(), ""
        elif not _FRAME.match(line) and (not exception or line.startswith(_CAUSE)):
            exception = line.removeprefix(_CAUSE)
    if level:
        yield level, _joined(text, exception)


def _joined(text: str, exception: str) -> str:
    return ": ".join(part for part in (text, _PACKAGES.sub("", exception)) if part)
