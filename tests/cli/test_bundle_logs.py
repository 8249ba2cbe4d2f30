"""The logs in `metamq bundle`: the newest lines of metamq's own servers, and no other line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from metamq.cli.support.log_files import OwnLines, logs_here
from metamq.cli.support.parcel import Parcel
from metamq.cli.support.redaction import REMOVED, Redaction

SEED = "s3cr3t-Xq9"
STAMP = "2026-11-28 10:42:14,503"


@pytest.fixture
def secrets() -> Redaction:
    return Redaction()


@pytest.fixture
def parcel() -> Parcel:
    return Parcel("part")


TAKEN = [
    f"{STAMP} INFO metamq.broker: replica 0 is the master",
    f"{STAMP} WARNING metamq.broker.log: a line",
    f"{STAMP} ERROR broker 3 metamq.zk: of a worker",
    "[main] WARN org.apache.zookeeper.server.ServerCnxnFactory - maxCnxns is not configured",
    f"{STAMP} [myid:1] - ERROR [main:o.a.z.s.q.QuorumPeer@123] - Unexpected exception",
    "metamq: port 8123 is in use",
    "  Choose another --port.",
    "Terminating due to java.lang.OutOfMemoryError: Java heap space",
]
LEFT = [
    "",
    f"order of {SEED}",
    f"{STAMP} INFO shop: order of {SEED}",
    f"{STAMP} DEBUG metamq.broker: {SEED}",
    f"{STAMP} INFO metamq.client: the handler failed: {SEED}",
    f"{STAMP} INFO metamq.cli: {SEED}",
    f"{STAMP} INFO metamq.zk.kazoo: SetData(data=b'{SEED}')",
    f"{STAMP} INFO kazoo.client: SetData(data=b'{SEED}')",
    f"[main] INFO shop.Main - {SEED}",
    SEED,
    f"  {SEED}",
    f"ValueError: {SEED}",
    f"\tat {SEED}",
    '{"logger": "metamq.broker"',
    f'{{"level": "INFO", "logger": "shop", "message": "{SEED}"}}',
    f'{{"level": "DEBUG", "logger": "metamq.broker", "message": "{SEED}"}}',
    "{" * 100_000,
]


def test_only_lines_of_servers_are_taken(secrets: Redaction) -> None:
    lines = OwnLines(secrets, is_server=True)
    assert list(lines.of(one for pair in zip(LEFT, LEFT, strict=True) for one in pair)) == []
    assert lines.others == 2 * len(LEFT)
    assert list(OwnLines(secrets, is_server=True).of(TAKEN)) == TAKEN
    for line in LEFT:
        after = list(OwnLines(secrets, is_server=True).of([TAKEN[0], line]))
        assert SEED not in "\n".join(after), line


def test_last_words_are_those_of_a_server(secrets: Redaction) -> None:
    words = [f"metamq: line 3: `value` is a text, not {SEED}", f"  {SEED}"]
    assert list(OwnLines(secrets, is_server=False).of(words)) == []


@pytest.mark.parametrize(
    "before", ["Nov 28 10:35:59 host metamq[12]: ", "2026-11-28T10:35:59+0000 host metamq[12]: ", "broker-0-1  | "]
)
def test_the_begin_of_a_line_of_another_program_is_left_out(secrets: Redaction, before: str) -> None:
    assert list(OwnLines(secrets, is_server=False).of([before + TAKEN[0]])) == [TAKEN[0]]


TRACE = f"""\
Traceback (most recent call last):
  File "/x/broker.py", line 3, in f
    g(value)
    ~^^^^^^^
  File "/x/broker.py", line 9, in <module>
    raise ValueError(value)
ValueError: {SEED}
{SEED} in its second line

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/x/broker.py", line 3, in f
metamq.errors.CorruptData: the log is damaged
"""


def test_a_stack_trace_has_the_text_of_own_errors_only(secrets: Redaction) -> None:
    before, after = TRACE.split(f"{SEED} in its second line\n")
    wanted = before.replace(SEED, REMOVED).splitlines()
    assert list(OwnLines(secrets, is_server=False).of([TAKEN[0], *TRACE.splitlines()])) == [TAKEN[0], *wanted]
    whole = [TAKEN[0], *before.splitlines(), *after.splitlines()]
    assert list(OwnLines(secrets, is_server=False).of(whole)) == [one.replace(SEED, REMOVED) for one in whole]
    assert list(OwnLines(secrets, is_server=False).of(TRACE.splitlines())) == [], "it follows no entry"
    entry = {"time": "t", "level": "ERROR", "logger": "metamq.broker", "message": "m", "traceback": TRACE}
    (line,) = OwnLines(secrets, is_server=False).of([json.dumps(entry)])
    assert SEED not in line
    assert json.loads(line)["traceback"].splitlines() == wanted


def test_an_exception_of_zookeeper(secrets: Redaction) -> None:
    lines = [TAKEN[3], "java.net.BindException: Address already in use", "\tat java.base/sun.nio.ch.Net.bind0(Net)"]
    assert list(OwnLines(secrets, is_server=False).of(lines)) == lines


def test_the_newest_logs_within_the_size(secrets: Redaction, parcel: Parcel, tmp_path: Path) -> None:
    old, new = f"{STAMP} INFO metamq.broker: old\n" * 50, f"{STAMP} INFO metamq.broker: new\n" * 50
    (tmp_path / "zookeeper").mkdir()
    (tmp_path / "broker.log").write_text(new)
    (tmp_path / "zookeeper" / "zookeeper.log").write_text(old)
    (tmp_path / "broker.log.1").write_text(old)
    for number, name in enumerate(("zookeeper/zookeeper.log", "broker.log.1")):
        os.utime(tmp_path / name, (1000 - number, 1000 - number))
    os.symlink("broker.log", tmp_path / "again.log")
    os.mkfifo(tmp_path / "pipe.log")
    logs_here([tmp_path], len(new) + len(old) // 2, parcel, secrets)
    assert set(parcel.files) == {"logs/broker.log", "logs/zookeeper/zookeeper.log"} or set(parcel.files) == {
        "logs/again.log", "logs/zookeeper/zookeeper.log",
    }  # fmt: skip
    assert new in parcel.files.values()
    text = str(parcel.files["logs/zookeeper/zookeeper.log"])
    assert text.startswith("(the begin is left out)\n")
    assert text.count(" old\n") == 24
    assert parcel.problems == []


def test_segments_and_bytes_are_no_logs(secrets: Redaction, parcel: Parcel, tmp_path: Path) -> None:
    line = f"{STAMP} INFO metamq.broker: {SEED}\n"
    (tmp_path / f"{0:020}-{0:020}.log").write_text(line)
    (tmp_path / "renamed.log").write_bytes(b"\0\0\0\1" + line.encode())
    deep = tmp_path / "topics" / "orders@1"
    deep.mkdir(parents=True)
    (deep / "deep.log").write_text(line)
    logs_here([tmp_path], 1 << 20, parcel, secrets)
    assert parcel.files == {}


def test_a_folder_that_cannot_be_read_is_a_problem(secrets: Redaction, parcel: Parcel, tmp_path: Path) -> None:
    os.symlink("nowhere", tmp_path / "broken.log")
    logs_here([tmp_path, tmp_path / "missing"], 1 << 20, parcel, secrets)
    assert len(parcel.problems) == 2
    assert all("No such file" in problem for problem in parcel.problems)
