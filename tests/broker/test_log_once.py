"""What goes wrong again and again is told once, again when its reason changes, and when it is over."""

from __future__ import annotations

import logging

import pytest

from metamq.broker.log_once import LogOnce
from metamq.errors import ConnectError, DiskFull


def test_a_reason_is_told_once_and_so_is_the_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "metamq.broker")
    log_once = LogOnce()
    log_once.worked("well")  # it never was otherwise
    refused, silent = ConnectError("a", "refused"), ConnectError("a", "silent")
    for error in (refused, refused, silent, DiskFull("/data", 1, 10), DiskFull("/data", 2, 10)):
        log_once.failed("no link", error)
    log_once.worked("well")
    log_once.worked("well")
    log_once.failed("no link", refused)
    said = [record.getMessage() for record in caplog.records]
    full = "no link: /data has 1 bytes free, the broker keeps 10 in reserve"
    assert [words.partition(". ")[0] for words in said] == [
        f"no link: {refused}".partition(". ")[0], f"no link: {silent}".partition(". ")[0], full, "well",
        f"no link: {refused}".partition(". ")[0],
    ]  # fmt: skip
