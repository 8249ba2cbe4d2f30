"""`metamq group copy-offsets`, `delete-offsets`, and `reset --database`."""

from __future__ import annotations

import sqlite3
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from metamq.testing import Cluster
from tests.cli.conftest import Metamq
from tests.database_offsets import offsets_in


@pytest.fixture
def group(metamq: Metamq, topic: str) -> str:
    """A group of the topic's name that has read two of three messages."""
    metamq("produce", topic, "a", "b", "c")
    metamq("consume", topic, "-g", topic, "-n", 2)
    return topic


def committed(metamq: Metamq, group: str) -> dict[str, Any]:
    (found,) = metamq("group", "describe", group, "-o", "json").json
    return {f"{one['topic']}/{one['partition']}": one["committed"] for one in found["partitions"]}


def test_offsets_are_copied(metamq: Metamq, topic: str, group: str) -> None:
    target = f"{group}-2"
    shown = metamq("group", "copy-offsets", group, target, "--dry-run")
    assert (shown.status, shown.talk) == (0, "")
    assert [line.split() for line in shown.text.splitlines()] == [
        ["PARTITION", "BEFORE", "AFTER"],
        [f"{topic}/0-0", "-", "2"],
    ]
    asked = metamq("group", "copy-offsets", group, target)
    assert (asked.status, asked.data) == (1, b"")
    assert f"From group {group} to group {target}:" in asked.talk
    assert metamq("group", "describe", target).status == 1, "nothing was done"
    done = metamq("group", "copy-offsets", group, target, "--topic", topic, "--yes", "-o", "json")
    assert done.json == [{"topic": topic, "partition": "0-0", "before": None, "after": 2}]
    assert done.talk.endswith("1 offset copied.\n")
    assert metamq("consume", topic, "-g", target, "-n", 1).text == "c\n"
    refused = metamq("group", "copy-offsets", group, target, "--yes")
    assert (refused.status, refused.data) == (1, b"")
    assert "has offsets of its own" in refused.talk
    assert "--overwrite" in refused.talk
    assert metamq("group", "copy-offsets", group, target, "--yes", "--overwrite").status == 0
    assert committed(metamq, target) == {f"{topic}/0-0": 2}


def test_offsets_are_deleted(metamq: Metamq, topic: str, group: str) -> None:
    shown = metamq("group", "delete-offsets", group, topic, "--dry-run")
    assert [line.split() for line in shown.text.splitlines()][1:] == [[f"{topic}/0-0", "2", "-"]]
    assert metamq("group", "delete-offsets", group, topic).status == 1
    assert committed(metamq, group) == {f"{topic}/0-0": 2}
    done = metamq("group", "delete-offsets", group, topic, "--yes")
    assert (done.status, done.data, done.talk.splitlines()[-1]) == (0, b"", "1 offset deleted.")
    assert committed(metamq, group) == {}
    again = metamq("group", "delete-offsets", group, topic, "--yes")
    assert again.status == 1
    assert f"metamq: group {group!r} has no offsets in topic {topic!r}" in again.talk


def test_offsets_in_a_database_are_shown(metamq: Metamq, running: Cluster, topic: str, tmp_path: Path) -> None:
    metamq("produce", topic, *"abcde")
    file = tmp_path / "totals.db"
    offsets = offsets_in(lambda: sqlite3.connect(file))
    with running.consumer(group=topic, topics=[topic], offsets=offsets, auto_commit=False) as consumer:
        for message in islice(consumer, 4):
            if message.offset == 1:
                consumer.commit(message)
    processed = metamq("group", "describe", topic).text.splitlines()
    assert processed[2].split()[:4] == [f"{topic}/0-0", "4*", "5", "1"]
    assert processed[-1] == "The database may have lower offsets: --database reads them."
    shown = metamq("group", "describe", topic, "--database", f"sqlite:///{file}").text.splitlines()
    assert shown[2].split()[:4] == [f"{topic}/0-0", "2", "5", "3"]
    assert shown[-1] == f"Offsets are kept by DatabaseOffsets, not in ZooKeeper: {topic}/0-0"


def test_a_database_is_refused_for_offsets_in_zookeeper(metamq: Metamq, topic: str, group: str, tmp_path: Path) -> None:
    offsets_in(lambda: sqlite3.connect(tmp_path / "totals.db"))
    refused = metamq("group", "describe", group, "--database", f"sqlite:///{tmp_path}/totals.db")
    assert refused.status == 1
    assert f"keeps its offsets of topic {topic!r} in ZooKeeper, not by DatabaseOffsets" in refused.talk
    assert metamq("group", "describe", group, "--table", "places").status == 2


def test_offsets_in_a_database_are_reset(
    metamq: Metamq, running: Cluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metamq("produce", topic, *"abcde")
    file = tmp_path / "totals.db"
    offsets = offsets_in(lambda: sqlite3.connect(file), table="places")
    with running.consumer(group=topic, topics=[topic], offsets=offsets) as consumer:
        assert len(list(islice(consumer, 3))) == 3
    (tmp_path / "totals.py").write_text(f"import sqlite3\ndef connect():\n    return sqlite3.connect({str(file)!r})\n")
    monkeypatch.chdir(tmp_path)

    def reset(*more: object, database: str = f"sqlite:///{file}") -> list[tuple[int, int]]:
        done = metamq("group", "reset", topic, topic, "--database", database, "--table", "places", "-o", "json", *more)
        assert done.status == 0, done.talk
        return [(one["before"], one["after"]) for one in done.json]

    assert reset("--to", "earliest", "--dry-run") == [(3, 0)]
    assert reset("--shift-by", -1, "--yes") == [(3, 2)]
    assert reset("--shift-by", 100, "--yes", database="totals:connect") == [(2, 5)]
    assert reset("--to", -4, "--yes", database="sqlite:///totals.db") == [(5, 1)]
    assert reset("--to", "@-1h", "--yes") == [(1, 0)]
    assert reset("--partition", "0-0=4", "--yes") == [(0, 4)]
    with running.consumer(group=topic, topics=[topic], offsets=offsets) as consumer:
        assert next(iter(consumer)).offset == 4
    hint = metamq("group", "reset", topic, topic, "--to", "latest", "--yes")
    assert (hint.status, "--database" in hint.talk) == (1, True)


@pytest.mark.parametrize(
    ("database", "problem"),
    [
        ("sqlite:///not-there.db", "there is no file not-there.db"),
        ("mysql://root:geheim@db/shop", "a URL of mysql is not supported"),
        ("geheim", "this is not a database"),
        ("no_such_module:connect", "there is no module 'no_such_module', for no_such_module:connect"),
        ("os:connect", "the module os has no 'connect'"),
        ("os:sep", "os:sep is not a function"),
    ],
)
def test_a_database_that_cannot_be_opened(offline: Metamq, database: str, problem: str, tmp_path: Path) -> None:
    done = offline("group", "reset", "g", "t", "--to", "latest", "--database", database)
    assert done.status == 2
    assert problem in " ".join(done.talk.split())
    assert "geheim" not in done.talk
    assert not (tmp_path / "not-there.db").exists()
