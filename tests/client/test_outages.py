"""Outages, by value: what is told of a broker that has another master meanwhile."""

from __future__ import annotations

import logging

import pytest

from metamq.client.net import outages
from metamq.client.net.outages import Outages
from metamq.errors import ConnectError
from metamq.zk.partitions import TopicPartition


def test_an_error_is_told_of_the_address_that_it_came_from(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["broker 0 at the first"]
    known = Outages(lambda _broker_id: names[-1], lambda _tp: False)
    monkeypatch.setattr(outages, "WARN_AFTER_S", 0.0)
    known.failed(TopicPartition("t", "0-0"), ConnectError("the first", "it is down"))
    names.append("broker 0 at the second")
    with caplog.at_level(logging.INFO, "metamq.client"):
        known.warn()
        assert "broker 0 at the first: 1 partition cannot be fetched at present" in caplog.text
        assert "at the second" not in str(known.error())
        known.ended(TopicPartition("t", "0-0"))
        assert known.began_at() is None
    assert "broker 0 at the second: all partitions can be fetched again" in caplog.text
