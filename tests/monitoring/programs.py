"""Prometheus's own programs, from $PATH or from Debian's package, which is unpacked into .venv and not installed."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

KEPT = Path(__file__).parents[2] / ".venv" / "prometheus"


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`. Skips the test where neither $PATH nor Debian's package has it."""
    found = shutil.which(name)
    if found is not None:
        return found
    if not KEPT.exists():
        _unpack()
    return str(KEPT / "usr" / "bin" / name)


def _unpack() -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        pytest.skip("there is no promtool: install Prometheus")
    with tempfile.TemporaryDirectory(dir=KEPT.parent) as folder:
        if subprocess.run(["apt-get", "download", "prometheus"], cwd=folder, capture_output=True).returncode:
            pytest.skip("there is no promtool, and apt-get cannot download it: `apt-get update`, or install Prometheus")
        (package,) = Path(folder).glob("*.deb")
        unpacked = Path(folder) / "unpacked"
        subprocess.run(["dpkg", "-x", package, unpacked], check=True)
        with contextlib.suppress(OSError):  # another worker was faster
            unpacked.rename(KEPT)
