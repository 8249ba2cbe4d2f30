"""How often a broker has fsynced, and the wait until it has flushed what it was sent."""

from __future__ import annotations

import time
import urllib.request

from metamq.testing import BrokerProcess

QUIET_S = 1.5
"""Logs are flushed within a second of an append, unless their topic says otherwise."""


def flushes(broker: BrokerProcess) -> float:
    """How many fsyncs the broker has made since its start."""
    with urllib.request.urlopen(f"http://127.0.0.1:{broker.http_port}/metrics") as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("metamq_disk_fsync_seconds_count"))


def until_flushed(broker: BrokerProcess) -> None:
    """Returns once the broker fsyncs no more: a thousand logs that were just written to are two thousand fsyncs, which
    belong to the producing of them."""
    before = -1.0
    while (now := flushes(broker)) != before:
        before = now
        time.sleep(QUIET_S)
