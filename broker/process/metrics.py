"""The broker's Prometheus metrics. A scrape collects them from the statistics; between scrapes they cost nothing."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

import metamq
from metamq.broker.ha.attempts import HAState
from metamq.broker.roles.decide_role import RoleKind

if TYPE_CHECKING:
    from metamq.broker.log.disk.files import Sync
    from metamq.broker.process.group_lag import GroupLags
    from metamq.broker.process.server import Broker

BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_GAUGES = {
    "incarnation": ("metamq_broker_incarnation", "Raised when this replica may lack messages that it acknowledged"),
    "connections": ("metamq_broker_connections", "Open connections"),
    "open_log_files": ("metamq_broker_open_log_files", "Files of logs that are open"),
    "request_bytes": ("metamq_broker_request_bytes", "Memory of requests under way"),
    "requests_held_back": ("metamq_broker_requests_held_back", "Requests that wait unread for memory"),
    "answer_bytes": ("metamq_broker_answer_bytes", "Memory of unread answers"),
}
_PER_TOPIC = {
    "messages_in": ("metamq_broker_messages_in", "Messages stored"),
    "bytes_in": ("metamq_broker_bytes_in", "Bytes of batches stored"),
    "batches_in": ("metamq_broker_batches_in", "Batches stored"),
}
_TOTALS = {
    "bytes_out": ("metamq_broker_bytes_out", "Bytes sent to consumers"),
    "fetches": ("metamq_broker_fetches", "GET requests answered"),
    "repeats": ("metamq_broker_repeated_batches", "Batches that came again and were not stored again"),
    "refusals": ("metamq_broker_refusals", "Requests and parts of requests for which a right was missing"),
    "failed_logins": ("metamq_broker_failed_logins", "Logins with a wrong user name or password, or too many of them"),
}
_PER_PRINCIPAL = {
    "delays": ("metamq_broker_delays", "Times that a connection of a principal had to wait for its quota", 1),
    "delayed_ms": ("metamq_broker_delayed_seconds", "Seconds that connections had to wait for a quota", 1000),
}
_PER_PARTITION = {
    "start_offset": ("metamq_log_start_offset", "The first offset in the log"),
    "stable_offset": ("metamq_log_stable_offset", "The offset up to which consumers can read"),
    "end_offset": ("metamq_log_end_offset", "The end of the log"),
    "size_bytes": ("metamq_log_size_bytes", "Bytes on disk"),
}


_PER_SLAVE = {
    "lag_messages": ("metamq_replication_lag_messages", "At the master: messages that a slave lacks"),
    "lag_bytes": ("metamq_replication_lag_bytes", "At the master: bytes that a slave lacks"),
    "lag_ms": ("metamq_replication_lag_seconds", "At the master: age of the oldest batch that a slave lacks"),
    "in_sync": ("metamq_replication_in_sync", "At the master: 1 when a slave is in sync"),
    "sent_bytes": ("metamq_replication_sent_bytes", "At the master: bytes of logs sent to a slave, over its link"),
}
_UNITS = {"lag_ms": 1000}
_TRANSACTIONS = {
    "open": ("metamq_transactions_open", "At the master: branches that have begun and are not prepared"),
    "prepared": ("metamq_transactions_prepared", "At the master: branches that are prepared and not finished"),
    "heuristic": ("metamq_transactions_heuristic", "At the master: branches that an operator has decided about"),
    "promised_bytes": (
        "metamq_transactions_promised_bytes",
        "At the master: bytes that prepared branches will bring into partitions",
    ),
    "journal_bytes": ("metamq_transactions_journal_bytes", "At the master: size of the journal of transactions"),
}
_PER_GROUP = {
    "messages": ("metamq_group_lag_messages", "At the master: messages that a group has not committed"),
    "oldest_s": ("metamq_group_lag_seconds", "At the master: age of the oldest message that a group has not committed"),
    "unknown_partitions": (
        "metamq_group_lag_unknown_partitions",
        "At the master: partitions whose lag is not known; no owner has published its progress, or it cannot be read",
    ),
}
_DELAYED = {
    "waiting": ("metamq_delayed_waiting", "At the master: delayed messages that wait"),
    "next_us": ("metamq_delayed_next_seconds", "At the master: time at which the next one is due; 0 when none waits"),
}
_DELAYED_TOTALS = {
    "delivered": ("metamq_delayed_delivered", "Delayed messages that were delivered to their topics"),
    "refused": ("metamq_delayed_refused", "Delayed messages that could not be delivered"),
}
_LEFT_OUT = "At the master: partitions of groups whose lag was not read yet"
_LAG_AGE = "At the master: seconds since the lags of groups were read, or since it became the master"
_LAG_INTERVAL = "At the master: the setting group_lag_s"
_OLDEST = "At the master: seconds since the oldest prepared branch was prepared; 0 when there is none"
_VERIFIED = "Bytes of logs that were verified in the background"
_SCRUB_AGE = "Seconds since all logs were verified last; before the first time, since the start"
_DAMAGED = "Partitions whose logs are known to be damaged"
_LINKED = "At a slave: 1 when it is linked to its master"
_RECEIVED = "At a slave: bytes of logs that came from masters"
_IN_SYNC = "At the master: replicas in sync, itself included"
_FAILOVER = "1 when an in-sync slave takes over by itself: failover is auto, and not paused"
_PROMOTIONS = "Times that this replica became the master since its start: by itself, or on request"
_GIVEN_UP = "Messages of async topics that this replica stored as a former master, and gave up"


class Histogram(NamedTuple):
    """Totals since the start. `counts`: number of fsyncs between each of BOUNDS_S and the bound before it."""

    counts: tuple[int, ...]
    """One more than the bounds: the last counts the fsyncs longer than all of them."""
    sum_s: float


class SyncTimes:
    """Measures every fsync of a broker: it waits mostly for the disk, and no other metric shows it. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def timed(self, sync: Sync) -> Sync:
        """Wraps `sync` to measure it; a failed call counts too."""

        def measured(fd: int) -> None:
            begun = time.perf_counter()
            try:
                sync(fd)
            finally:
                self._add(time.perf_counter() - begun)

        return measured

    def _add(self, took_s: float) -> None:
        with self._lock:
            self._counts[bisect_left(BOUNDS_S, took_s)] += 1
            self._sum_s += took_s

    def snapshot(self) -> Histogram:
        """The measurements up to now."""
        with self._lock:
            return Histogram(tuple(self._counts), self._sum_s)


