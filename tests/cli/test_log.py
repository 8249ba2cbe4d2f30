"""`metamq log`: files of a broker that has ended, sound and damaged; nothing is changed in any case."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from metamq.broker.log.disk.files import FileCache
from metamq.broker.log.disk.flushed import FlushFile
from metamq.cli.log_reader import find_partitions
from metamq.testing import Cluster
from metamq.wire.batch import HEADER_BYTES
from tests.one_zookeeper import cluster

JOURNAL = "~transactions/0-0"
"""Of every broker."""

Metamq = Callable[..., Any]

BATCHES = 12
MESSAGES = 5


@pytest.fixture(scope="module")
def written() -> Iterator[Path]:
    """The data folder of a broker that has stopped: one topic, two partitions, one of them with several segments."""
    with cluster() as running:
        running.create_topic("flights", partitions=2, segment_bytes=2000, flush="ack")
        with running.producer() as producer:
            for number in range(BATCHES):
                deliveries = [
                    producer.send("flights", b"%03d-%d" % (number, index) + b"." * 50, key=b"k", partition="0-1")
                    for index in range(MESSAGES)
                ]
                deliveries[-1].result(timeout=60)
        running.broker.stop()
        yield running.broker.data


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(written, tmp_path / "broker"))


def fingerprint(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        digest.update(f"{path.relative_to(folder)} {path.stat().st_mtime_ns}".encode())
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()


def segments(folder: Path) -> list[Path]:
    """The segments of partition 0-1, oldest first."""
    return sorted(find_partitions(folder)[1].path.glob("*.log"))


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_a_sound_log(offline: Metamq, folder: Path) -> None:
    before = fingerprint(folder)
    checked = offline("log", "verify", folder)
    assert (checked.status, checked.talk) == (0, "")
    reports = {report["name"]: report for report in offline("log", "verify", folder, "-o", "json").json}
    assert list(reports) == ["flights/0-0", "flights/0-1", JOURNAL]
    found = reports["flights/0-1"]
    assert len(found["segments"]) > 2
    assert sum(segment["messages"] for segment in found["segments"]) == BATCHES * MESSAGES
    assert found["segments"][-1]["end_offset"] == BATCHES * MESSAGES
    assert (found["findings"], found["notes"], found["is_damaged"]) == ([], [], False)
    assert fingerprint(folder) == before


def test_every_folder_above_a_partition_will_do(offline: Metamq, folder: Path) -> None:
    partition = find_partitions(folder)[1].path
    for place, names in (
        (partition, ["flights/0-1"]),
        (partition.parent, ["flights/0-0", "flights/0-1"]),
        (folder.parent, ["flights/0-0", "flights/0-1", JOURNAL]),  # as `metamq up --data` has it
    ):
        assert [report["name"] for report in offline("log", "verify", place, "-o", "json").json] == names
    ended = offline("log", "verify", folder / "topics")
    assert ended.status == 1
    assert "is not a data folder, and not the folder of a topic or a partition" in ended.talk


def test_of_several_replicas_folders_the_one_that_is_used_is_named(offline: Metamq, folder: Path) -> None:
    slave = Path(shutil.copytree(folder, folder.with_name("replica-1")))
    for command in (("verify", folder.parent), ("forget", folder.parent, "flights/0-1")):
        talk = offline("log", *command).talk
        assert f"The data folder is {folder}. The folder also has {slave}: to use another one, give its path." in talk
    assert offline("log", "verify", slave).talk == ""


def test_damage_is_shown_with_its_extent_and_what_follows_is_checked_too(offline: Metamq, folder: Path) -> None:
    first = segments(folder)[0]
    flip(first, HEADER_BYTES + 10)
    before = fingerprint(folder)
    checked = offline("log", "verify", folder, "-o", "json")
    assert checked.status == 1
    assert checked.talk == "1 of 3 partitions damaged.\n"
    found = checked.json[1]
    (finding,) = found["findings"]
    assert (finding["kind"], finding["position"], finding["path"]) == ("damage", 0, str(first))
    assert finding["reason"] == "the producer's checksum does not match"
    size = int.from_bytes(first.read_bytes()[:4], "little")
    assert finding["end_position"] == size
    assert sum(segment["batches"] for segment in found["segments"]) == BATCHES - 1
    text = offline("log", "verify", folder).text
    assert f"flights/0-1: damage at byte 0 ({first.name} at 0), {size:,} bytes: the producer's checksum" in text
    assert fingerprint(folder) == before


def test_a_torn_tail_is_no_damage(offline: Metamq, folder: Path) -> None:
    last = segments(folder)[-1]
    with last.open("ab") as file:
        file.write(b"\xff" * 120)
    checked = offline("log", "verify", folder, "-o", "json")
    assert checked.status == 0
    (finding,) = checked.json[1]["findings"]
    assert (finding["kind"], finding["end_position"] - finding["position"]) == ("torn tail", 120)


def test_missing_bytes_and_missing_files(offline: Metamq, folder: Path) -> None:
    *_, middle, last = segments(folder)
    middle.unlink()
    with last.open("r+b") as file:
        file.truncate(last.stat().st_size - 8)
    checked = offline("log", "verify", folder)
    assert checked.status == 1
    assert "the next one begins at" in checked.text
    assert "but ends before" in checked.text


def test_a_log_that_was_being_emptied_has_nothing_to_verify(offline: Metamq, folder: Path) -> None:
    partition = find_partitions(folder)[1]
    file = FlushFile(str(partition.path), FileCache())
    point = file.load(partition.name)
    assert point is not None
    file.write_both(point._replace(start_offset=3, start_position=1000, emptying=True))
    checked = offline("log", "verify", folder, "-o", "json")
    assert checked.status == 0
    found = checked.json[1]
    assert (found["segments"], found["findings"]) == ([], [])
    assert found["notes"] == ["the log is being emptied, and will begin at byte 1,000: no file counts"]


def test_what_can_be_made_anew_is_only_noted(offline: Metamq, folder: Path) -> None:
    index = next(find_partitions(folder)[1].path.glob("*.index"))
    flip(index, 40)
    epochs = find_partitions(folder)[1].path / "epochs"
    flip(epochs, 15)
    checked = offline("log", "verify", folder)
    assert checked.status == 0
    assert f"the index {index} is not usable; the broker rebuilds it" in checked.text
    assert f"the epochs {epochs} are not usable; the broker rebuilds them" in checked.text
    (find_partitions(folder)[1].path / "flushed").unlink()
    assert "it is unknown how far the log was flushed" in offline("log", "verify", folder).text


def test_dump(offline: Metamq, folder: Path) -> None:
    before = fingerprint(folder)
    place = find_partitions(folder)[1].path
    lines = offline("log", "dump", place).text.splitlines()
    assert lines[0] == "flights/0-1"
    assert lines[1].split() == ["POSITION", "SIZE", "OFFSET", "COUNT", "EPOCH", "CODEC", "APPENDED"]
    assert len(lines) == BATCHES + 2
    batches = [json.loads(line) for line in offline("log", "dump", place, "-o", "json").text.splitlines()]
    assert [batch["base_offset"] for batch in batches] == list(range(0, BATCHES * MESSAGES, MESSAGES))
    assert {batch["codec"] for batch in batches} == {"none"}
    messages = [
        json.loads(line) for line in offline("log", "dump", place, "--messages", "--from", 7, "-n", 2).text.splitlines()
    ]
    assert [message["offset"] for message in messages] == list(range(7, 15))
    assert messages[0]["value"].startswith("001-2...")
    assert (messages[0]["topic"], messages[0]["partition"], messages[0]["key"]) == ("flights", "0-1", "k")
    assert fingerprint(folder) == before


def test_dump_stops_at_damage(offline: Metamq, folder: Path) -> None:
    flip(segments(folder)[1], HEADER_BYTES + 10)
    ended = offline("log", "dump", find_partitions(folder)[1].path)
    assert ended.status == 1
    assert 1 < len(ended.text.splitlines()) < BATCHES
    assert "is damaged at byte" in ended.talk


def test_a_folder_in_use_is_read_with_a_warning(offline: Metamq, running: Cluster) -> None:
    running.create_topic("in-use", partitions=1)
    checked = offline("log", "verify", running.broker.data)
    assert checked.status == 0
    assert f"The data folder is in use by process {running.broker.pid}" in checked.talk
    assert running.broker.running
