"""What a run of the tests says at its end: see conftest.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
REPORTING = """
def test_passes(report_figures):
    report_figures("12 of 12")

def test_fails(report_figures):
    report_figures("seed 7")
    assert False
"""
ENGINE_TEST = "tests/containers/test_image.py"


def pytest_says(*arguments: str, **settings: str) -> tuple[int, list[str]]:
    """The exit status of a run of pytest here, and its lines."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        env={**environment, **settings},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
    )
    return done.returncode, done.stdout.splitlines()


@pytest.mark.slow
def test_figures_of_tests_that_pass_and_fail_are_shown_from_workers_too(tmp_path: Path) -> None:
    path = tmp_path / "test_it.py"
    path.write_text(REPORTING)
    for workers in ("0", "2"):
        status, lines = pytest_says("-q", "-p", "tests.conftest", "-n", workers, "--rootdir", str(tmp_path), str(path))
        assert status == 1, lines
        shown = lines[next(n for n, line in enumerate(lines) if " figures " in line) :]
        for name, figures in ("test_passes", "12 of 12"), ("test_fails", "seed 7"):
            at = next(n for n, line in enumerate(shown) if line.endswith(f"::{name}"))
            assert shown[at + 1] == f"  {figures}"


@pytest.mark.slow
def test_a_run_that_leaves_the_container_tests_out_says_so() -> None:
    line = "The container tests need a Docker engine, and are a run of their own: ./dev test --containers"
    all_there_are = "-o", "testpaths=tests/containers"
    left_out = "-m", "not long and not containers"
    assert line in pytest_says(*all_there_are, *left_out)[1]
    slow = "The tests that take seconds are a separate run: ./dev test --slow"
    assert slow in pytest_says(*all_there_are, "-m", "not slow and not containers")[1]
    assert line not in pytest_says(*all_there_are, "-m", "containers", "--collect-only")[1]
    assert line not in pytest_says(*left_out, ENGINE_TEST)[1], "somebody knows what to run"


@pytest.mark.slow
def test_without_an_engine_container_tests_say_so_and_fail_where_nothing_else_was_asked_for() -> None:
    nowhere = {"DOCKER_HOST": "unix:///nowhere/docker.sock"}
    status, lines = pytest_says("-m", "containers", ENGINE_TEST, **nowhere)
    assert status == 1
    assert "no Docker engine answers; start one, or point DOCKER_HOST at one" in "".join(lines)
    status, lines = pytest_says("-rs", ENGINE_TEST, **nowhere)
    assert status == 0
    assert "no Docker engine answers; start one, or point DOCKER_HOST at one" in "".join(lines)
