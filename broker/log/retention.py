"""The decision which segments to remove, and their archiving. The log carries the decision out."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from metamq.private_files import make_folder

if TYPE_CHECKING:
    from metamq.broker.log.config import LogConfig
    from metamq.broker.log.disk.files import FileCache

log = logging.getLogger("metamq.broker.log")
_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP}


def expired_by_age(config: LogConfig, last_append_us: int, now_us: int) -> bool:
    """True if a segment with this last append is older than the topic keeps."""
    return config.retention_ms is not None and now_us - last_append_us > 1000 * config.retention_ms


def removable(
    config: LogConfig,
    sealed: list[tuple[int, int]],
    active_bytes: int,
    stable_position: int,
    last_append_us: Callable[[int], int],
    now_us: int,
) -> int:
    """The number of the oldest sealed segments to remove.

    `sealed` has the (end position, bytes) of each; `last_append_us` returns the last append of one, and is called only
    if the decision depends on it. Segments above the stable position stay.
    """
    left_bytes = active_bytes + sum(size for _end, size in sealed)
    for number, (end_position, size) in enumerate(sealed):
        if end_position > stable_position:
            return number
        too_large = config.retention_bytes is not None and left_bytes > config.retention_bytes
        if not too_large and not expired_by_age(config, last_append_us(number), now_us):
            return number
        left_bytes -= size
    return len(sealed)


def archive_all(files: FileCache, name: str, paths: list[str], archive_dir: Path) -> int:
    """Archives sealed segments, oldest first, up to the first failure; returns the number of archived segments.

    Any thread, like archive(): it uses only functions of `files` that need no open file of the cache.
    """
    for number, path in enumerate(paths):
        try:
            archive(files, path, archive_dir)
        except OSError as error:
            log.warning("%s: %s could not be archived to %s, so it stays: %s", name, path, archive_dir, error)
            return number
    return len(paths)


def archive(files: FileCache, path: str, archive_dir: Path) -> None:
    """Puts a segment into the archive, durably; the source stays. A repeated call is allowed. Raises OSError.

    The archive has the layout of the data folder: <topic>@<topic id>/<index>/<segment>. On the same file system the
    archived file is a hard link, else a copy.
    """
    source = Path(path)
    folder = archive_dir / source.parent.parent.name / source.parent.name
    make_folder(folder)
    target, temporary = folder / source.name, folder / (source.name + ".tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _copy(files, source, temporary)
    temporary.rename(target)
    temporary.unlink(missing_ok=True)  # renaming one link of a file onto another does nothing
    for changed in (folder, folder.parent, archive_dir, archive_dir.parent):
        files.sync_folder(str(changed))


def _copy(files: FileCache, source: Path, target: Path) -> None:
    try:
        shutil.copyfile(source, target)
        with open(target, "rb") as file:
            files.sync(file.fileno())
    except OSError:
        with contextlib.suppress(OSError):
            target.unlink(missing_ok=True)
        raise
