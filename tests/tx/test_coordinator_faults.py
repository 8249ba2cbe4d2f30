"""Coordinator: what goes wrong behind its decision, or while it rolls back, is neither told wrongly nor left lying."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metamq import Producer
from metamq.errors import ConfigError, MetamqError, StorageError
from metamq.testing import Cluster
from metamq.tx import Coordinator, Xid
from tests.parts import wait_until
from tests.tx.databases import messages


class Resource:
    """What is called of it; `at` may raise then."""

    def __init__(self, at: Callable[[str], None] = lambda _call: None) -> None:
        self.calls: list[str] = []
        self.prepared: list[Xid] = []
        self._at = at
        self._began: Xid | None = None

    def _called(self, call: str) -> None:
        self.calls.append(call)
        self._at(call)

    def xid(self, format_id: int, gtrid: str, bqual: str) -> Xid:
        return Xid(format_id, gtrid.encode(), bqual.encode())

    def tpc_begin(self, xid: Xid) -> None:
        self._called("begin")
        self._began = xid

    def tpc_prepare(self) -> None:
        self._called("prepare")
        assert self._began is not None
        self.prepared.append(self._began)

    def tpc_commit(self, xid: Xid | None = None) -> None:
        self._called("commit")
        self._end(xid)

    def tpc_rollback(self, xid: Xid | None = None) -> None:
        self._called("rollback")
        self._end(xid)

    def _end(self, xid: Xid | None) -> None:
        self.prepared = [one for one in self.prepared if one != (xid or self._began)]

    def tpc_recover(self) -> list[Any]:
        found = list(self.prepared)
        self._called("recover")
        return found


def test_what_all_have_committed_is_no_error_when_the_log_cannot_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def full(call: str) -> None:
        if call == "commit":  # another thread's decision has failed meanwhile
            coordinator._log._broken(OSError(errno.ENOSPC, "No space left on device"))

    first, second = Resource(), Resource(full)
    with Coordinator(tmp_path, {"first": first, "second": second}) as coordinator:
        with caplog.at_level(logging.WARNING, "metamq.tx"), coordinator.begin() as tx:
            assert (tx["first"], tx["second"]) == (first, second)
        assert "committed everywhere" in caplog.text
        with pytest.raises(StorageError), coordinator.begin():
            pass
    assert first.calls == second.calls == ["recover", "begin", "prepare", "commit"]


@pytest.mark.parametrize("failing", ["in the block", "while it is prepared"])
def test_what_is_surely_not_decided_is_rolled_back(tmp_path: Path, failing: str) -> None:
    """Another thread's decision has failed meanwhile, and ended the log."""

    def fail(call: str) -> None:
        if call == "prepare" and failing == "while it is prepared":
            coordinator._log._broken(OSError(errno.EIO, "Input/output error"))

    first, second = Resource(), Resource(fail)
    with Coordinator(tmp_path, {"first": first, "second": second}) as coordinator:
        with pytest.raises(StorageError, match="Input/output error") as raised, coordinator.begin() as tx:  # noqa: PT012
            assert (tx["first"], tx["second"]) == (first, second)
            if failing == "in the block":
                coordinator._log._broken(OSError(errno.EIO, "Input/output error"))
        assert raised.value.outcome == "not_done"
    prepared = ["prepare"] if failing == "while it is prepared" else []
    assert first.calls == second.calls == ["recover", "begin", *prepared, "rollback"]


def test_a_coordinator_that_is_closed_leaves_its_successors_work_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its recovery hangs in a resource, knows nothing of what began since, and would roll that back."""
    monkeypatch.setattr("metamq.tx.database.coordinator.CLOSE_S", 0.1)
    is_slow, hangs, go_on = threading.Event(), threading.Event(), threading.Event()

    def hang(call: str) -> None:
        if call == "recover" and is_slow.is_set():
            hangs.set()
            assert go_on.wait(30)

    first, second, slow = Resource(), Resource(), Resource(hang)
    resources = {"slow": slow, "first": first, "second": second}
    closed = Coordinator(tmp_path, resources, recover_every_s=0.01)
    slow.prepared = [Xid(1, f"co-{closed._log.identity}-1".encode(), b"slow")]
    is_slow.set()
    closed._unfinished.set()
    assert hangs.wait(30)
    closed.close()
    assert "a resource does not answer" in caplog.text
    with pytest.raises(ConfigError, match="in use by another Coordinator"):
        Coordinator(tmp_path, resources)
    is_slow.clear()
    go_on.set()
    closed._thread.join(30)
    assert "rollback" not in slow.calls
    with Coordinator(tmp_path, resources) as successor:
        assert slow.calls[-2:] == ["recover", "rollback"]
        with successor.begin() as tx:
            assert (tx["first"], tx["second"]) == (first, second)
    assert first.calls[-3:] == second.calls[-3:] == ["begin", "prepare", "commit"]


def test_what_is_under_way_when_its_coordinator_is_closed_is_rolled_back(tmp_path: Path) -> None:
    """The folder may be another one's by then, which has found nothing decided."""

    def close(call: str) -> None:
        if call == "prepare":
            coordinator.close()

    first, second = Resource(), Resource(close)
    coordinator = Coordinator(tmp_path, {"first": first, "second": second})
    with pytest.raises(MetamqError, match="is closed") as raised, coordinator.begin() as tx:
        assert (tx["first"], tx["second"]) == (first, second)
    assert raised.value.outcome == "not_done"
    assert first.calls == second.calls == ["recover", "begin", "prepare", "rollback"]


@pytest.mark.parametrize("interrupted", ["commit", "rollback", "prepare"])
def test_control_c_leaves_no_thread_in_a_transaction(
    running: Cluster, topic: str, producer: Producer[bytes], tmp_path: Path, interrupted: str
) -> None:
    def interrupt(call: str) -> None:
        if call == interrupted and first.calls.count(call) == 1:
            raise KeyboardInterrupt

    first = Resource(interrupt)
    with Coordinator(tmp_path, {"first": first, "queue": producer}, recover_every_s=0.1) as coordinator:
        with pytest.raises(KeyboardInterrupt), coordinator.begin() as tx:  # noqa: PT012
            assert tx["first"] is first
            tx["queue"].send(topic, b"1")
            if interrupted == "rollback":
                raise ValueError
        producer.send(topic, b"2").result()
        with coordinator.begin() as tx:
            assert tx["first"] is first
            tx["queue"].send(topic, b"3")
        expected = [b"1", b"2", b"3"] if interrupted == "commit" else [b"2", b"3"]
        wait_until(lambda: messages(running, topic) == expected)
