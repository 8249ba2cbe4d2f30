"""The measured figures from which `metamq plan` computes. A test compares each with its source.

A source is a file of bench/results with the place of the figure in it, or docs/scaling.md with the row of its tables.
`./dev bench` measures the files again.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure that was measured, in `unit`. `source`: the place where it is written, see the module."""

    value: float
    unit: str
    meaning: str
    source: str


MEASURES = {
    "broker_mb": Measure(
        41.3, "MB", "memory of a broker process without a partition",
        "latest.json lifecycle.many_partitions.empty_mb",
    ),
    "partition_kb": Measure(
        7.8, "kB", "memory of a partition with data", "latest.json lifecycle.many_partitions.kb_per_partition"
    ),
    "connection_kb": Measure(
        23, "kB", "memory of a connection that waits for messages", "docs/scaling.md a connection that waits"
    ),
    "request_us": Measure(
        45.5, "µs", "processor of a master per request, with 1,000 connections and a slave in sync",
        "puts.json puts.rows.28.us",
    ),
    "answer_us": Measure(
        10, "µs", "processor of a broker per request for each group that reads it",
        "docs/scaling.md for each group that reads it",
    ),
    "produce_s_per_gb": Measure(
        0.894, "s/GB", "processor of a broker for written data", "security.json security.plain_produce_broker_s_per_gb"
    ),
    "consume_s_per_gb": Measure(
        0.484, "s/GB", "processor of a broker for read data", "security.json security.plain_consume_broker_s_per_gb"
    ),
    "replicate_s_per_gb": Measure(
        2.24, "s/GB", "processor of a master for data that a slave copies",
        "latest.json replication.master_cpu_ns_per_byte.replicated",
    ),
    "node_bytes": Measure(900, "bytes", "memory of ZooKeeper for a node", "docs/scaling.md a node"),
    "commit_us": Measure(
        24, "µs", "processor of ZooKeeper for the offset of a partition", "scale.json scale.constants.commit_us"
    ),
    "session_us": Measure(
        108, "µs", "processor of ZooKeeper per second for a session of 10 s, idle",
        "scale.json scale.constants.session_us",
    ),
    "plan_bytes": Measure(
        1.6, "bytes", "part of a partition in the plan of a group", "docs/scaling.md a packed plan"
    ),
    "plan_read_us": Measure(
        2.6, "µs", "processor of a member for a partition of a changed plan", "docs/scaling.md a packed plan"
    ),
    "partitions_tried": Measure(
        10_000, "partitions", "partitions of a broker id", "partitions.json partitions.by_count.1.partitions"
    ),
    "connections_tried": Measure(9_900, "connections", "connections of a broker", "docs/scaling.md waiting readers"),
    "members_tried": Measure(200, "members", "members of a group", "docs/scaling.md one more member, 200 members"),
    "broker_ids_tried": Measure(100, "broker ids", "broker ids of a cluster", "scale.json scale.sizes.brokers"),
    "nodes_tried": Measure(115_863, "nodes", "nodes in ZooKeeper", "scale.json scale.zookeeper.nodes"),
    "sessions_tried": Measure(251, "sessions", "sessions with ZooKeeper", "scale.json scale.zookeeper.sessions"),
    "consumer_kb": Measure(52, "kB", "memory that a consumer adds to its program", "docs/scaling.md a consumer"),
    "producer_kb": Measure(28, "kB", "memory that a producer adds to its program", "docs/scaling.md a producer"),
}  # fmt: skip
"""By name. Where a figure depends on the size, it is the largest one that was measured."""
