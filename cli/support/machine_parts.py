"""This machine: the versions of all programs, and the brokers that run here, with their settings."""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

import metamq
from metamq.cli.support.settings_part import settings_document, shown_variables
from metamq.client.settings import CONFIG_FILE_VARIABLE
from metamq.wire.limits import PROTOCOL_VERSION_MAX

if TYPE_CHECKING:
    from metamq.cli.support.parcel import Parcel
    from metamq.cli.support.redaction import Redaction

META, LOCK = "meta.json", "lock"
META_FIELDS = (
    "broker_id", "replica", "format", "incarnation", "clean", "cluster_id", "generation", "epoch", "state_version",
    "reigned_as", "is_replaced",
)  # fmt: skip
PROCESS_FIELDS = ("State", "Threads", "VmRSS", "VmHWM", "FDSize")
_CONFIG = re.compile(r"--config(?:=|$)(.*)")


def versions() -> dict[str, Any]:
    """Returns the versions of metamq, Python, the system and all packages, and the limits of this process."""
    packages = {one.metadata["Name"]: one.version for one in distributions()}
    return {
        "metamq": metamq.__version__,
        "protocol": PROTOCOL_VERSION_MAX,
        "python": sys.version,
        "implementation": platform.python_implementation(),
        "executable": sys.executable,
        "system": platform.platform(),
        "release": _release(),
        "machine": platform.machine(),
        "host": socket.gethostname(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "open_files_limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "load": os.getloadavg(),
        "packages": dict(sorted(packages.items(), key=lambda one: str(one[0]).lower())),
    }


def _release() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return ""


def data_folders(folders: Sequence[Path]) -> list[Path]:
    """Returns the data folders of brokers among these folders and the folders in them."""
    found = []
    for folder in folders:
        try:
            inner = sorted(one for one in folder.iterdir() if one.is_dir())
        except OSError:
            inner = []
        found += [one for one in (folder, *inner) if (one / META).is_file() and (one / LOCK).is_file()]
    return found


def brokers_here(folders: Sequence[Path], parcel: Parcel, secrets: Redaction) -> None:
    """Puts the brokers' data folders and processes into the parcel, and each settings file that they use."""
    files = set[tuple[str, str]]()
    for folder in data_folders(folders):
        document: dict[str, Any] = {"data": str(folder.absolute()), **_disk(folder), **_meta(folder, parcel)}
        process = _process(folder, secrets)
        document["process"] = process
        if process is not None:
            files |= {(file, process["folder"]) for file in _settings_files(process)}
        name = f"{document.get('broker_id')}-{document.get('replica')}-{folder.name}"
        parcel.files[f"machine/brokers/{name}.json"] = document
    for number, (file, place) in enumerate(sorted(files), start=1):
        if (found := settings_document(file, parcel, secrets, place)) is not None:
            parcel.files[f"machine/settings/broker-{number}.json"] = found


def _disk(folder: Path) -> dict[str, Any]:
    usage = shutil.disk_usage(folder)
    topics = [one.name for one in (folder / "topics").iterdir()] if (folder / "topics").is_dir() else []
    return {"disk_bytes": usage.total, "free_bytes": usage.free, "topic_folders": len(topics)}


def _meta(folder: Path, parcel: Parcel) -> dict[str, Any]:
    try:
        document = json.loads((folder / META).read_bytes())
        return {name: document.get(name) for name in META_FIELDS}
    except (OSError, ValueError, AttributeError) as error:
        parcel.missing(str(folder / META), error if isinstance(error, OSError) else "it is not a JSON object")
        return {}


def _process(folder: Path, secrets: Redaction) -> dict[str, Any] | None:
    """Returns the process that has locked a data folder; None if there is none, or if the system does not show it."""
    try:
        pid = int((folder / LOCK).read_text())
        place = Path(f"/proc/{pid}")
        files = list((place / "fd").iterdir())
        if not any(_is_same(one, folder / LOCK) for one in files):  # another process has its number now
            return None
        here = os.readlink(place / "cwd")
        status = _pairs((place / "status").read_text().splitlines(), ":\t")
        variables = _pairs((place / "environ").read_text(errors="replace").split("\0"), "=")
        return {
            "pid": pid,
            "command": (place / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1],
            "folder": here,
            "descriptors": len(files),
            "status": {name: status[name].strip() for name in PROCESS_FIELDS if name in status},
            "variables": shown_variables(variables, secrets, here),
        }
    except (OSError, ValueError):
        return None


def _pairs(lines: Iterable[str], separator: str) -> dict[str, str]:
    return {name: value for name, _, value in (line.partition(separator) for line in lines)}


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # it was closed meanwhile
        return False


def _settings_files(process: dict[str, Any]) -> Iterator[str]:
    words: list[str] = process["command"]
    given = [process["variables"].get(CONFIG_FILE_VARIABLE, "")]
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if (match := _CONFIG.fullmatch(word)) is not None:
            given.append(match[1] or following)
    yield from filter(None, given)
