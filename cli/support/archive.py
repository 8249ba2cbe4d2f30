"""The file of a bundle: a zip or a tar.gz, for its owner only, and never in place of another file."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from metamq.errors import ConfigError
from metamq.private_files import OWNER_MODE

ZIP, TAR = ".zip", (".tar.gz", ".tgz")
FORMS = f"{ZIP}, {TAR[0]} or {TAR[1]}"


class SupportArchive(Protocol):
    """A file of files that is being written."""

    def add(self, name: str, data: bytes) -> None:
        """Adds a file. Raises OSError."""
        ...


class _Zip:
    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive

    def add(self, name: str, data: bytes) -> None:
        entry = zipfile.ZipInfo(name, time.localtime()[:6])
        entry.external_attr = OWNER_MODE << 16
        self._archive.writestr(entry, data, zipfile.ZIP_DEFLATED)


class _Tar:
    def __init__(self, archive: tarfile.TarFile) -> None:
        self._archive = archive

    def add(self, name: str, data: bytes) -> None:
        entry = tarfile.TarInfo(name)
        entry.size, entry.mtime, entry.mode = len(data), int(time.time()), OWNER_MODE
        self._archive.addfile(entry, io.BytesIO(data))


def stem_of(path: Path) -> str:
    """Returns the name without its ending. Raises ConfigError if the ending names no archive."""
    for ending in (ZIP, *TAR):
        if path.name.endswith(ending) and path.name != ending:
            return path.name.removesuffix(ending)
    raise ConfigError(f"{path} is not the name of an archive", hint=f"Its name must end with {FORMS}.")


@contextlib.contextmanager
def new_archive(path: Path) -> Iterator[SupportArchive]:
    """Makes the file at once, and completes it at the end of the block. An exception in the block removes the file.

    Raises ConfigError if there is such a file already, or if its name is not that of an archive; OSError.
    """
    stem_of(path)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, OWNER_MODE)
    except FileExistsError:
        raise ConfigError(f"{path} is there already", hint="Give another name, or remove it.") from None
    try:
        with open(descriptor, "wb") as file:
            if path.name.endswith(ZIP):
                with zipfile.ZipFile(file, "w") as zipped:
                    yield _Zip(zipped)
            else:
                with tarfile.open(fileobj=file, mode="w:gz") as packed:
                    yield _Tar(packed)
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
