"""What goes wrong again and again is told once, again when its reason changes, and when it is over."""

from __future__ import annotations

import logging

import pytest

from metamq.broker.trouble import Trouble
from metamq.errors import ConnectError, DiskFull


def test_a_reason_is_told_once_and_so_is_the_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "metamq.broker")
    trouble = Trouble()
    trouble.is_over("well")  # it never was otherwise
    refused, silent = ConnectError("a", "refused"), ConnectError("a", "silent")
    for error in (refused, refused, silent, DiskFull("/data", 1, 10), DiskFull("/data", 2, 10)):
        trouble.lasts("no link", error)
    trouble.is_over("well")
    trouble.is_over("well")
    trouble.lasts("no link", refused)
    said = [record.getMessage() for record in caplog.records]
    full = "no link: /data has 1 bytes free, the broker keeps 10 in reserve"
    assert [words.partition(". ")[0] for words in said] == [
        f"no link: {refused}".partition(". ")[0], f"no link: {silent}".partition(". ")[0], full, "well",
        f"no link: {refused}".partition(". ")[0],
    ]  # fmt: skip
