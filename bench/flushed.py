"""The number of a broker's fsyncs, and the wait until it has flushed all messages."""

from __future__ import annotations

import time
import urllib.request

from metamq.testing import BrokerProcess

QUIET_S = 1.5
"""Logs are flushed within a second of an append, unless their topic says otherwise."""


def flushes(broker: BrokerProcess) -> float:
    """Returns the number of fsyncs since the broker's start."""
    with urllib.request.urlopen(f"http://127.0.0.1:{broker.http_port}/metrics") as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("metamq_disk_fsync_seconds_count"))


def until_flushed(broker: BrokerProcess) -> None:
    """Waits until the broker makes no more fsyncs.

    A thousand logs after a write are two thousand fsyncs, which belong to the measurement of that write.
    """
    before = -1.0
    while (now := flushes(broker)) != before:
        before = now
        time.sleep(QUIET_S)
