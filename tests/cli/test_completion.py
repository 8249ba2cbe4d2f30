"""Completion in shells, by click's protocol: names come from a real cluster."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

import pytest
from click.shell_completion import ShellComplete

from metamq.cli.app import metamq as command
from metamq.testing import Cluster
from tests.cli.conftest import COMMAND, Metamq, unset


@pytest.fixture
def filled(metamq: Metamq, topic: str) -> str:
    """A topic with two partitions, and a group of the same name that reads it."""
    metamq("topic", "alter", topic, "-p", 2)
    metamq("produce", topic, "a")
    metamq("consume", topic, "-g", topic, "-e")
    return topic


def completed(words: list[str], **variables: str) -> list[str]:
    """What bash would offer for the last word."""
    environment = {**unset(os.environ), "_METAMQ_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(["metamq", *words])}
    environment |= {"COMP_CWORD": str(len(words)), **variables}
    done = subprocess.run(COMMAND, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == ""
    return [line.removeprefix("plain,") for line in done.stdout.splitlines() if line]


def names(*words: str) -> list[str]:
    """The same in this process, with more time for a busy machine."""
    offered = ShellComplete(command, {}, "metamq", "_METAMQ_COMPLETE").get_completions([*words[:-1]], words[-1])
    return [item.value for item in offered]


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metamq.cli.completion.LIMIT_S", 60)


@pytest.mark.usefixtures("_patient")
def test_names_of_the_cluster(filled: str) -> None:
    begin = filled[:-1]
    for begun in (["consume"], ["produce"], ["topic", "describe"], ["topic", "tail"], ["group", "reset", "g"]):
        assert names(*begun, begin) == [filled]
    offsets = [["group", "copy-offsets"], ["group", "copy-offsets", filled], ["group", "delete-offsets", filled]]
    offsets += [["group", "copy-offsets", "--topic"], ["group", "delete-offsets"]]
    for begun in (["group", "describe"], ["consume", filled, "--group"], ["dlq", "show"], *offsets):
        assert names(*begun, begin) == [filled]
    assert names("consume", filled, "--partition", "0-") == ["0-0", "0-1"]
    assert names("produce", filled, "-p", "0-1") == ["0-1"]
    assert names("ha", "status", "--broker", "") == ["0"]
    assert names("topic", "create", begin) == []
    assert names("consume", "no-such-topic") == []


@pytest.mark.usefixtures("_patient")
def test_options_choose_the_cluster(
    running: Cluster, filled: str, offline: Metamq, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("METAMQ_ZOOKEEPER")
    offline("context", "add", "here", "--zookeeper", running.zookeeper)
    assert names("--zookeeper", running.zookeeper, "consume", filled[:-1]) == [filled]
    assert names("consume", "--context", "here", filled[:-1]) == [filled]
    assert names("topic", "list", "--context", "h") == ["here"]
    assert names("context", "use", "") == ["here"]


def test_a_shell_gets_the_names(running: Cluster, filled: str, until: Callable[..., None]) -> None:
    until(lambda: completed(["consume", filled[:-1]], METAMQ_ZOOKEEPER=running.zookeeper) == [filled])


def test_commands_and_options_need_no_cluster() -> None:
    assert "topic" in completed(["to"])
    assert completed(["group", "des"]) == ["describe"]
    assert "--where" in completed(["consume", "--wh"])


def test_a_cluster_that_does_not_answer_offers_nothing_soon() -> None:
    """The address is of a network for documentation: packets get no answer."""
    assert completed(["consume", "x"], METAMQ_ZOOKEEPER="192.0.2.1:2181") == []
    assert completed(["consume", "x"], METAMQ_ZOOKEEPER="no address") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(shell: str) -> None:
    done = subprocess.run(
        COMMAND, env={**os.environ, "_METAMQ_COMPLETE": f"{shell}_source"}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, f"_METAMQ_COMPLETE={shell}_complete" in done.stdout) == (0, True)
