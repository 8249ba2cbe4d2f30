"""Builds the wheel of metamq-zookeeper: `python packages/zookeeper/build.py FOLDER`. `./dev wheels` does it.

Needs metamq and setuptools. The jars come from where `metamq up` has them from: METAMQ_ZOOKEEPER_JARS, the user's cache
or Maven Central.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from setuptools import build_meta

from metamq.zk.server.jars import PINNED, check_jars, find_jars

HERE = Path(__file__).resolve().parent
MIT_JAR = "slf4j-api"


def build(target: Path) -> Path:
    """Builds the wheel in the folder `target`. Raises the errors of find_jars()."""
    jars = find_jars(secure=True)
    check_jars(jars)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "zookeeper"
        shutil.copytree(HERE, source)
        package = source / "metamq_zookeeper"
        (package / "jars").mkdir()
        for jar in jars:
            shutil.copyfile(jar, package / "jars" / jar.name)
        (package / "SHA512SUMS").write_text("".join(f"{jar.sha512}  jars/{jar.file_name}\n" for jar in PINNED))
        shutil.copyfile(HERE.parent.parent / "LICENSE", source / "LICENSE")
        (mit,) = (jar for jar in jars if jar.name.startswith(MIT_JAR))
        with zipfile.ZipFile(mit) as archive:
            (source / "LICENSE-slf4j").write_bytes(archive.read("META-INF/LICENSE.txt"))
        before = Path.cwd()
        os.chdir(source)  # setuptools builds the project in the current folder
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # a line for each file
                name = build_meta.build_wheel(str(target.resolve()))
        finally:
            os.chdir(before)
    return target / name


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
