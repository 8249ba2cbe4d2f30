"""A file of a log in a version that this release does not know is made again from the log, or refused.

A newer release raises the version of the data folder, and with that no older broker starts. So this is about a file
that came from elsewhere.
"""

from __future__ import annotations

from types import ModuleType

import pytest

from metamq.broker.log.disk import epochs, flushed, index, producers
from metamq.errors import CorruptData
from tests.broker.log.conftest import Shelf

VALUES = [b"value %d" % number for number in range(200)]


def write(shelf: Shelf, monkeypatch: pytest.MonkeyPatch, module: ModuleType, *, clean: bool) -> None:
    """Writes a log whose files of this kind have the next version."""
    with monkeypatch.context() as newer:
        newer.setattr(module, "VERSION", module.VERSION + 1)
        log = shelf.open()
        for number, value in enumerate(VALUES):
            shelf.append(log, [value], producer_id=7, sequence=number)
        shelf.checkpoint(log)
        shelf.flush(log)
        log.close(clean=clean)


@pytest.mark.parametrize("module", [epochs, index, producers], ids=lambda module: module.__name__.rpartition(".")[2])
@pytest.mark.parametrize("clean", [True, False])
def test_a_newer_file_is_made_again(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, module: ModuleType, clean: bool
) -> None:
    write(shelf, monkeypatch, module, clean=clean)
    lost: list[str] = []
    log = shelf.open(on_loss=lost.append)
    assert shelf.read_all(log) == VALUES
    assert lost == []
    _batch, repeat = shelf.batch([VALUES[-1]], producer_id=7, sequence=len(VALUES) - 1)
    assert getattr(log.check_producer(repeat), "base_offset", None) == len(VALUES) - 1
    assert [entry.epoch for entry in log.epochs().entries] == [1]
    shelf.append(log, [b"next"], producer_id=7, sequence=len(VALUES))
    assert shelf.read_all(log) == [*VALUES, b"next"]
    log.close(clean=True)


@pytest.mark.parametrize("clean", [True, False])
def test_a_newer_record_of_the_flushed_end_is_refused(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, clean: bool
) -> None:
    """Without it a torn tail and damage look the same."""
    write(shelf, monkeypatch, flushed, clean=clean)
    before = shelf.contents()
    with pytest.raises(CorruptData, match="flushed is damaged"):
        shelf.open()
    assert shelf.contents() == before
