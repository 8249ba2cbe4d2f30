"""Coordinator: what goes wrong behind its decision, or while it rolls back, is neither told wrongly nor left lying."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metamq import Producer
from metamq.errors import OutcomeUnknown
from metamq.testing import Cluster
from metamq.tx import Coordinator
from tests.parts import wait_until
from tests.tx.databases import messages


class Resource:
    """What is called of it; `at` may raise then."""

    def __init__(self, at: Callable[[str], None] = lambda _call: None) -> None:
        self.calls: list[str] = []
        self._at = at

    def _called(self, call: str) -> None:
        self.calls.append(call)
        self._at(call)

    def xid(self, format_id: int, gtrid: str, bqual: str) -> tuple[int, str, str]:
        return format_id, gtrid, bqual

    def tpc_begin(self, _xid: object) -> None:
        self._called("begin")

    def tpc_prepare(self) -> None:
        self._called("prepare")

    def tpc_commit(self, _xid: object = None) -> None:
        self._called("commit")

    def tpc_rollback(self, _xid: object = None) -> None:
        self._called("rollback")

    def tpc_recover(self) -> list[Any]:
        return []


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
        with pytest.raises(OutcomeUnknown), coordinator.begin() as tx:
            assert (tx["first"], tx["second"]) == (first, second)
    assert first.calls[:3] == second.calls[:3] == ["begin", "prepare", "commit"]


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
