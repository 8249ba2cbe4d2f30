"""A log's list of epochs follows its batches, whatever becomes of the log and of the list's file."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metamq.broker.log.config import LogConfig
from metamq.broker.log.disk import derived
from metamq.broker.log.disk.epochs import EpochList
from metamq.broker.log.disk.flushed import FlushFile
from metamq.broker.log.partition_log import PartitionLog
from metamq.errors import CorruptData, Fenced
from metamq.wire.batch import HEADER_BYTES, read_header, walk
from tests.examples import examples

CONFIG = LogConfig(segment_bytes=700, index_interval_bytes=250, retention_bytes=2000)


def stored_epochs(shelf: Any, log: PartitionLog) -> EpochList:
    """The list as the bytes of the log have it, every batch of it."""
    epochs = EpochList()
    for segment in log.segments():
        data = memoryview(shelf.byte_at(segment.base_position)[0].read_bytes())
        for at, header in walk(data):
            epochs = epochs.add(header.epoch, header.base_offset, segment.base_position + at)
    return epochs


def fill(shelf: Any, log: PartitionLog, epochs: list[int]) -> None:
    for epoch in epochs:
        shelf.append(log, [b"value"] * 2, epoch=epoch)


Operation = st.one_of(
    st.tuples(st.just("append"), st.sampled_from([0, 0, 0, 1, 2])),
    st.tuples(st.just("append"), st.sampled_from([0, 0, 0, 1, 2])),
    st.tuples(st.just("flush"), st.just(0)),
    st.tuples(st.just("checkpoint"), st.just(0)),
    st.tuples(st.just("reopen"), st.integers(0, 1)),
    st.tuples(st.just("file"), st.integers(0, 3)),
    st.tuples(st.just("cut"), st.integers(0, 100)),
    st.tuples(st.just("tear"), st.integers(1, 400)),
    st.tuples(st.just("retain"), st.just(0)),
    st.tuples(st.just("look"), st.just(0)),
)


@settings(deadline=None, max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=st.lists(Operation, min_size=5, max_size=60))
def test_any_life_of_a_log_keeps_the_list(make_shelf: Any, operations: Any) -> None:
    """`file`: it is lost, damaged, or set back to what it was at some time before. `tear`: a crash takes the tail."""
    shelf = make_shelf()
    path = shelf.folder / "epochs"
    log = shelf.open(CONFIG)
    epoch, versions = 1, [b""]
    for name, argument in operations:
        if name == "append":
            epoch += argument
            shelf.append(log, [b"v" * 60], epoch=epoch)
        elif name == "flush":
            shelf.flush(log)
        elif name == "checkpoint":
            shelf.checkpoint(log)
        elif name == "reopen":
            log.close(clean=bool(argument))
            log = shelf.open(CONFIG)
            epoch += 1  # as every start of a broker does
        elif name == "file":
            log.close(clean=False)
            if argument == 0:
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(versions[argument % len(versions)])
            log = shelf.open(CONFIG)
            epoch += 1
        elif name == "cut":
            log.truncate(max(log.end_position - argument * log.size_bytes // 100, log.start_position))
            epoch += 1
        elif name == "tear":
            flushed = log.flushed_position
            log.close(clean=False)
            active = shelf.paths("log")[-1]
            base = int(active.stem.split("-")[1])
            size = active.stat().st_size
            with open(active, "r+b") as file:
                file.truncate(max(size - argument, flushed - base, 0))
            log = shelf.open(CONFIG)
            epoch += 1
        elif name == "retain":
            shelf.retain(log, 0)
        else:
            log.epochs()
        if path.exists() and path.read_bytes() not in versions:
            versions.append(path.read_bytes())
    found = log.epochs()
    if log.size_bytes:
        assert found == stored_epochs(shelf, log)
    log.close(clean=False)


@pytest.mark.parametrize("harm", ["missing", "damaged", "older", "newer", "of before a cut"])
def test_whatever_is_wrong_with_the_file_the_list_is_right(shelf: Any, harm: str) -> None:
    path, config = shelf.folder / "epochs", LogConfig(index_interval_bytes=250)
    log = shelf.open(config)
    fill(shelf, log, [1, 1, 2, 2])
    older, end = path.read_bytes(), log.end_position
    fill(shelf, log, [3, 3, 3])
    newer = path.read_bytes()
    if harm == "of before a cut":
        log.truncate(end)
        fill(shelf, log, [4, 4])
    log.close(clean=False)
    if harm == "missing":
        path.unlink()
    elif harm == "newer":  # the tail was torn
        with open(shelf.paths("log")[-1], "r+b") as file:
            file.truncate(end)
    else:
        path.write_bytes({"damaged": newer[:-1], "older": older, "of before a cut": newer}[harm])
    log = shelf.open(config)
    assert log.epochs() == stored_epochs(shelf, log)
    assert EpochList.from_bytes(path.read_bytes()) == log.epochs()
    log.close()


def test_a_log_tells_its_epochs_after_a_restart_without_reading_itself(shelf: Any, monkeypatch: Any) -> None:
    log = shelf.open(CONFIG)
    fill(shelf, log, [1, 1, 4, 4, 4, 9, 9, 9, 9, 9, 9])
    expected = stored_epochs(shelf, log)
    assert log.epochs() == expected
    assert [entry.epoch for entry in expected.entries] == [1, 4, 9]
    log.close()
    monkeypatch.setattr("metamq.broker.log.disk.derived.rebuild_epochs", None)
    log = shelf.open(CONFIG)
    assert log.epochs() == expected
    log.close()


def test_the_list_is_made_anew_from_few_headers(shelf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each segment; and a bisection, and an index interval, for each change inside of one."""
    config = LogConfig(segment_bytes=20_000, index_interval_bytes=500)
    log = shelf.open(config)
    for epoch in [1] * 900 + [2] * 400 + [3] * 3 + [5] * 500:
        shelf.append(log, [b"value"], epoch=epoch)
    expected = stored_epochs(shelf, log)
    segments = len(log.segments())
    assert segments > 8
    log.close()
    (shelf.folder / "epochs").unlink()
    read: list[int] = []
    headers = derived.headers

    def counted(files: Any, segment: Any, position: int, block_bytes: int) -> Any:
        for found in headers(files, segment, position, block_bytes):
            read.append(found[0])
            yield found

    monkeypatch.setattr(derived, "headers", counted)
    log = shelf.open(config)
    assert log.epochs() == expected
    assert len(read) < segments + 4 * 12
    assert EpochList.from_bytes((shelf.folder / "epochs").read_bytes()) == expected, "and saved"
    log.close()


