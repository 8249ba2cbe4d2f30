"""docs/journal-format.md: its examples are the bytes that a broker writes, and reads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from metamq.broker.data.partition import Partition
from metamq.broker.log.config import LogConfig
from metamq.broker.log.disk.files import FileCache
from metamq.broker.log.trim import TrimmedLog
from metamq.broker.transactions.journal import TOPIC, TOPIC_ID, read_journal
from metamq.tx.store.fold import JournalState
from metamq.tx.store.records import (
    _KINDS,
    Add,
    BodyPlace,
    BranchKey,
    Commit,
    Mark,
    Prepare,
    Record,
    Remembered,
    pack,
    pack_outcome,
    unpack,
)
from metamq.wire.batch import make_batch_id, read_header, stamp
from metamq.wire.columns import decode, encode
from metamq.wire.xa import Xid
from tests.hexdumps import bytes_of

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "journal-format.md"
SENT_US = 1357034400000000
BRANCH = BranchKey(Xid(0x4D51, b"order-17", b"mq"), (3 << 32) + 1)
PLACE = BodyPlace("orders", "0123456789abcdef", 0, 1)
RECORDS: dict[str, Record] = {
    "prepare": Prepare(BRANCH, 1, SENT_US + 300_000, ()),
    "commit": Commit(BRANCH, make_batch_id(3, 3), SENT_US + 400_000),
    "remembered": Remembered([pack_outcome(BRANCH, SENT_US + 400_000)]),
    "mark": Mark(5, 4, 1, [("orders", "0123456789abcdef", 0, 104)]),
}


def example(name: str) -> bytes:
    return bytes_of(DOCUMENT.read_text(), name)


def entry_of(values: list[bytes], lsn: int) -> bytes:
    entry = encode(values, base_timestamp_us=SENT_US)
    stamp(
        memoryview(entry), 0, epoch=3, base_offset=lsn, batch_id=make_batch_id(3, 1 + lsn),
        append_time_us=SENT_US + 250_000, unflushed_bytes=0,
    )  # fmt: skip
    return bytes(entry)


def test_a_whole_entry() -> None:
    body = bytes(encode([b"UA 1545"], base_timestamp_us=SENT_US))
    written = entry_of([pack([Add(BRANCH, 0, [PLACE], "shop", "etl")]), body], 0)
    assert written.hex(" ") == example("add").hex(" ")


def test_what_is_sent_and_committed_at_once() -> None:
    records = [Add(BRANCH, 0, [PLACE], "shop", "etl"), RECORDS["commit"]]
    assert pack(records).hex(" ") == example("add and commit").hex(" ")
    assert unpack(example("add and commit"), 1) == records


@pytest.mark.parametrize("name", RECORDS)
def test_records(name: str) -> None:
    assert pack([RECORDS[name]]).hex(" ") == example(name).hex(" ")
    assert unpack(example(name), 0) == [RECORDS[name]]


def test_an_add_without_a_principal_was_written_before_there_were_any() -> None:
    without = bytes([*b"\x91\x95", *pack([Add(BRANCH, 0, [PLACE], "shop")])[2:-1]])
    assert unpack(without, 1) == [Add(BRANCH, 0, [PLACE], "shop", "")]


def test_a_mark_that_leaves_something_out_is_none_to_who_does_not_know_that() -> None:
    mark = Mark(5, 4, 1, [], (("orders", "0123456789abcdef", 0),))
    packed = pack([mark])
    assert packed[:3].hex() == "91960d", "kind 13"
    assert unpack(packed, 0) == [mark]


def test_the_examples_make_a_journal(tmp_path: Path) -> None:
    log = TrimmedLog.open(tmp_path / "0", TOPIC, LogConfig(), FileCache(3), now_us=0)
    log.append_replicated(memoryview(example("add")), 0)
    for name in RECORDS:
        log.append_replicated(memoryview(entry_of([example(name)], log.end_offset)), log.end_position)
    entries = list(read_journal(Partition(TOPIC, TOPIC_ID, 0, log)))
    assert [entry.lsn for entry in entries] == [0, 2, 3, 4, 5]
    assert entries[0].sizes == [104]
    state = JournalState()
    for entry in entries[:3]:
        state.apply(entry)
    (committed,) = state.unmarked.values()
    batch = decode(memoryview(example("add")), read_header(example("add"))).values.tolist()[committed.bodies[0].number]
    assert decode(memoryview(batch), read_header(batch)).values.tolist() == [b"UA 1545"]
    for entry in entries[3:]:
        state.apply(entry)
    assert (state.branches, state.unmarked, state.mark) == ({}, {}, RECORDS["mark"])
    assert list(state.memory.items()) == [pack_outcome(BRANCH, SENT_US + 400_000)]
    log.close()


def test_the_table_of_records() -> None:
    rows = re.findall(r"^\| (\d+) \| ([A-Z]+) \| ([^|]*) \|", DOCUMENT.read_text(), re.MULTILINE)
    assert {int(kind): name for kind, name, _ in rows} == {
        kind: of.__name__.removesuffix("Record").upper() for kind, of in _KINDS.items()
    }
    for kind, _, fields in rows:
        assert len(fields.split(", ")) == len(_KINDS[int(kind)]._fields), fields
