"""`metamq produce` and `metamq consume`: pipes in and out, and how they end."""

from __future__ import annotations

import base64
import json
import os
import random
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metamq import TopicPartition
from metamq.cli.messages.consume import Printer
from metamq.cli.messages.produce import InputSender
from metamq.cli.messages.ranges import PollingConsumer
from metamq.cli.processes import StopSignals
from metamq.cli.show.message_format import as_raw
from metamq.testing import Cluster
from tests.cli.conftest import but_for_closing
from tests.one_zookeeper import cluster

Metamq = Callable[..., Any]
Start = Callable[..., "subprocess.Popen[bytes]"]
Until = Callable[..., None]


def test_lines_go_in_and_come_out(metamq: Metamq, topic: str) -> None:
    sent = metamq("produce", topic, stdin=b"one\n\ntwo\r\nlast without newline")
    assert (sent.status, sent.data) == (0, b"")
    assert sent.talk.startswith(f"4 messages to {topic} in ")
    read = metamq("consume", topic, "-e")
    assert (read.status, read.data, read.talk) == (0, b"one\n\ntwo\r\nlast without newline\n", "")


def test_any_bytes_go_in_and_come_out(metamq: Metamq, topic: str, tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    content = random.Random(seed).randbytes(700_000) + b"\n"
    (tmp_path / "bytes").write_bytes(content)
    assert metamq("produce", topic, "--file", tmp_path / "bytes").status == 0
    assert metamq("consume", topic, "-e").data == content
    assert metamq("consume", topic, "-e", "-o", "raw").data == content.replace(b"\n", b"")


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_compressed(metamq: Metamq, topic: str, codec: str) -> None:
    assert metamq("produce", topic, "-z", codec, stdin=b"same\n" * 1000).status == 0
    assert metamq("consume", topic, "-e").data == b"same\n" * 1000


def test_keys_headers_and_partitions(metamq: Metamq, topic: str) -> None:
    metamq("produce", topic, "-K", ":", stdin=b"UA:one\nAA:with:colon\n")
    metamq("produce", topic, "-K", ":", stdin=b"no key\n")
    metamq("produce", topic, "-k", "k", "-H", "a=1", "-H", "b=x=y", "--partition", "0-0", "first", "second")
    read = metamq("consume", topic, "-e", "--format", r"%o %p [%k] %v {%h}\n").text
    assert read.splitlines() == [
        "0 0-0 [UA] one {}",
        "1 0-0 [AA] with:colon {}",
        "2 0-0 [] no key {}",
        "3 0-0 [k] first {a=1,b=x=y}",
        "4 0-0 [k] second {a=1,b=x=y}",
    ]


def test_a_summary_for_programs(metamq: Metamq, topic: str) -> None:
    sent = metamq("produce", topic, "a", "b", "-o", "json")
    assert sent.talk == ""
    assert sent.json.pop("seconds") >= 0
    stored = [{"partition": "0-0", "offset": 0, "messages": 2}]
    assert sent.json.items() >= {"topic": topic, "messages": 2}.items()
    assert sent.json["stored"] == stored


def test_what_cannot_be_sent_is_named(metamq: Metamq, topic: str) -> None:
    ended = metamq("produce", "nowhere", stdin=b"x\n")
    assert ended.status == 1
    assert "metamq: topic 'nowhere' does not exist\n" in ended.talk
    ended = metamq("produce", topic, stdin=b"fits\n" + b"x" * 2_000_000 + b"\nlater\n")
    assert ended.status == 1
    assert " of the input stored, then:\nmetamq: " in ended.talk
    assert "has 2,000,008 bytes, the limit is 1,048,576\n" in ended.talk
    assert metamq("consume", topic, "-e").data.startswith(b"fits\n")
    ended = metamq("produce", topic, stdin=b"x" * 5_000_000)
    assert ended.status == 1
    assert "metamq: line 1 has " in ended.talk
    ended = metamq("produce", topic, "x", "--partition", "0-7")
    assert ended.status == 1
    assert f"topic {topic!r} has no partition '0-7'" in ended.talk


@pytest.mark.parametrize(
    ("place", "read"),
    [
        ("earliest", [0, 1, 2, 3, 4]),
        ("latest", []),
        ("2", [2, 3, 4]),
        ("-2", [3, 4]),
        ("-99", [0, 1, 2, 3, 4]),
        ("99", []),
        ("@-1h", [0, 1, 2, 3, 4]),
        ("@2100-01-01", []),
    ],
)
def test_where_to_begin(metamq: Metamq, topic: str, place: str, read: list[int]) -> None:
    metamq("produce", topic, *map(str, range(5)))
    found = metamq("consume", topic, "--from", place, "-e")
    assert (found.status, found.text.split()) == (0, [str(number) for number in read])


def test_several_topics_and_a_count(metamq: Metamq, topic: str) -> None:
    metamq("topic", "create", f"{topic}-2", "-p", 3)
    metamq("produce", topic, "a")
    metamq("produce", f"{topic}-2", "b", "c")
    assert sorted(metamq("consume", topic, f"{topic}-2", "-e").text.split()) == ["a", "b", "c"]
    assert len(metamq("consume", topic, f"{topic}-2", "-n", 2).text.split()) == 2
    ended = metamq("consume", f"{topic}-3")
    assert (ended.status, ended.data) == (1, b"")
    assert "does not exist" in ended.talk


def test_topics_by_a_pattern(metamq: Metamq, topic: str) -> None:
    for name in (f"{topic}-a", f"{topic}-b"):
        metamq("topic", "create", name, "-p", 1)
        metamq("produce", name, name)
    assert sorted(metamq("consume", f"{topic}-*", "-e").text.split()) == [f"{topic}-a", f"{topic}-b"]
    ended = metamq("consume", f"{topic}-x*", "-e")
    assert (ended.status, f"no topic matches '{topic}-x*'" in ended.talk) == (1, True)


@pytest.mark.parametrize(
    ("start", "until", "read"),
    [
        ("earliest", "3", [0, 1, 2]),
        ("1", "3", [1, 2]),
        ("-3", "-1", [2, 3]),
        ("earliest", "latest", [0, 1, 2, 3, 4]),
        ("earliest", "-99", []),
        ("3", "@2001-09-09T01:46:41.5Z", []),
        ("earliest", "@2001-09-09T01:46:42Z", [0, 1]),
        ("@1000000001000000", "@2001-09-09T01:46:43Z", [1, 2]),
        ("@2001-09-09T01:46:43Z", "@2100-01-01", [3, 4]),
    ],
)
def test_a_range_ends_exactly_there(metamq: Metamq, topic: str, start: str, until: str, read: list[int]) -> None:
    lines = [f'{{"value": "{number}", "timestamp_us": {1_000_000_000 + number}000000}}\n' for number in range(5)]
    assert metamq("produce", topic, "--json", stdin="".join(lines).encode()).status == 0
    found = metamq("consume", topic, "--from", start, "--until", until)
    assert (found.status, found.text.split()) == (0, [str(number) for number in read])


def test_a_range_of_some_partitions(metamq: Metamq, topic: str) -> None:
    metamq("topic", "alter", topic, "-p", 3)
    for partition in ("0-0", "0-1", "0-2"):
        metamq("produce", topic, "-p", partition, *(f"{partition}:{number}" for number in range(4)))
    read = metamq("consume", topic, "-p", "0-0", "--partition", "0-2", "--from", 1, "--until", 3).text.split()
    assert sorted(read) == ["0-0:1", "0-0:2", "0-2:1", "0-2:2"]
    assert metamq("consume", topic, "-p", "0-1", "-n", 2).text.split() == ["0-1:0", "0-1:1"]
    ended = metamq("consume", topic, "-p", "0-7", "-e")
    assert ended.status == 1
    assert f"topic {topic!r} has no partition '0-7'" in ended.talk


def test_an_end_beyond_the_present_one_is_not_waited_for_with_exit(metamq: Metamq, topic: str) -> None:
    metamq("produce", topic, *map(str, range(3)))
    assert metamq("consume", topic, "-e", "--until", 9, "--from", 1).text.split() == ["1", "2"]
    assert metamq("consume", topic, "-e", "--until", 2).text.split() == ["0", "1"]


def test_an_end_that_does_not_exist_yet_is_waited_for(process: Start, metamq: Metamq, topic: str) -> None:
    metamq("produce", topic, "a")
    child = process("consume", topic, "--until", 3)
    assert child.stdout is not None
    assert child.stdout.readline() == b"a\n"
    metamq("produce", topic, "b", "c", "d")
    rest, _talk = child.communicate(timeout=90)
    assert (child.returncode, rest) == (0, b"b\nc\n")


def test_a_start_that_does_not_exist_yet_is_waited_for(process: Start, metamq: Metamq, topic: str) -> None:
    metamq("produce", topic, "a")
    child = process("consume", topic, "--from", 3, "-n", 1)
    metamq("produce", topic, "b", "c", "d", "e")
    printed, _talk = child.communicate(timeout=90)
    assert (child.returncode, printed) == (0, b"d\n")


@pytest.mark.slow
def test_a_start_that_retention_has_removed_is_reported(offline: Metamq, until: Until) -> None:
    with cluster(retention_check_s=0.1) as running:
        running.create_topic("t", partitions=1, segment_bytes=3000, retention_bytes=3000)
        with running.producer() as producer, running.admin() as admin:
            for number in range(40):
                producer.send("t", b"%d" % number * 100).result(60)
            until(lambda: (admin.describe_topic("t").partitions[0].start_offset or 0) > 1)
        ended = offline("consume", "t", "--from", 1, "-e", "--zookeeper", running.zookeeper)
    assert ended.status == 0
    assert "t/0-0 begins at offset" in ended.talk


def test_offsets_are_kept_only_for_a_report_that_has_them(running: Cluster, topic: str) -> None:
    with running.producer() as producer:
        for kept in (False, True):
            sender = InputSender(producer, topic, None, None, None, None, notes_places=kept)
            sender.send([b"a", b"b"])
            sender.finish()
            assert bool(sender._places) == kept


def test_a_printed_time_is_a_place(metamq: Metamq, topic: str) -> None:
    metamq("produce", topic, "a")
    metamq("produce", topic, "b")
    for form in ("%T", "%T{local}", "%T{us}"):
        times = metamq("consume", topic, "-e", "--format", f"{form}\\n").text.split()
        assert metamq("consume", topic, "-e", "--from", f"@{times[1]}").text == "b\n"
        assert metamq("consume", topic, "--until", f"@{times[1]}").text == "a\n"


def test_only_what_matches_is_printed_and_counted(metamq: Metamq, topic: str) -> None:
    lines = [{"key": f"k{n % 2}", "value": f'{{"n": {n}}}', "headers": {"h": str(n % 3)}} for n in range(12)]
    metamq("produce", topic, "--json", stdin="\n".join(map(json.dumps, lines)).encode())

    def read(*options: object) -> list[int]:
        return [json.loads(line)["n"] for line in metamq("consume", topic, "-e", *options).text.splitlines()]

    assert read("--key", "*1") == [1, 3, 5, 7, 9, 11]
    assert read("--header", "h=2") == [2, 5, 8, 11]
    assert read("--where", ".n >= 3", "--where", ".n < 6") == [3, 4, 5]
    assert read("--key", "k0", "--header", "h=0", "-n", 1) == [0]
    assert read("--where", ".n ~ x") == []


def test_a_replay_has_the_same_bytes(metamq: Metamq, topic: str) -> None:
    copy = f"{topic}-copy"
    for name in (copy, topic):
        metamq("topic", "alter" if name == topic else "create", name, "-p", 3)
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    lines = []
    for number in range(300):
        headers = {f"h{chance.randrange(5)}": base64.b64encode(chance.randbytes(4)).decode() for _ in range(3)}
        lines.append({
            "key_base64": chance.choice([None, "", base64.b64encode(chance.randbytes(5)).decode()]),
            "value_base64": base64.b64encode(chance.randbytes(chance.randrange(20))).decode(),
            "headers_base64": headers, "timestamp_us": chance.randrange(1 << 50), "partition": f"0-{number % 3}",
        })  # fmt: skip
    assert metamq("produce", topic, "-j", stdin="\n".join(map(json.dumps, lines)).encode()).status == 0
    printed = metamq("consume", topic, "-e", "-o", "json").data
    assert printed.count(b"\n") == 300
    replayed = metamq("produce", copy, "--json", stdin=printed)
    assert (replayed.status, replayed.talk.startswith("300 messages to ")) == (0, True)
    again = metamq("consume", copy, "-e", "-o", "json").data.replace(copy.encode(), topic.encode())
    assert sorted(again.splitlines()) == sorted(printed.splitlines())


def test_a_record_that_is_wrong_is_named(metamq: Metamq, topic: str) -> None:
    ended = metamq("produce", topic, "--json", stdin=b'{"value": "a"}\n\n{"valeu": "b"}\n')
    assert ended.status == 1
    assert "1 message of the input stored, then:\nmetamq: line 3: unknown field 'valeu'\n  Did you" in ended.talk
    assert metamq("consume", topic, "-e").text == "a\n"
    ended = metamq("produce", topic, "--json", stdin=b'{"value": "a", "partition": "0-9"}\n')
    assert f"topic {topic!r} has no partition '0-9'" in ended.talk
    assert metamq("produce", topic, "--json", "-p", "0-0", stdin=b'{"value": "a", "partition": "0-9"}').status == 0


def test_delimiters(metamq: Metamq, topic: str) -> None:
    metamq("produce", topic, "-D", r"\0", "-K", r"\t", stdin=b"k\ta\nb\0c\0")
    assert metamq("consume", topic, "-e", "--format", r"[%k] %v{hex}\n").text == "[k] 610a62\n[] 63\n"


def test_what_was_stored_is_printed_on_demand(metamq: Metamq, topic: str) -> None:
    metamq("topic", "alter", topic, "-p", 2)
    for partition, number in (("0-1", 2), ("0-0", 1), ("0-1", 3)):
        sent = metamq("produce", topic, "-p", partition, *map(str, range(number)), "-o", "json").json
    assert sent["stored"] == [{"partition": "0-1", "offset": 2, "messages": 3}]
    lines = b"".join(b'{"value": "", "partition": "0-%d"}\n' % (number % 2) for number in range(6))
    sent = metamq("produce", topic, "--json", "-o", "json", stdin=lines).json
    assert sent["stored"] == [
        {"partition": "0-0", "offset": 1, "messages": 3},
        {"partition": "0-1", "offset": 5, "messages": 3},
    ]


def test_a_topic_that_is_deleted_meanwhile_has_no_end_to_wait_for(
    running: Cluster, metamq: Metamq, topic: str, until: Until, capfd: pytest.CaptureFixture[str]
) -> None:
    ends = {TopicPartition(topic, "0-0"): 5}
    with PollingConsumer(running.zookeeper, topics=topic, idle_timeout_s=0.05) as consumer, StopSignals() as signals:
        assert metamq("topic", "delete", topic, "--yes").status == 0
        until(lambda: not consumer.assignment)
        Printer(consumer, as_raw, signals, commits=False, count=None, ends=ends).run()
    assert capfd.readouterr().out == ""


def test_a_group_goes_on_where_it_stopped(metamq: Metamq, topic: str) -> None:
    metamq("produce", topic, *map(str, range(10)))
    assert metamq("consume", topic, "-g", topic, "-n", 3).text.split() == ["0", "1", "2"]
    assert metamq("consume", topic, "-g", topic, "-n", 4).text.split() == ["3", "4", "5", "6"]
    assert metamq("consume", topic, "-g", topic, "-e").text.split() == ["7", "8", "9"]
    ended = metamq("consume", topic, "-g", topic, "-e")
    assert (ended.status, ended.data) == (0, b"")


@pytest.mark.slow
def test_all_is_printed_after_a_member_that_was_killed(process: Start, metamq: Metamq, topic: str) -> None:
    """The plan gives it a share until its session ends. What it has committed it had printed, all of it perhaps."""
    metamq("produce", topic, *map(str, range(10)))
    child = process("consume", topic, "-g", topic, env={"METAMQ_CONSUMER_SESSION_TIMEOUT_MS": "6000"})
    assert child.stdout is not None
    assert child.stdout.readline() == b"0\n"
    child.kill()
    before = ["0", *child.stdout.read().decode().split()]
    printed = metamq("consume", topic, "-g", topic, "-e").text.split()
    everything = [str(number) for number in range(10)]
    assert printed == everything[10 - len(printed) :]
    assert {*before, *printed} == {*everything}


@pytest.mark.slow
def test_ctrl_c_ends_a_consumer_with_0_and_its_group_has_what_was_printed(
    process: Start, metamq: Metamq, topic: str
) -> None:
    metamq("produce", topic, "a", "b")
    for number in (signal.SIGINT, signal.SIGTERM):
        child = process("consume", topic, "-g", f"{topic}-{number.name}")
        assert child.stdout is not None
        assert child.stdout.readline() + child.stdout.readline() == b"a\nb\n"
        child.send_signal(number)
        rest, talk = child.communicate(timeout=90)
        assert (child.returncode, rest, but_for_closing(talk)) == (0, b"", b"")
        found = metamq("group", "describe", f"{topic}-{number.name}", "-o", "json").json[0]
        assert (found["partitions"][0]["committed"], found["members"]) == (2, [])


def test_messages_come_out_as_they_come_in(process: Start, metamq: Metamq, topic: str, until: Until) -> None:
    reader = process("consume", topic, "-o", "json")
    writer = process("produce", topic)
    assert reader.stdout is not None
    assert writer.stdin is not None
    for number in range(3):
        writer.stdin.write(b"%d\n" % number)
        writer.stdin.flush()
        assert f'"value": "{number}"'.encode() in reader.stdout.readline()
    writer.send_signal(signal.SIGINT)
    _, talk = writer.communicate(timeout=90)
    assert writer.returncode == 130
    assert talk.startswith(b"Storing the messages that were read. Ctrl-C again gives up.\n3 messages to ")
    reader.send_signal(signal.SIGINT)
    assert reader.wait(60) == 0


@pytest.mark.parametrize("output", ["text", "json"])
def test_a_reader_that_leaves_ends_a_consumer_that_has_nothing_to_write(
    process: Start, metamq: Metamq, topic: str, output: str
) -> None:
    """As `metamq consume topic | head -1` does."""
    metamq("produce", topic, "only one")
    reader, writer = os.pipe()
    child = process("consume", topic, "-o", output, stdout=writer)
    os.close(writer)
    with open(reader, "rb") as pipe:
        assert b"only one" in pipe.readline()
    _, talk = child.communicate(timeout=90)
    assert (child.returncode, but_for_closing(talk)) == (0, b"")


def test_a_member_that_is_evicted_says_so_once(process: Start, metamq: Metamq, topic: str, until: Until) -> None:
    metamq("produce", topic, "a")
    child = process("consume", topic, "-g", topic)
    assert child.stdout is not None
    assert child.stdout.readline() == b"a\n"
    (member,) = metamq("group", "describe", topic, "-o", "json").json[0]["members"]
    assert metamq("group", "evict", topic, member["consumer_id"], "--yes").status == 0
    _, talk = child.communicate(timeout=90)
    assert child.returncode == 1
    said = f"metamq: this consumer is closed: {member['consumer_id']!r} was evicted from group {topic!r}\n"
    assert but_for_closing(talk).decode() == f"{said}  Make a new one.\n"


def test_a_reader_that_leaves_early_commits_no_more_than_it_got(process: Start, metamq: Metamq, topic: str) -> None:
    """What lay in the pipe when its reader left may have been committed; nothing that was never written is."""
    metamq("produce", topic, stdin=b"x" * 99 + b"\n" + (b"y" * 99 + b"\n") * 20_000)
    reader, writer = os.pipe()
    child = process("consume", topic, "-g", topic, stdout=writer)
    os.close(writer)
    with open(reader, "rb") as pipe:
        assert pipe.read(100) == b"x" * 99 + b"\n"
    assert child.wait(60) == 0
    committed = metamq("group", "describe", topic, "-o", "json").json[0]["partitions"][0]["committed"]
    assert committed is None or committed < 20_001


def test_a_group_takes_no_filter(offline: Metamq) -> None:
    for options in (("--key", "x"), ("--header", "a"), ("--where", ".a == 1")):
        ended = offline("consume", "t", "--group", "g", *options)
        assert (ended.status, "would commit the messages that the filters leave out" in ended.talk) == (2, True)
