"""Files with messages, offsets and decisions: the owner may write them, the group may read them, others have no access.

metamq's own processes create all files with these modes, whatever the umask; a stricter umask stays in force. A
library in an application's process opens its files with these modes and does not change the umask of the process.
"""

from __future__ import annotations

import os
from pathlib import Path

FILE_MODE = 0o640
FOLDER_MODE = 0o750
OWNER_MODE = 0o600
"""The mode of a file with a private key."""
_FOR_OTHERS = 0o027


def restrict_process() -> None:
    """Makes all new files of this process and its children private (umask). Only for metamq's own processes."""
    os.umask(os.umask(0o077) | _FOR_OTHERS)


def opener(path: str, flags: int) -> int:
    """Opens a file for open(); a new file gets FILE_MODE."""
    return os.open(path, flags, FILE_MODE)


def replace_file(path: Path, data: bytes, mode: int) -> None:
    """Replaces a file as a whole: a reader sees the former data or the new data. Raises OSError."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def make_folder(path: str | os.PathLike[str]) -> None:
    """Creates a folder and its missing parents. An existing folder is kept. Raises OSError."""
    folder = Path(path)
    if not folder.parent.is_dir():
        make_folder(folder.parent)
    folder.mkdir(FOLDER_MODE, exist_ok=True)


def too_open(path: str | os.PathLike[str]) -> str | None:
    """Returns the problem with a folder's mode and the command that repairs it, or None. Raises OSError."""
    mode = os.stat(path).st_mode & 0o777
    if not mode & _FOR_OTHERS:
        return None
    return f"the folder {path} has the mode {mode:o}, others may read or change it: chmod -R g-w,o-rwx {path}"
