"""Files with messages, offsets and decisions: their owner may change them, their group may read them, nobody else.

That is so for all that metamq's own processes make, whatever the umask; a stricter umask stays. What a library of
somebody else's process makes is opened with these modes, and the process's umask is left alone.
"""

from __future__ import annotations

import os
from pathlib import Path

FILE_MODE = 0o640
FOLDER_MODE = 0o750
_FOR_OTHERS = 0o027


def restrict_process() -> None:
    """What this process and its children make from now on is private; for processes that are metamq's own."""
    os.umask(os.umask(0o077) | _FOR_OTHERS)


def opener(path: str, flags: int) -> int:
    """For open(): a new file gets FILE_MODE."""
    return os.open(path, flags, FILE_MODE)


def make_folder(path: str | os.PathLike[str]) -> None:
    """Makes a folder, and those above it that are missing, unless it is there. Raises OSError."""
    folder = Path(path)
    if not folder.parent.is_dir():
        make_folder(folder.parent)
    folder.mkdir(FOLDER_MODE, exist_ok=True)


def too_open(path: str | os.PathLike[str]) -> str | None:
    """What is wrong with the mode of a folder, with the command that mends it; None: nothing is. Raises OSError."""
    mode = os.stat(path).st_mode & 0o777
    if not mode & _FOR_OTHERS:
        return None
    return f"the folder {path} has the mode {mode:o}, others may read or change it: chmod -R g-w,o-rwx {path}"
