"""The package metamq-zookeeper: with it, a server starts without a network."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from metamq.errors import CorruptData
from metamq.zk.server.jars import PINNED, ZOOKEEPER_VERSION, check_jars

ROOT = Path(__file__).resolve().parents[2]
PROJECT = ROOT / "packages" / "zookeeper"

STARTS = """
from metamq.testing import cluster
from metamq.zk.server.jars import find_jars

print(*find_jars(secure=True), sep="\\n")
with cluster() as running, running.admin() as admin:
    print(admin.topics())
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the wheel is installed."""
    folder = tmp_path_factory.mktemp("zookeeper")
    built = subprocess.run(
        [sys.executable, PROJECT / "build.py", folder / "dist"], capture_output=True, text=True, timeout=200, check=True
    )
    with zipfile.ZipFile(built.stdout.splitlines()[-1]) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, site: Path) -> None:
    """The package is installed, the cache is empty, and no repository answers."""
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("METAMQ_MAVEN", "http://127.0.0.1:1/")
    monkeypatch.delenv("METAMQ_ZOOKEEPER_JARS", raising=False)


def test_its_version_is_that_of_the_pinned_jars() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    assert project["version"] == ZOOKEEPER_VERSION


def test_jars_of_another_origin_go_into_no_wheel(tmp_path: Path) -> None:
    with pytest.raises(CorruptData, match=f"{PINNED[0].file_name} is damaged: it is missing, or is not the pinned"):
        check_jars([])
    other = tmp_path / PINNED[0].file_name
    other.write_bytes(b"other")
    with pytest.raises(CorruptData, match=re.escape(str(other))):
        check_jars([other])


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_with_the_package_a_cluster_starts_without_a_network(site: Path) -> None:
    run = subprocess.run([sys.executable, "-c", STARTS], capture_output=True, text=True, timeout=200, check=False)
    jars = [str(site / "metamq_zookeeper" / "jars" / jar.file_name) for jar in PINNED]
    assert run.stdout.splitlines() == [*jars, "{}"], run.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_a_damaged_jar_is_not_used(site: Path) -> None:
    jar = site / "metamq_zookeeper" / "jars" / PINNED[0].file_name
    content = jar.read_bytes()
    jar.write_bytes(content[:-1])
    run = subprocess.run([sys.executable, "-c", STARTS], capture_output=True, text=True, timeout=200, check=False)
    jar.write_bytes(content)
    assert f"metamq-zookeeper is not used: {jar} is missing, or is another version" in run.stderr
    assert "the jars of ZooKeeper are not here" in run.stderr


@pytest.mark.slow
def test_the_wheel_has_the_licences_and_the_hashes(site: Path) -> None:
    (licences,) = site.glob("metamq_zookeeper-*.dist-info/licenses")
    assert "Apache License" in (licences / "LICENSE").read_text()
    assert "Permission is hereby granted" in (licences / "LICENSE-slf4j").read_text()
    sums = (site / "metamq_zookeeper" / "SHA512SUMS").read_text()
    assert [line.split() for line in sums.splitlines()] == [[jar.sha512, f"jars/{jar.file_name}"] for jar in PINNED]
