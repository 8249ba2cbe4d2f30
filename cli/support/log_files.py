"""The logs of brokers and of ZooKeeper on this machine: the newest lines, of metamq's own servers only.

A folder of logs may have those of applications, which print messages. Segments of partitions are called `.log`, too.
So a line is taken only if a server of metamq, or ZooKeeper, has written it:

    taken       entries of the loggers below, from level INFO up, as text or JSON; the stack traces after them; the last
                words of a server that does not start
    not taken   other lines, which are only counted; entries at level DEBUG, which may have the content of nodes; the
                text of an exception that is not metamq's own; files with bytes that are no text
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from metamq.cli.support.redaction import REMOVED, signs_in

if TYPE_CHECKING:
    from metamq.cli.support.parcel import Parcel
    from metamq.cli.support.redaction import Redaction

NAMES = ("*.log", "*.log.*", "*.log-*")
HEAD_BYTES = 4096
_LOGGERS = r"metamq\.(?:broker|zk|security|console)(?:\.(?!kazoo)\w+)*"
_LEVELS = r"(?:INFO|WARNING|ERROR|CRITICAL)"
_BEFORE = (
    r"(?:[A-Z][a-z]{2} +\d+ [\d:]{8} \S+ [^\s\[]+\[\d+\]: |\d{4}-\d\d-\d\dT\S+ \S+ [^\s\[]+\[\d+\]: |[\w.-]+ +\| )?"
)
"""The begin of a line in the output of journalctl and of `docker compose logs`."""
_LINE = re.compile(rf"{_BEFORE}(?P<rest>.*)")
_ENTRY = re.compile(rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d,\d{{3}} {_LEVELS} (?:broker \d+ )?{_LOGGERS}: .*")
_ZOOKEEPER = re.compile(
    r"\[[^\]]{1,200}\] (?:WARN|ERROR|INFO) org\.apache\.zookeeper\.\S+ - .*|"
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} \[myid:\d*\] - (?:WARN|ERROR|INFO) +\[.*?\] - .*"
)
"""As `metamq zookeeper` and Apache's own configuration write it."""
_LAST_WORDS = re.compile(r"metamq: .*|Terminating due to java\.lang\.OutOfMemoryError.*")
_SERVER = re.compile(r"(?:broker|replica|zookeeper|console)")
"""The begin of a file's name that has the output of a server only: its last words are not those of another command."""
_TRACE = re.compile(
    r'  File ".*", line \d+, in .*|    .*|\s+at [\w.$/<>]+\(.*\)|\s+\.\.\. \d+ (?:more|common frames omitted)'
)
_BETWEEN = re.compile(
    r"|During handling of the above exception, another exception occurred:|"
    r"The above exception was the direct cause of the following exception:"
)
_BEGIN = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"(?P<kind>(?:Caused by: )?[A-Za-z_][\w.]*)(?P<text>: .*)?")
_JAVA = re.compile(r"(?:Caused by: )?(?:java|javax|org\.apache\.zookeeper|io\.netty)\.[\w.$]+(?:: .*)?")
_SEGMENT = re.compile(r"\d+-\d+\.log")


class LogFile(NamedTuple):
    """A log, and the time of its last change."""

    path: Path
    name: str
    changed_s: float
    size: int


def log_files(folders: Sequence[Path], parcel: Parcel) -> list[LogFile]:
    """Returns the logs in these folders and the folders in them, the newest first."""
    found: dict[tuple[int, int], LogFile] = {}
    for number, folder in enumerate(folders):
        above = "" if len(folders) == 1 else f"{number + 1}-{folder.absolute().name}/"
        try:
            inner = sorted(one for one in folder.iterdir() if one.is_dir())
        except OSError as error:
            parcel.missing(f"the logs in {folder}", error)
            continue
        for place in (folder, *inner):
            for path in (path for name in NAMES for path in place.glob(name)):
                name = f"{above}{path.relative_to(folder)}"
                if _SEGMENT.fullmatch(path.name) is None and (one := _log_file(path, name, parcel)) is not None:
                    found.setdefault(one[0], one[1])
    return sorted(found.values(), key=lambda one: one.changed_s, reverse=True)