def test_retention_moves_the_oldest_to_the_start(shelf: Any) -> None:
    log = shelf.open(CONFIG)
    fill(shelf, log, [1, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 7])
    assert shelf.retain(log, 0)
    expected = ((3, log.start_offset, log.start_position), log.epochs().entries[-1])
    assert log.epochs().entries == expected
    log.close()
    log = shelf.open(CONFIG)
    assert log.epochs().entries == expected
    log.close()


def test_an_emptied_log_still_tells_whose_batch_was_the_last(shelf: Any) -> None:
    config = LogConfig(segment_bytes=700, retention_ms=1)
    log = shelf.open(config)
    fill(shelf, log, [1, 3])
    shelf.retain(log, 10**12)
    assert log.size_bytes == 0
    for _ in range(2):
        assert log.epochs().entries == ((3, log.end_offset, log.end_position),)
        log.close()
        log = shelf.open(config)
    with pytest.raises(Fenced):
        fill(shelf, log, [2])
    fill(shelf, log, [5])
    assert log.epochs() == stored_epochs(shelf, log)
    log.close()


def test_a_former_master_appends_no_more(shelf: Any) -> None:
    log = shelf.open(CONFIG)
    fill(shelf, log, [4, 6])
    before = shelf.contents()
    for reopened in (False, True):
        if reopened:
            log.close(clean=False)
            log = shelf.open(CONFIG)
        with pytest.raises(Fenced, match="epoch 5 of flights/0-0 is not the master: the log already has batches"):
            fill(shelf, log, [5])
        assert shelf.contents() == before
        assert log.end_offset == 4
    fill(shelf, log, [6, 7])
    log.close()


def test_the_next_flush_makes_the_file_durable(shelf: Any, disk: Any) -> None:
    log = shelf.open(CONFIG, files=disk.files())
    fill(shelf, log, [1])
    disk.syncs = 0
    shelf.flush(log)
    assert disk.syncs == 4, "the segment, `flushed`, `epochs`, the folder"
    fill(shelf, log, [1])
    disk.syncs = 0
    shelf.flush(log)
    assert disk.syncs == 1, "the segment"
    fill(shelf, log, [2])
    disk.syncs = 0
    shelf.flush(log)
    assert disk.syncs == 4
    log.close()


def test_damage_where_the_list_is_looked_for_is_reported(shelf: Any) -> None:
    log = shelf.open(CONFIG)
    fill(shelf, log, [1, 2, 3])
    log.close()
    (shelf.folder / "epochs").unlink()
    shelf.damage(5)  # the first batch's epoch
    log = shelf.open(CONFIG)
    with pytest.raises(CorruptData, match="is damaged at byte 0: the broker's checksum does not match"):
        log.epochs()
    log.close(clean=False)


def own_epochs(shelf: Any) -> range:
    point = FlushFile(str(shelf.folder), shelf.files).load("flights/0-0")
    assert point is not None
    return point.own_epochs


def test_own_epochs_go_on_over_restarts_and_end_with_a_cut(shelf: Any) -> None:
    log = shelf.open(CONFIG)
    assert not own_epochs(shelf)
    fill(shelf, log, [3])
    assert own_epochs(shelf) == range(3, 4)
    log.close(clean=False)
    log = shelf.open(CONFIG)
    fill(shelf, log, [5])
    assert own_epochs(shelf) == range(3, 6)
    log.truncate(log.end_position - 8)
    assert not own_epochs(shelf)
    fill(shelf, log, [6])
    assert own_epochs(shelf) == range(6, 7)
    log.close(clean=False)
    shelf.damage(log.end_position - 8)
    log = shelf.open(CONFIG)
    assert log.recovery.cut_bytes
    assert not own_epochs(shelf)
    fill(shelf, log, [6])
    assert own_epochs(shelf) == range(6, 7)
    log.close()


def test_headers_are_found_again_after_those_that_are_larger_than_a_block(shelf: Any) -> None:
    config = LogConfig(segment_bytes=1 << 20, index_interval_bytes=100)
    log = shelf.open(config)
    for number, size in enumerate([10, 5000, 10, 70_000, 10, 10]):
        shelf.append(log, [b"v" * size], epoch=number + 1)
    expected = stored_epochs(shelf, log)
    log.close()
    (shelf.folder / "epochs").unlink()
    (shelf.paths("index")[0]).unlink()
    log = shelf.open(LogConfig(segment_bytes=1 << 20, index_interval_bytes=4 << 20))
    assert log.epochs() == expected
    assert read_header(log.read(0, 1).data).size > HEADER_BYTES
    log.close()
