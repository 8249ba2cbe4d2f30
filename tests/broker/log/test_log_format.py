"""docs/log-format.md: its examples are the bytes that the broker writes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from metamq.broker.log.config import LogConfig
from metamq.broker.log.disk.flushed import SLOT_BYTES
from metamq.wire.batch import BROKER_PART, PRODUCER_PART, make_batch_id, read_header
from metamq.wire.columns import decode
from tests.hexdumps import bytes_of

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "log-format.md"
SENT_US = 1357034400000000


def example(name: str) -> bytes:
    return bytes_of(DOCUMENT.read_text(), name)


def write_the_example(shelf: Any) -> None:
    log = shelf.open(LogConfig())
    batch, header = shelf.batch([b"UA 1545", b"AA 1141"], base_timestamp_us=SENT_US, producer_id=7)
    log.append(batch, [header], epoch=3, batch_id=make_batch_id(3, 1), now_us=SENT_US + 250_000)
    shelf.checkpoint(log)
    log.close(clean=False)


@pytest.mark.parametrize("suffix", ["log", "index", "producers"])
def test_files(shelf: Any, suffix: str) -> None:
    write_the_example(shelf)
    (path,) = shelf.paths(suffix)
    assert path.read_bytes().hex(" ") == example(suffix).hex(" ")


def test_epochs(shelf: Any) -> None:
    write_the_example(shelf)
    assert (shelf.folder / "epochs").read_bytes().hex(" ") == example("epochs").hex(" ")


def test_flushed(shelf: Any) -> None:
    write_the_example(shelf)
    data = (shelf.folder / "flushed").read_bytes()
    slot = example("flushed")
    newest = data[SLOT_BYTES:]
    assert newest[: len(slot)].hex(" ") == slot.hex(" ")
    assert len(newest) == SLOT_BYTES
    assert not any(newest[len(slot) :])


def test_the_files_of_the_document_make_a_log(shelf: Any) -> None:
    shelf.folder.mkdir()
    stem = f"{0:020d}-{0:020d}"
    (shelf.folder / f"{stem}.log").write_bytes(example("log"))
    (shelf.folder / f"{stem}.index").write_bytes(example("index"))
    (shelf.folder / f"{2:020d}-{120:020d}.producers").write_bytes(example("producers"))
    (shelf.folder / "epochs").write_bytes(example("epochs"))
    (shelf.folder / "flushed").write_bytes(example("flushed"))
    log = shelf.open()
    assert log.recovery.scanned_bytes == 0
    piece = log.read(1, 1000)
    assert decode(memoryview(piece.data), read_header(piece.data)).values.tolist() == [b"UA 1545", b"AA 1141"]
    assert shelf.offset_at_time(log, SENT_US) == (0, SENT_US)
    assert log.epochs().entries == ((3, 0, 0),)
    log.close()


def test_the_table_of_fields() -> None:
    rows = re.findall(r"^\| (\d+) \| ([ui])(\d+) \|", DOCUMENT.read_text(), re.MULTILINE)
    at = 0
    for byte, _sign, bits in rows:
        assert int(byte) == at
        at += int(bits) // 8
    assert at == BROKER_PART.size + PRODUCER_PART.size + 8
    letters = {("u", "8"): "B", ("u", "16"): "H", ("u", "32"): "I", ("u", "64"): "Q", ("i", "64"): "q"}
    types = "".join(letters[sign, bits] for _byte, sign, bits in rows)
    assert types == BROKER_PART.format[1:] + "I" + PRODUCER_PART.format[1:] + "I"
