"""Builds what is published, in `dist/`: `./dev wheels`. Two builds of one commit give the same wheels.

The source archive and the wheel of metamq, the wheels of the packages in `integrations/`, and that of
metamq-zookeeper. Each is built from a copy, so the checkout stays clean, and checked by twine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
FIXED_TIME = "1767225600"
"""2026-01-01 UTC, for archives without a commit."""
SKIPPED = shutil.ignore_patterns(
    ".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "build", "dist", "site", "*.egg-info", "metamq-data"
)


def main() -> None:
    """Builds and checks everything. Ends with the first error."""
    shutil.rmtree(DIST, ignore_errors=True)
    os.environ.setdefault("SOURCE_DATE_EPOCH", commit_time())
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "metamq"
        shutil.copytree(ROOT, copy, ignore=SKIPPED)
        run("-m", "build", "--outdir", DIST, copy)  # the wheel from the source archive
        for project in sorted((copy / "integrations").iterdir()):
            run("-m", "build", "--wheel", "--outdir", DIST, project)
        os.environ["SOURCE_DATE_EPOCH"] = FIXED_TIME  # its version is ZooKeeper's, so it is the same in all releases
        run(ROOT / "packages" / "zookeeper" / "build.py", DIST)
    run("-m", "twine", "check", "--strict", *sorted(DIST.iterdir()))
    print(*sorted(path.name for path in DIST.iterdir()), sep="\n")


def commit_time() -> str:
    """Returns the time of the commit, for the times in the archives; a fixed one without git."""
    told = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=False)
    return told.stdout.strip() or FIXED_TIME


def run(*arguments: str | Path) -> None:
    """Runs Python quietly; after an error its output is printed."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


if __name__ == "__main__":
    main()