class BrokerCollector(Collector):
    """Collects the metrics of one broker. Every sample has the label `broker`, the broker id."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def collect(self) -> Iterator[Metric]:
        labels = {"broker": str(self._broker.config.id)}
        for metric in self._collect():
            metric.samples = [one._replace(labels=one.labels | labels) for one in metric.samples]
            yield metric

    def _collect(self) -> Iterator[Metric]:
        statistics: dict[str, Any] = self._broker.statistics()
        counters = statistics["counters"]
        for name, (metric, text) in _GAUGES.items():
            yield GaugeMetricFamily(metric, text, value=statistics[name])
        yield GaugeMetricFamily("metamq_broker_ready", "1 when /readyz is good", value=int(self._broker.readiness()[0]))
        build = GaugeMetricFamily("metamq_build_info", "This release", labels=["version"])
        build.add_metric([metamq.__version__], 1)
        yield build
        replica = GaugeMetricFamily("metamq_replica_info", "This replica", labels=["replica"])
        replica.add_metric([str(statistics["replication"]["replica"])], 1)
        yield replica
        for name, (metric, text) in _TOTALS.items():
            yield CounterMetricFamily(metric, text, value=counters[name])
        yield from _replication(statistics["replication"])
        yield from _transactions(statistics["transactions"], statistics["time_ms"])
        yield from _scrub(statistics["scrub"])
        yield from _delayed(statistics["delayed"])
        yield GaugeMetricFamily("metamq_log_damaged_partitions", _DAMAGED, value=statistics["damaged_count"])
        flushes = statistics["flushes"]
        yield CounterMetricFamily(
            "metamq_broker_flushes", "Flushes of logs, each for all waiting appends", value=flushes
        )
        text = "Connections that were closed because they made no progress, did not read, or sent no request"
        yield CounterMetricFamily("metamq_broker_stalled_connections", text, value=statistics["stalled_connections"])
        yield self._fsyncs()
        yield from _group_lags(statistics["group_lags"])
        for name, (metric, text, unit) in _PER_PRINCIPAL.items():
            family = CounterMetricFamily(metric, text, labels=["principal"])
            for principal, value in counters[name].items():
                family.add_metric([principal], value / unit)
            yield family
        for name, (metric, text) in _PER_TOPIC.items():
            family = CounterMetricFamily(metric, text, labels=["topic"])
            for topic, value in counters[name].items():
                family.add_metric([topic], value)
            yield family
        for name, (metric, text) in _PER_PARTITION.items():
            gauge = GaugeMetricFamily(metric, text, labels=["topic", "partition"])
            for partition in statistics["partitions"]:
                gauge.add_metric([partition["topic"], str(partition["partition"])], partition[name])
            yield gauge

    def _fsyncs(self) -> Metric:
        found = self._broker.fsyncs()
        bounds = [*map(str, BOUNDS_S), "+Inf"]
        buckets = list(zip(bounds, accumulate(found.counts), strict=True))
        text = "Durations of fsyncs, also of files that are not logs"
        return HistogramMetricFamily("metamq_disk_fsync_seconds", text, buckets=buckets, sum_value=found.sum_s)


def _transactions(figures: dict[str, int], now_ms: int) -> Iterator[Metric]:
    for name, (metric, text) in _TRANSACTIONS.items():
        yield GaugeMetricFamily(metric, text, value=figures[name])
    oldest_us = figures["oldest_prepared_us"]
    age_s = max(now_ms / 1000 - oldest_us / 1_000_000, 0) if oldest_us else 0
    yield GaugeMetricFamily("metamq_transactions_oldest_prepared_seconds", _OLDEST, value=age_s)


def _group_lags(lags: GroupLags | None) -> Iterator[Metric]:
    families = {name: GaugeMetricFamily(*known, labels=["group", "topic"]) for name, known in _PER_GROUP.items()}
    for labels, lag in sorted(lags.by_group_and_topic.items()) if lags is not None else ():
        for name, family in families.items():
            if (value := getattr(lag, name)) is not None:
                family.add_metric(labels, value)
    yield from families.values()
    left_out = GaugeMetricFamily("metamq_group_lag_left_out_partitions", _LEFT_OUT, labels=[])
    age = GaugeMetricFamily("metamq_group_lag_age_seconds", _LAG_AGE, labels=[])
    interval = GaugeMetricFamily("metamq_group_lag_interval_seconds", _LAG_INTERVAL, labels=[])
    if lags is not None:
        left_out.add_metric([], lags.left_out)
        age.add_metric([], time.monotonic() - lags.read_at_s)
        interval.add_metric([], lags.interval_s)
    yield from (left_out, age, interval)


def _delayed(figures: dict[str, int]) -> Iterator[Metric]:
    for name, (metric, text) in _DELAYED.items():
        value = figures[name] / 1e6 if name == "next_us" else figures[name]
        yield GaugeMetricFamily(metric, text, value=value)
    for name, (metric, text) in _DELAYED_TOTALS.items():
        yield CounterMetricFamily(metric, text, value=figures[name])


def _scrub(figures: dict[str, Any]) -> Iterator[Metric]:
    yield CounterMetricFamily("metamq_scrub_verified_bytes", _VERIFIED, value=figures["verified_bytes"])
    yield GaugeMetricFamily("metamq_scrub_age_seconds", _SCRUB_AGE, value=figures["pass_age_s"])


def _replication(statistics: dict[str, Any]) -> Iterator[Metric]:
    """Yields the metrics of the replica's role and of its links."""
    text = "The epoch of the master that this replica is, or follows"
    yield GaugeMetricFamily("metamq_broker_epoch", text, value=statistics["epoch"])
    roles = GaugeMetricFamily("metamq_replication_role", "1 for the role of this replica", labels=["role"])
    for role in RoleKind:
        roles.add_metric([role.value], int(role.value == statistics["role"]))
    yield roles
    yield GaugeMetricFamily("metamq_replication_failover_auto", _FAILOVER, value=int(statistics["failover_is_on"]))
    promotions = CounterMetricFamily("metamq_replication_promotions", _PROMOTIONS, labels=["by"])
    for by, number in statistics["promotions"].items():
        promotions.add_metric([by], number)
    yield promotions
    yield CounterMetricFamily("metamq_replication_given_up_messages", _GIVEN_UP, value=statistics["given_up_messages"])
    for family, value in (
        (GaugeMetricFamily("metamq_replication_linked", _LINKED, labels=[]), _linked(statistics)),
        (
            CounterMetricFamily("metamq_replication_received_bytes", _RECEIVED, labels=[]),
            statistics.get("received_bytes"),
        ),
        (
            GaugeMetricFamily("metamq_replication_insync_replicas", _IN_SYNC, labels=[]),
            len(statistics["insync"]) if "insync" in statistics else None,
        ),
    ):
        if value is not None:  # the figure belongs to the other role
            family.add_metric([], value)
        yield family
    for name, (metric, text) in _PER_SLAVE.items():
        kind = CounterMetricFamily if name == "sent_bytes" else GaugeMetricFamily
        family = kind(metric, text, labels=["slave"])
        for slave in statistics.get("slaves", []):
            values = {**slave, "in_sync": slave["replica"] in statistics["insync"]}
            family.add_metric([str(slave["replica"])], values[name] / _UNITS.get(name, 1))
        yield family


def _linked(statistics: dict[str, Any]) -> int | None:
    return int(statistics["link"] == HAState.TRANSFER.value) if "link" in statistics else None
