"""The broker's Prometheus metrics, collected from its statistics when they are scraped: no cost in between."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

import metamq
from metamq.broker.sync_times import BOUNDS_S

if TYPE_CHECKING:
    from metamq.broker.server import Broker

_GAUGES = {
    "epoch": ("metamq_broker_epoch", "The master's term"),
    "incarnation": ("metamq_broker_incarnation", "Raised when this replica may lack what it acknowledged"),
    "connections": ("metamq_broker_connections", "Open connections"),
    "open_log_files": ("metamq_broker_open_log_files", "Files of logs that are open"),
    "request_bytes": ("metamq_broker_request_bytes", "Memory of requests under way"),
    "requests_held_back": ("metamq_broker_requests_held_back", "Requests that wait unread for memory"),
}
_PER_TOPIC = {
    "messages_in": ("metamq_broker_messages_in", "Messages stored"),
    "bytes_in": ("metamq_broker_bytes_in", "Bytes of batches stored"),
    "batches_in": ("metamq_broker_batches_in", "Batches stored"),
}
_TOTALS = {
    "bytes_out": ("metamq_broker_bytes_out", "Bytes sent to consumers"),
    "fetches": ("metamq_broker_fetches", "GET requests answered"),
    "repeats": ("metamq_broker_repeated_batches", "Batches that came again and were not stored twice"),
}
_PER_PARTITION = {
    "start_offset": ("metamq_log_start_offset", "The first offset that is kept"),
    "stable_offset": ("metamq_log_stable_offset", "The end of what can be read"),
    "end_offset": ("metamq_log_end_offset", "The end of the log"),
    "size_bytes": ("metamq_log_size_bytes", "Bytes on disk"),
}


class BrokerCollector(Collector):
    """Collects one broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def collect(self) -> Iterator[Metric]:
        statistics: dict[str, Any] = self._broker.statistics()
        counters = statistics["counters"]
        for name, (metric, text) in _GAUGES.items():
            yield GaugeMetricFamily(metric, text, value=statistics[name])
        yield GaugeMetricFamily("metamq_broker_ready", "1 when /readyz is good", value=int(self._broker.readiness()[0]))
        build = GaugeMetricFamily("metamq_build_info", "This release", labels=["version"])
        build.add_metric([metamq.__version__], 1)
        yield build
        for name, (metric, text) in _TOTALS.items():
            yield CounterMetricFamily(metric, text, value=counters[name])
        flushes = statistics["flushes"]
        yield CounterMetricFamily("metamq_broker_flushes", "Flushes of logs, each for all that wait", value=flushes)
        yield self._fsyncs()
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
        text = "How long fsyncs took, those of files that are not logs included"
        return HistogramMetricFamily("metamq_disk_fsync_seconds", text, buckets=buckets, sum_value=found.sum_s)
