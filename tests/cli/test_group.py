"""`metamq group`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from metamq import FileOffsets
from metamq.testing import Cluster
from tests.parts import idle_reason

Metamq = Callable[..., Any]
Until = Callable[..., None]


def test_a_group_is_listed_and_described(metamq: Metamq, topic: str) -> None:
    metamq("produce", topic, "a", "b", "c")
    metamq("consume", topic, "-g", topic, "-n", 2)
    listed = metamq("group", "list", "-o", "json").json
    assert {"group": topic, "members": [], "topics": [topic], "strategy": "range", "owner": None} in listed
    (found,) = metamq("group", "describe", topic, "-o", "json").json
    assert (found["group"], found["lag"], found["members"]) == (topic, 1, [])
    assert found["partitions"] == [
        {
            "topic": topic, "partition": "0-0", "committed": 2, "start": 0, "end": 3, "lag": 1, "owner": None,
            "host": None, "problem": "", "kept_by": "", "progress": None,
        }
    ]  # fmt: skip
    lines = metamq("group", "describe", topic).text.splitlines()
    assert lines[0] == f"{topic}: 0 members, strategy range, lag 1"
    assert lines[1].split() == ["PARTITION", "COMMITTED", "END", "LAG", "OWNER"]
    assert lines[2].split() == [f"{topic}/0-0", "2", "3", "1", "-"]
    explained = metamq("group", "explain", topic)
    assert "Strategy range" in explained.text
    assert metamq("group", "explain", topic, "-o", "json").json["text"] + "\n" == explained.text


def test_members_are_shown_and_protect_their_group(metamq: Metamq, running: Cluster, topic: str, until: Until) -> None:
    with running.consumer(group=topic, topics=[topic], consumer_id="reader"):
        until(lambda: metamq("group", "describe", topic, "-o", "json").json[0]["partitions"][0]["owner"] == "reader")
        lines = metamq("group", "describe", topic).text.splitlines()
        assert lines[-2].split() == ["MEMBER", "HOST", "PID", "PARTITIONS", "PROGRESS", "VERSION"]
        assert lines[-1].split()[2:4] == [str(os.getpid()), "1"]
        for command in (["reset", topic, topic, "--to", "latest"], ["delete", topic]):
            ended = metamq("group", *command, "--yes")
            assert ended.status == 1
            assert "has members" in ended.talk
            assert "reader (process" in ended.talk


def test_offsets_that_are_not_in_zookeeper_are_not_said_to_be_reset(
    metamq: Metamq, running: Cluster, topic: str, tmp_path: Path, until: Until
) -> None:
    metamq("produce", topic, "a")
    offsets = FileOffsets(tmp_path / "offsets")
    with running.consumer(group=topic, topics=[topic], offsets=offsets, idle_timeout_s=0.5) as consumer:
        assert [message.value for message in consumer] == [b"a"]
    lines = metamq("group", "describe", topic).text.splitlines()
    assert lines[2].split() == [f"{topic}/0-0", "1*", "1", "0", "-"]
    assert (
        lines[-1] == f"Offsets are kept by FileOffsets, not in ZooKeeper (*: what its owner has processed): {topic}/0-0"
    )
    for more in ([], ["--dry-run"]):
        ended = metamq("group", "reset", topic, topic, "--to", "earliest", "--yes", *more)
        assert (ended.status, ended.data) == (1, b"")
        assert f"metamq: group {topic!r} keeps its offsets of topic {topic!r} by FileOffsets, not in" in ended.talk


def test_a_member_without_partitions_is_pointed_out(metamq: Metamq, running: Cluster, topic: str, until: Until) -> None:
    reason = "2 members share 1 partition of 1 topic, by strategy range"
    one = running.consumer(group=topic, topics=[topic], consumer_id="one")
    with one, running.consumer(group=topic, topics=[topic], consumer_id="two") as two:
        until(lambda: idle_reason(two) == reason)
        until(lambda: one.assignment)
        assert metamq("group", "describe", topic).text.splitlines()[-1] == f"two has no partition: {reason}"
        members = metamq("group", "describe", topic, "-o", "json").json[0]["members"]
        assert [member["idle_reason"] for member in members] == ["", reason]
        findings = metamq("doctor", "-o", "json").json
        (found,) = [finding for finding in findings if finding["what"] == f"group {topic}"]
        assert (found["status"], found["detail"]) == (
            "warning",
            f"2 members, 1 partition owned; two has no partition: {reason}",
        )
        assert found["hint"].startswith("Add partitions")


def test_a_member_whose_topic_was_deleted_is_advised_to_make_it_again(
    metamq: Metamq, running: Cluster, topic: str, until: Until
) -> None:
    with running.consumer(group=topic, topics=[topic], consumer_id="one") as consumer:
        metamq("topic", "delete", topic, "--yes")
        until(lambda: idle_reason(consumer))
        findings = metamq("doctor", "-o", "json").json
    (found,) = [finding for finding in findings if finding["what"] == f"group {topic}"]
    assert found["detail"] == f"1 member, 0 partitions owned; one has no partition: none of its topics exists: {topic}"
    assert found["hint"].startswith("Create the topic again")


def test_reset_prints_the_plan_and_wants_yes(metamq: Metamq, topic: str) -> None:
    metamq("produce", topic, "a", "b", "c")
    metamq("consume", topic, "-g", topic, "-e")
    for arguments, status in ([[], 1], [["--dry-run"], 0]):
        shown = metamq("group", "reset", topic, topic, "--to", "earliest", *arguments)
        assert shown.status == status
        assert "0-0             3      0\n" in (shown.text if "--dry-run" in arguments else shown.talk)
    assert metamq("consume", topic, "-g", topic, "-e").data == b""
    done = metamq("group", "reset", topic, topic, "--partition", "0-0=1", "--yes", "-o", "json")
    assert done.status == 0
    assert done.json == [{"topic": topic, "partition": "0-0", "before": 3, "after": 1}]
    assert metamq("consume", topic, "-g", topic, "-e").text.split() == ["b", "c"]
    outside = metamq("group", "reset", topic, topic, "--to", 9, "--yes")
    assert outside.status == 1
    assert "has the offsets 0 to 3, not 9" in outside.talk


def test_reset_to_the_last_messages_and_by_a_shift(metamq: Metamq, topic: str) -> None:
    metamq("produce", topic, *map(str, range(10)))
    metamq("consume", topic, "-g", topic, "-e")

    def reset(*options: object) -> tuple[int, int]:
        (found,) = metamq("group", "reset", topic, topic, *options, "-o", "json").json
        return found["before"], found["after"]

    assert reset("--to", "-3", "--dry-run") == (10, 7)
    assert reset("--to", "-3", "--yes") == (10, 7)
    assert reset("--to", "-99", "--dry-run") == (7, 0)
    assert reset("--shift-by", "-2", "--yes") == (7, 5)
    assert reset("--shift-by", 3, "--dry-run") == (5, 8)
    assert reset("--shift-by", 99, "--dry-run") == (5, 10)
    assert metamq("consume", topic, "-g", topic, "-e").text.split() == ["5", "6", "7", "8", "9"]
    metamq("topic", "create", f"{topic}-other", "-p", 1)
    ended = metamq("group", "reset", topic, f"{topic}-other", "--shift-by", 1, "--dry-run")
    assert (ended.status, "has no committed offsets in topic" in ended.talk) == (1, True)


def test_evict_prints_the_plan_and_wants_yes(metamq: Metamq, running: Cluster, topic: str, until: Until) -> None:
    with running.consumer(group=topic, topics=[topic], consumer_id="stuck"):
        until(lambda: metamq("group", "describe", topic, "-o", "json").json[0]["partitions"][0]["owner"] == "stuck")
        shown = metamq("group", "evict", topic, "stuck")
        assert shown.status == 1
        assert f"Evict stuck from group {topic}: process {os.getpid()} on " in shown.talk
        assert f"stuck owns {topic}/0-0." in shown.talk
        done = metamq("group", "evict", topic, "stuck", "--yes", "-o", "json")
        assert done.json == {"group": topic, "member": "stuck", "partitions": [f"{topic}/0-0"]}
        assert metamq("group", "describe", topic, "-o", "json").json[0]["members"] == []
        again = metamq("group", "evict", topic, "stuck", "--yes")
        assert (again.status, again.data) == (1, b"")
        assert "has no member 'stuck'" in again.talk


def test_a_group_is_deleted(metamq: Metamq, topic: str) -> None:
    metamq("produce", topic, "a")
    metamq("consume", topic, "-g", topic, "-e")
    assert "Delete group" in metamq("group", "delete", topic).talk
    deleted = metamq("group", "delete", topic, "--yes", "-o", "json")
    assert (deleted.status, deleted.json) == (0, [{"group": topic, "committed_offsets": 1}])
    ended = metamq("group", "describe", topic)
    assert ended.status == 1
    assert f"there is no group {topic!r}" in ended.talk
