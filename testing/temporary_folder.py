"""A temporary folder that is removed even if this process is killed.

A killed process cannot clean up. So a small shell reads a pipe whose write end only this process has. When the process
ends for any reason, the kernel closes the pipe, and the shell removes the folder. Brokers that end at the same time may
still write into it for a moment: the shell repeats the removal.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

NAME_CHARACTERS = 60
_REMOVE = 'read _; for _ in 1 2 3 4 5 6 7 8 9 10 11 12; do rm -rf "$1" && sleep 1 && [ ! -e "$1" ] && break; done'


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Makes a folder for a `with` block, and removes it at the end of the block or of this process."""
    folder = Path(tempfile.mkdtemp(prefix="metamq-"))
    with subprocess.Popen(
        ["/bin/sh", "-c", _REMOVE, "metamq-folder", folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal must not end it
    ) as remover:
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            remover.kill()


def own_folder(folder: Path, name: str) -> Path:
    """Makes a new folder in `folder`, which it makes if it does not exist. The new name begins with `name`."""
    folder.mkdir(parents=True, exist_ok=True)
    prefix = re.sub("[^A-Za-z0-9_-]+", "-", name)[:NAME_CHARACTERS].strip("-") or "cluster"
    return Path(tempfile.mkdtemp(prefix=f"{prefix}-", dir=folder))
