"""Quotas: what a meter lets through, and what clients of a real broker notice."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metamq import Consumer, Producer, SecurityConfig
from metamq.client.net.blocking_connection import BlockingConnection
from metamq.errors import ConfigError, CorruptData, DeliveryTimeout, NotAuthorized, Timeout
from metamq.security.certificates import Authority
from metamq.security.quotas import (
    BURST_S,
    METERS_KEPT,
    NO_QUOTA,
    QUOTAS_MAX,
    READ_BYTES,
    REQUESTS,
    WAIT_LEAST_S,
    WRITE_BYTES,
    Meter,
    Meters,
    Quota,
    QuotaWait,
    check_quota,
    quota_of,
)
from metamq.security.tls import client_security
from metamq.testing import Cluster
from metamq.wire.commands import LATEST, Command, OffsetsEntry
from metamq.zk.security.quotas import QUOTAS, with_quota, without_quota
from tests.parts import SLOW_S, http_get, wait_until
from tests.security.raw_client import RawClient

MB = 1_000_000
WATCHER = "watcher"
PAST_S = 1_000.0
NOTHING = QuotaWait(0.0, "", 0)


@given(
    per_second=st.integers(1, 10_000),
    amounts=st.lists(st.tuples(st.integers(0, 5_000), st.floats(0, 2)), min_size=1, max_size=100),
)
def test_in_any_time_no_more_than_the_quota_is_used_and_all_of_it_can_be(
    per_second: int, amounts: list[tuple[int, float]]
) -> None:
    meter, now_s, used, waited_s = Meter(Quota(write_bytes_s=per_second)), PAST_S, 0, 0.0
    taken: list[tuple[float, int]] = []
    for amount, pause_s in amounts:
        now_s += pause_s
        while (wait := meter.wait(now_s)) is not None:
            assert wait.limit == "write_bytes_s"
            waited_s += wait.wait_s
            now_s += wait.wait_s
        meter.take(WRITE_BYTES, amount, now_s)
        used += amount
        taken.append((now_s, amount))
    for first, (from_s, _amount) in enumerate(taken):
        in_window = 0
        for to_s, amount in taken[first:]:
            in_window += amount
            limit = per_second * (to_s - from_s + BURST_S + WAIT_LEAST_S) + amount
            assert in_window <= limit * (1 + 1e-6) + 1e-3
    if waited_s:  # it waited for nothing that was not used
        assert waited_s <= used / per_second


def test_the_limits_are_measured_apart_and_the_longest_wait_is_named() -> None:
    meter = Meter(Quota(write_bytes_s=100, read_bytes_s=100, requests_s=10))
    meter.take(WRITE_BYTES, 300, PAST_S)
    meter.take(READ_BYTES, 500, PAST_S)
    meter.take(REQUESTS, 10, PAST_S)
    wait = meter.wait(PAST_S)
    assert wait is not None
    assert (wait.limit, wait.per_second) == ("read_bytes_s", 100)
    assert wait.wait_s == pytest.approx(4.0)
    assert meter.wait(PAST_S + 4.0) is None


def test_a_new_quota_counts_for_what_was_used_before() -> None:
    meters = Meters()
    small, large = {"etl": Quota(write_bytes_s=10)}, {"etl": Quota(write_bytes_s=10, requests_s=5)}
    meter = meters.find("etl", small, PAST_S)
    assert meter is not None
    meter.take(WRITE_BYTES, 100, PAST_S)
    assert meters.find("etl", large, PAST_S) is meter
    assert meter.wait(PAST_S) is not None
    assert meters.find("etl", {}, PAST_S) is None


def test_a_quota_that_is_corrected_counts_at_once() -> None:
    meters, typo, right = Meters(), {"etl": Quota(write_bytes_s=10)}, {"etl": Quota(write_bytes_s=10 * MB)}
    meter = meters.find("etl", typo, PAST_S)
    assert meter is not None
    meter.take(WRITE_BYTES, MB, PAST_S)
    assert meter.wait(PAST_S) is not None
    assert meters.find("etl", right, PAST_S) is meter
    assert (meter.wait(PAST_S) or NOTHING).wait_s < 0.2, "1 MB at 10 MB/s"
    meter.take(WRITE_BYTES, 100 * MB, PAST_S)
    assert meters.find("etl", {}, PAST_S) is None
    again = meters.find("etl", right, PAST_S)
    assert again is not None
    assert again.wait(PAST_S) is None, "it was removed in between"


def test_open_connections_keep_one_meter() -> None:
    meters, quotas = Meters(), {"*": Quota(requests_s=1)}
    kept = meters.find("etl", quotas, PAST_S)
    for number in range(3 * METERS_KEPT):
        meters.find(f"p-{number}", quotas, PAST_S)
    assert meters.find("etl", quotas, PAST_S) is kept


def test_who_connects_again_still_has_to_pay_and_meters_are_forgotten_when_nothing_is_to_pay() -> None:
    meters, quotas = Meters(), {"*": Quota(requests_s=1)}
    busy = meters.find("busy", quotas, PAST_S)
    assert busy is not None
    busy.take(REQUESTS, 10_000, PAST_S)
    for number in range(2 * METERS_KEPT):
        assert meters.find(f"p-{number}", quotas, PAST_S) is not None
    assert len(meters._meters) <= METERS_KEPT + 1
    assert meters.find("busy", quotas, PAST_S) is busy


def test_whose_quota_counts() -> None:
    own, common = Quota(requests_s=5), Quota(requests_s=1)
    quotas = {"etl": own, "*": common}
    assert quota_of(quotas, "etl") == own
    assert quota_of(quotas, "other") == common
    assert quota_of({"etl": own}, "other") == NO_QUOTA
    assert {quota_of(quotas, name) for name in ("admin", "brokers", "")} == {NO_QUOTA}


@pytest.mark.parametrize(
    ("principal", "quota", "words"),
    [
        ("admin", Quota(requests_s=1), "'admin' never has a quota"),
        ("etl", Quota(), "has no limit"),
        ("etl", Quota(write_bytes_s=-1), "write_bytes_s is -1"),
        ("etl", Quota(read_bytes_s=1 << 51), "read_bytes_s is 2251"),
        ("a/b", Quota(requests_s=1), "'a/b' cannot be the name"),
        ("etl", Quota(*cast(Any, (0, 0, 1.5))), "requests_s is 1.5"),
        ("etl", Quota(*cast(Any, (0, 0, "5"))), "requests_s is '5'"),
        ("etl", Quota(requests_s=True), "requests_s is True"),
        (cast(Any, None), Quota(requests_s=1), "the principal is None"),
    ],
)
def test_quotas_that_cannot_be(principal: str, quota: Quota, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_quota(principal, quota)


def test_the_node() -> None:
    quotas = {"etl": Quota(1, 2, 3), "*": Quota(requests_s=7)}
    assert QUOTAS.parsed("/node", QUOTAS.encode(quotas)) == quotas
    assert QUOTAS.parsed("/node", None) == {}
    assert QUOTAS.parsed("/node", b'{"etl": {"requests_s": 3, "processor_ms_s": 9}}') == {"etl": Quota(requests_s=3)}
    for wrong in (b"[]", b'{"etl": 3}', b'{"etl": {"requests_s": "3"}}', b'{"etl": {"requests_s": -3}}'):
        with pytest.raises(CorruptData, match="metamq quota set"):
            QUOTAS.parsed("/node", wrong)
    with pytest.raises(ConfigError, match="'other' has no quota of its own"):
        without_quota(quotas, "other")
    full = {f"p-{number}": Quota(requests_s=1) for number in range(QUOTAS_MAX)}
    assert len(with_quota(full, "p-0", Quota(requests_s=2))) == QUOTAS_MAX
    with pytest.raises(ConfigError, match="the limit"):
        with_quota(full, "another", Quota(requests_s=1))


# At a real broker


def set_and_wait(secure: Cluster, authority: Authority, name: str, **limits: int) -> None:
    """Returns when the broker has the quota. It follows rules and quotas in one session, so in the order of changes."""
    if not (authority.folder / f"{WATCHER}.crt").exists():
        authority.issue(WATCHER)
    topic = f"sign-{uuid.uuid4().hex}"
    with secure.admin() as admin, RawClient(secure, authority, WATCHER) as watcher:
        admin.set_quota(name, **limits)
        admin.add_rules("allow", WATCHER, "read", f"topic:{topic}")
        asked = [OffsetsEntry(topic, "", 0, LATEST)]
        wait_until(lambda: not isinstance(watcher.error(Command.OFFSETS, asked), NotAuthorized), what="the quota")


def figures(secure: Cluster, name: str) -> dict[str, float]:
    lines = http_get(secure.broker.http_port, "/metrics")[1].replace('broker="0",', "").splitlines()
    marked = [line.split(f'{{principal="{name}"}} ') for line in lines if f'{{principal="{name}"}}' in line]
    return {metric: float(value) for metric, value in marked}


def timed(do: Callable[[], Any]) -> float:
    begun = time.monotonic()
    do()
    return time.monotonic() - begun


def send_all(producer: Producer, topic: str, number: int) -> None:
    receipts = [producer.send(topic, bytes([n % 256]) * 100_000) for n in range(number)]
    assert [receipt.result(SLOW_S).offset for receipt in receipts] == sorted(
        receipt.result(SLOW_S).offset for receipt in receipts
    )


@pytest.mark.slow
def test_a_producer_is_delayed_and_loses_nothing_and_others_are_not_delayed(
    secure: Cluster, authority: Authority, name: str, security: SecurityConfig, caplog: pytest.LogCaptureFixture
) -> None:
    set_and_wait(secure, authority, name, write_bytes_s=MB)
    with (
        caplog.at_level(logging.WARNING),
        Producer(secure.zookeeper, security=security, linger_ms=0, request_timeout_s=0.5) as producer,
        secure.producer(linger_ms=0) as other,
    ):
        took_s = timed(lambda: send_all(producer, name, 40))
        assert timed(lambda: send_all(other, name, 40)) < took_s
    assert took_s >= 2.0, "4 MB, of which a burst of 1 MB and the requests in progress are free"
    warnings = [record.message for record in caplog.records if "above its quota" in record.message]
    assert len(warnings) == 1
    assert "write_bytes_s 1,000,000" in warnings[0]
    assert not [record.message for record in caplog.records if "reconnecting" in record.message]
    found = figures(secure, name)
    assert found["metamq_broker_delays_total"] >= 1
    assert found["metamq_broker_delayed_seconds_total"] >= 1


@pytest.mark.slow
def test_a_consumer_is_delayed_and_its_health_shows_it(
    secure: Cluster, authority: Authority, name: str, security: SecurityConfig
) -> None:
    with Producer(secure.zookeeper, security=security, linger_ms=0) as producer:
        send_all(producer, name, 40)
    set_and_wait(secure, authority, name, read_bytes_s=MB)
    with (
        ThreadPoolExecutor() as threads,
        Consumer(secure.zookeeper, topics=name, security=security, start="earliest", idle_timeout_s=5) as consumer,
    ):
        shown = threads.submit(wait_until, lambda: consumer.health().delayed_s > 0, what="a delay in health()")
        begun = time.monotonic()
        for number, message in enumerate(consumer, 1):
            assert number == 1 or message.value == bytes([(number - 2) % 256]) * 100_000
            if number == 41:
                break
        assert time.monotonic() - begun >= 1.5
        shown.result()


@pytest.mark.parametrize("is_new", [True, False], ids=["connecting again each time", "on one connection"])
def test_requests_are_counted_over_all_connections(
    secure: Cluster, authority: Authority, name: str, security: SecurityConfig, is_new: bool
) -> None:
    set_and_wait(secure, authority, name, requests_s=20)
    connected = client_security(security).brokers
    connections: list[BlockingConnection] = []

    def ask() -> None:
        if is_new or not connections:
            connections.append(
                BlockingConnection.open("127.0.0.1", secure.broker.port, security=connected, timeout_s=SLOW_S)
            )
        connections[-1].send(Command.OFFSETS, [], timeout_s=0.5)
        connections[-1].receive(timeout_s=0.5)  # is shorter than the waits in all

    try:
        assert timed(lambda: [ask() for _ in range(60)]) >= 1.8, "60 at 20 a second, of which 20 are free"
    finally:
        for connection in connections:
            connection.abort()


def test_a_quota_that_is_removed_ends_a_wait(
    secure: Cluster, authority: Authority, name: str, security: SecurityConfig
) -> None:
    set_and_wait(secure, authority, name, write_bytes_s=1000)
    with Producer(secure.zookeeper, security=security, linger_ms=0) as producer:
        producer.send(name, b"x" * 100_000).result(SLOW_S)  # is begun at once: 99 s are to pay
        waits = producer.send(name, b"y")
        with pytest.raises(Timeout):
            waits.result(1.5)
        with secure.admin() as admin:
            admin.remove_quota(name)
        assert timed(lambda: waits.result(SLOW_S)) < 5


@pytest.mark.slow
def test_a_message_that_is_not_sent_in_time_names_the_quota(
    secure: Cluster, authority: Authority, name: str, security: SecurityConfig
) -> None:
    set_and_wait(secure, authority, name, write_bytes_s=1000)
    with Producer(secure.zookeeper, security=security, linger_ms=0, delivery_timeout_s=2) as producer:
        producer.send(name, b"x" * 100_000).result(SLOW_S)
        with pytest.raises(DeliveryTimeout, match="above its quota, write_bytes_s 1,000"):
            producer.send(name, b"y").result(SLOW_S)
    with secure.admin() as admin:
        admin.remove_quota(name)


def test_large_frames_that_wait_take_no_memory(
    secure: Cluster, authority: Authority, name: str, security: SecurityConfig
) -> None:
    """Ten connections of one principal with frames of a megabyte: one is read, and the others wait in the kernel."""
    set_and_wait(secure, authority, name, write_bytes_s=10_000)
    producers = [Producer(secure.zookeeper, security=security, linger_ms=0) for _ in range(10)]
    try:
        receipts = [producer.send(name, b"x" * 900_000) for producer in producers]
        wait_until(lambda: figures(secure, name).get("metamq_broker_delays_total", 0) >= 5, what="waits")
        lines = http_get(secure.broker.http_port, "/metrics")[1].splitlines()
        (used,) = (float(line.split()[1]) for line in lines if line.startswith("metamq_broker_request_bytes{"))
        assert used < 2 * 900_000
        with secure.admin() as admin:
            admin.remove_quota(name)
        assert sorted(receipt.result(SLOW_S).offset for receipt in receipts) == list(range(1, 11))
    finally:
        for producer in producers:
            producer.close()