def _log_file(path: Path, name: str, parcel: Parcel) -> tuple[tuple[int, int], LogFile] | None:
    try:
        known = path.stat()
    except OSError as error:
        parcel.missing(name, error)
        return None
    if not stat.S_ISREG(known.st_mode):
        return None
    return (known.st_dev, known.st_ino), LogFile(path, name, known.st_mtime, known.st_size)


def logs_here(folders: Sequence[Path], bytes_max: int, parcel: Parcel, secrets: Redaction) -> None:
    """Puts the newest logs into the parcel: `bytes_max` of all of them together."""
    left = bytes_max
    for one in log_files(folders, parcel):
        try:
            lines, is_cut = _tail(one, left)
        except OSError as error:
            parcel.missing(one.name, error)
            continue
        taken = OwnLines(secrets, is_server=bool(_SERVER.match(one.path.name)))
        texts = list(taken.of(lines))
        if texts or taken.others:
            notes = ["(the begin is left out)"] if is_cut else []
            if taken.others:
                notes.append(f"({taken.others:,} lines are left out: they are not metamq's, or at level DEBUG)")
            content = "\n".join([*texts, ""])
            left -= min(len(content), left)
            parcel.files[f"logs/{one.name}"] = "\n".join([*notes, content])


def _tail(one: LogFile, bytes_max: int) -> tuple[list[str], bool]:
    """Returns the last lines, and whether there are others before. A file of bytes has no lines."""
    with open(one.path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
        if b"\0" in file.read(HEAD_BYTES):
            return [], False
        begin = max(one.size - bytes_max, 0)
        file.seek(begin)
        lines = file.read(one.size - begin).decode(errors="replace").splitlines()
    return (lines[1:] if begin else lines), begin > 0


class OwnLines:
    """Takes the lines of metamq's servers from a log. `others` counts the other lines. The filter comes later."""

    def __init__(self, secrets: Redaction, *, is_server: bool, begins_in_trace: bool = False) -> None:
        self.others = 0
        self._secrets = secrets
        self._is_server = is_server
        self._after: Callable[[str], str | None] | None = self._in_trace if begins_in_trace else None
        """Takes a line that continues the one before; None if that was not taken."""

    def of(self, lines: Iterable[str]) -> Iterator[str]:
        """Yields the lines to take."""
        for line in lines:
            match = _LINE.fullmatch(line)
            taken = self._taken(match["rest"] if match is not None else line)
            if taken is None:
                self.others += 1
                self._after = None
            else:
                yield taken

    def _taken(self, line: str) -> str | None:
        if line.startswith("{"):
            self._after = None
            return self._object(line)
        if _ENTRY.fullmatch(line):
            self._after = self._after_entry
        elif _ZOOKEEPER.fullmatch(line):
            self._after = self._in_java
        elif self._is_server and _LAST_WORDS.fullmatch(line):
            self._after = self._hint
        else:
            return self._after(line) if self._after is not None else None
        return line

    def _hint(self, line: str) -> str | None:
        return line if line.startswith("  ") else None

    def _after_entry(self, line: str) -> str | None:
        """Takes the begin of a stack trace, and what is between two of them."""
        if line == _BEGIN:
            self._after = self._in_trace
            return line
        return line if _BETWEEN.fullmatch(line) else None

    def _in_trace(self, line: str) -> str | None:
        """Takes the lines up to the exception. The text of another library's exception may have anything."""
        if line == _BEGIN or _TRACE.fullmatch(line):
            return line
        found = _EXCEPTION.fullmatch(line)
        if found is None:
            return None
        self._after = self._after_entry
        is_own = found["kind"].startswith("metamq.errors.") or not found["text"]
        return line if is_own else f"{found['kind']}: {REMOVED}"

    def _in_java(self, line: str) -> str | None:
        is_trace = _TRACE.fullmatch(line) and not line.startswith("    ")
        return line if is_trace or _JAVA.fullmatch(line) else None

    def _object(self, line: str) -> str | None:
        try:
            entry: dict[str, Any] = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not re.fullmatch(_LOGGERS, str(entry.get("logger"))) or not re.fullmatch(_LEVELS, str(entry.get("level"))):
            return None
        if "traceback" not in entry and not signs_in(line):
            return line
        if "traceback" in entry:
            inner = OwnLines(self._secrets, is_server=False, begins_in_trace=True)
            entry["traceback"] = "\n".join(inner.of(str(entry["traceback"]).splitlines()))
        return self._secrets.line(entry)
