"""docs/testing.md: its tests pass in a pytest of their own, and leave no process and no folder behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from tests.parts import gone, wait_until
from tests.test_docs import snippets

BLOCKED = """
import sys
import pytest

def test_it(metamq_topic, metamq_pair):
    print("up", file=sys.__stderr__, flush=True)
    input()
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-W", "error", "-m", "pytest", "-p", "no:cacheprovider", *arguments]


def environment(folder: Path) -> dict[str, str]:
    """The environment of a user's pytest, whose temporary folders are below `folder`."""
    (folder / "tmp").mkdir()
    (folder / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    return {**os.environ, "TMPDIR": str(folder / "tmp")}


def is_empty(folder: Path) -> bool:
    """True without folders of metamq. pytest-xdist leaves one of its own."""
    return not any(folder.glob("metamq*"))


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_the_tests_of_the_guide_pass(workers: str, tmp_path: Path) -> None:
    found = snippets("docs/testing.md")
    assert len(found) >= 8
    for number, snippet in enumerate(found):
        (tmp_path / f"test_{number}.py").write_text(snippet)
    settings = environment(tmp_path)
    done = subprocess.run(
        command("-n", workers, "--rootdir", str(tmp_path), str(tmp_path)),
        env=settings,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 14 passed" in done.stdout
    wait_until(lambda: is_empty(tmp_path / "tmp"), what="the end of the folders")


OTHER_LOOPS = """
import os
from pathlib import Path
import pytest
from metamq.testing import cluster_fixture

metamq_cluster = cluster_fixture(scope="module", folder=Path("kept"))

@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("times", [1, 2])
async def test_in_the_loop_of_the_module(metamq_aio_producer, metamq_aio_consumer, metamq_topic, times):
    await metamq_aio_producer.send(metamq_topic, b"17")
    assert [message.value async for message in metamq_aio_consumer] == [b"17"]

@pytest.mark.asyncio
async def test_in_its_own_loop(metamq_aio_producer, metamq_topic):
    await metamq_aio_producer.send(metamq_topic, b"17")
"""


@pytest.mark.slow
def test_loops_of_any_scope_a_kept_folder_and_an_environment_for_other_brokers(tmp_path: Path) -> None:
    """The settings of the environment are for another broker: it would not start with them."""
    (tmp_path / "wrong.toml").write_text("[broker]\nport = 7\nunknown = 1\n")
    others = {"METAMQ_CONFIG": str(tmp_path / "wrong.toml"), "METAMQ_BROKER_LEARNER": "yes", "METAMQ_ROOT": "/other"}
    for number in (1, 2):
        (tmp_path / f"test_{number}.py").write_text(OTHER_LOOPS)
    done = subprocess.run(
        command("--rootdir", str(tmp_path), str(tmp_path)), env={**environment(tmp_path), **others}, cwd=tmp_path,
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 6 passed" in done.stdout
    assert sorted(path.name[:9] for path in (tmp_path / "kept").iterdir()) == ["test_1-py", "test_2-py"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_pytest_that_is_ended_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(BLOCKED)
    arguments = command("-s", "--rootdir", str(tmp_path), str(tmp_path))
    with subprocess.Popen(
        arguments,
        env=environment(tmp_path),
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stderr is not None
        assert "up\n" in parent.stderr
        children = psutil.Process(parent.pid).children(recursive=True)
        assert len(children) >= 5, "two of ZooKeeper, three brokers"
        assert not is_empty(tmp_path / "tmp")
        parent.send_signal(number)
        wait_until(lambda: gone(children), what="the end of the processes")
    wait_until(lambda: is_empty(tmp_path / "tmp"), what="the end of the folders")


def test_without_a_plugin_for_asyncio_the_error_names_one(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(metamq_aio_producer):\n    pass\n")
    arguments = command("-p", "no:asyncio", "--rootdir", str(tmp_path), str(tmp_path))
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True)
    assert "metamq_aio_producer needs a plugin that runs asyncio tests: pip install pytest-asyncio" in done.stdout


def test_the_plugin_imports_only_what_a_pytest_has_already(tmp_path: Path) -> None:
    """A user's run pays for each import of the plugin."""
    program = """
        import sys, pytest, _pytest
        before = set(sys.modules)
        import metamq.testing.plugin
        new = set(sys.modules) - before
        print(sorted(new))
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(
        ["metamq", "metamq.testing", "metamq.testing.aio_clients", "metamq.testing.plugin"]
    )
