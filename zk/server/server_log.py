"""The one line of ZooKeeper's log, or of Java's last words, that says what went wrong.

An entry is "[thread] LEVEL class - text", and may be followed by an exception: its own line, its frames, its causes.
What Java says before ZooKeeper runs has no such form. The log goes on over restarts, so only what came since the start
counts.
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
_OF_NO_MATTER = (
    "Exiting JVM with code",  # after the error
    "Error closing a command socket",  # our own question whether it serves, which came early
)
_OUT_OF_MEMORY = b"Terminating due to java.lang.OutOfMemoryError"
_TAIL_BYTES = 64 << 10


def what_went_wrong(log: Path, since_byte: int) -> str:
    """ "" when the log does not tell."""
    try:
        with log.open("rb") as file:
            file.seek(since_byte)
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    entries = list(_entries(lines))
    if not entries:  # it did not get that far
        return next((line.strip() for line in lines if line.strip() and not line.startswith(_CHATTER)), "")
    errors = [text for level, text in entries if level == "ERROR" and not text.startswith(_OF_NO_MATTER)]
    return errors[-1] if errors else ""


def ran_out_of_memory(log: Path, since_byte: int) -> bool:
    """Whether Java's last words are that no memory was left; its exit status 3 has other meanings, too."""
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
