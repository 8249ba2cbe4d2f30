"""The settings of the workers: what is their own, what they share, and what does not fit."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metamq.broker.config import PROCESSES_MAX, BrokerConfig
from metamq.broker.workers.division import SHARED, divided, ids_of, too_many
from metamq.errors import ConfigError

OWN = {"id", "port", "data", "audit", "http_port", "processes"}


def workers(config: BrokerConfig) -> list[BrokerConfig]:
    return divided(config, [Path(f"d/broker-{one}") for one in ids_of(config)])


def test_each_worker_has_its_own_id_port_folder_and_audit_log() -> None:
    found = workers(BrokerConfig(id=4, processes=3, port=9000, audit="/log/audit.log", failover="auto"))
    assert [one.id for one in found] == [4, 5, 6]
    assert [one.port for one in found] == [9000, 9001, 9002]
    assert [one.data for one in found] == ["d/broker-4", "d/broker-5", "d/broker-6"]
    assert [one.audit for one in found] == ["/log/audit-4.log", "/log/audit-5.log", "/log/audit-6.log"]
    assert {(one.http_port, one.processes, one.failover) for one in found} == {(-1, 1, "auto")}


def test_free_ports_and_standard_error_stay() -> None:
    found = workers(BrokerConfig(processes=2, port=0, audit="-"))
    assert {(one.port, one.audit) for one in found} == {(0, "-")}


@given(st.integers(2, PROCESSES_MAX), st.integers(0, 1 << 40), st.integers(0, 1 << 20))
def test_shares_add_up_to_the_setting_or_are_the_least(processes: int, rate: int, files: int) -> None:
    config = BrokerConfig(processes=processes, scrub_bytes_per_s=rate, open_files_max=files)
    found = workers(config)
    for name, least in SHARED.items():
        whole, (share,) = getattr(config, name), {getattr(one, name) for one in found}
        assert share == least or share * processes <= whole
        assert bool(share) == bool(whole), "0 has a meaning of its own"
    same = {name for name, value in asdict(config).items() if all(getattr(one, name) == value for one in found)}
    assert set(asdict(config)) - same <= OWN | set(SHARED), "clients connect to each worker, so connections stay"


@pytest.mark.parametrize(
    ("settings", "problem", "step"),
    [
        ({"id": 65_533}, "needs broker ids up to 65,536, above 65,535", "lower --id"),
        ({"port": 65_533}, "needs ports up to 65,536, above 65,535", "lower --port"),
        ({"port": 8118}, "need the ports 8118 to 8121, and --http-port 8120 is one of them", "another --http-port"),
    ],
)
def test_what_does_not_fit_is_named(settings: dict[str, Any], problem: str, step: str) -> None:
    with pytest.raises(ConfigError, match=problem) as raised:
        ids_of(BrokerConfig(processes=4, **settings))
    assert step in raised.value.hint


def test_more_processes_than_cores_are_only_a_warning() -> None:
    assert too_many(4, 4) is None
    assert (too_many(4, 2) or "").startswith("4 processes share 2 cores")
