"""Writes docs/performance.md and its plot from a result file, so that no figure is typed by hand.

python bench/report.py [bench/results/latest.json]

The figures of long parts come from files of their own:
`./dev bench --only failover --output bench/results/failover.json`, and the same for rolling, security, disk, puts,
scale and idle. So do those of partitions, scan and console, while the result file lacks them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SIDES = ("broker", "client")
OWN_FILES = ("partitions", "scan", "console", "failover", "rolling", "security", "disk", "puts", "scale", "idle")
WAYS = ("send", "send_many", "iteration", "batches", "batches, values", "batches, arrow", "listener")

INTRODUCTION = """# Performance

`./dev bench` measures, and `bench/report.py` writes this page from `bench/results/latest.json`. A speed means nothing
without the machine. So each run also measures the same machine with system calls alone:

* **loopback**: one process sends, another receives;
* **copy and write**: one sends, another receives and writes to a file, in the page cache: the limit of producing;
* **read and send**: one reads a file from the page cache and sends, another receives: the limit of fetching.

The broker is a process of its own. Figures are medians of the rounds of one run. A ratio is taken in each round, from
figures of the same minute. Before each measurement, written data is on the disk, and free memory has been touched
(`bench/settle.py`): a virtual machine may give freed memory back to its host, and to use it again costs up to six times
as much.
"""

HOW = """
## How to read them

`send` is one call and one Delivery for each message; `send_many` is one call for all. `iteration` is
`for message in consumer`. `batches` yields verified batches and reads nothing in them; `values` makes every value a
`bytes` object; `arrow` makes a RecordBatch. The listener is `consumer.run(listener)` with one thread. Producing
includes the last acknowledgement. Consuming begins when the consumer has connected.

A poll of a consumer of 1,000 partitions is as small as one of 4 partitions: a fetch session sends only changes.
"""


def _throughput(results: dict[str, Any]) -> list[str]:
    limits = results["raw_bytes_per_s"]
    lines = ["", "## Throughput", ""]
    lines.append(
        f"Raw limits: loopback {limits['loopback'] / 1e9:.2f} GB/s, copy and write "
        f"{limits['copy_write'] / 1e9:.2f} GB/s, read and send {limits['read_send'] / 1e9:.2f} GB/s."
    )
    lines += ["", "Messages per second, and MB/s of values:", ""]
    lines.append("| bytes | partitions | " + " | ".join(WAYS) + " |")
    lines.append("|---|---|" + "---|" * len(WAYS))
    for row in results["messages_per_s"]:
        size = row["message_bytes"]
        cells = [f"{row[way] / 1e6:.2f} M, {row[way] * size / 1e6:,.0f}" for way in WAYS]
        lines.append(f"| {size:,} | {row['partitions']:,} | " + " | ".join(cells) + " |")
    lines += ["", "![throughput](performance.svg)"]
    return lines


def _latency(results: dict[str, Any]) -> list[str]:
    lines = ["", "## Latency", "", "| | p50 | p99 | p99.9 |", "|---|---|---|---|"]
    names = {
        "round_trip": "`send(...).result()`, blocking",
        "raw_round_trip": "the same four wake-ups of threads and processes, with system calls alone",
        "end_to_end": "from `send` to the loop, 1,000 messages/s",
    }
    for key, name in names.items():
        figures = results[key]
        cells = (f"{figures[percentile]:.2f} ms" for percentile in ("p50_ms", "p99_ms", "p99_9_ms"))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _lifecycle(results: dict[str, Any]) -> list[str]:
    lines = [
        "",
        "## Start-up, recovery, memory",
        "",
        "| log | up after a clean stop | up after kill -9 | up after kill -9, nothing flushed: full check of the log |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {row['log_mb']:,.0f} MB | {row['after_clean_stop_s']:.2f} s | {row['after_kill_s']:.2f} s "
        f"| {row['after_kill_unflushed_s']:.2f} s |"
        for row in results["by_log_size"]
    ]
    many = results["many_partitions"]
    lines += [
        "",
        f"A broker with {many['partitions']:,} partitions, each with data, takes {many['used_mb']:.0f} MB "
        f"({many['empty_mb']:.0f} MB without them, {many['kb_per_partition']:.1f} kB per partition), and is up "
        f"{many['restart_after_clean_stop_s']:.2f} s after a clean stop.",
    ]
    return lines


def _partitions(results: dict[str, Any]) -> list[str]:
    lines = ["", "## Many partitions and topics", ""]
    lines.append(
        "Seconds, and in brackets seconds of a processor of the broker. Each partition has messages. Each row is one "
        "run; the figure of one more topic is a median."
    )
    lines.append(f"The load of the machine was {results['load']:.1f}: other work ran beside it.")
    lines += ["", "| partitions | creation | start | start after kill -9 | stop | MB |", "|---|---|---|---|---|---|"]
    for row in results["by_count"]:
        cells = [f"{row[one]['s']:.1f} ({row[one]['cpu_s']:.1f})" for one in ("created", "clean", "killed")]
        lines.append(f"| {row['partitions']:,} | {' | '.join(cells)} | {row['stop_s']:.1f} | {row['mb']:.0f} |")
    topics = results["topics"]
    more, clean = topics["one_more"], topics["clean"]
    lines += [
        "",
        f"With {topics['topics']:,} topics of one partition, one more takes {more['s']:.2f} s ({more['cpu_s']:.2f}), "
        f"the broker starts in {clean['s']:.1f} s ({clean['cpu_s']:.1f}), and `metamq doctor` takes "
        f"{topics['doctor_s']:.1f} s.",
    ]
    return lines


def _rebalance(results: dict[str, Any]) -> list[str]:
    lines = [
        "",
        "## Rebalance",
        "",
        "Ten members, 100 partitions, handlers of up to 10 ms. Seconds until every partition is owned again:",
        "",
    ]
    lines += ["| event | seconds |", "|---|---|"]
    lines += [f"| {event} | {results[f'{event}_s']:.2f} |" for event in ("join", "leave", "kill")]
    lines += ["", "For a kill, the time begins at the end of the killed member's session."]
    return lines


def _replication(results: dict[str, Any]) -> list[str]:
    lines = ["", "## Replication", "", "A master and a slave, both in sync, and the client share the cores:", ""]
    lines += ["| `send_many` | async | sync | sync / async |", "|---|---|---|---|"]
    lines += [
        f"| {row['message_bytes']:,.0f} B | {row['async'] / 1e6:.2f} M/s | {row['sync'] / 1e6:.2f} M/s "
        f"| {row['ratio']:.2f} |"
        for row in results["throughput"]
    ]
    waits, caught_up, cpu = results["latency"], results["catching_up"], results["master_cpu_ns_per_byte"]
    promoted = results["promotion"]
    lines += [
        "",
        f"* the median of a blocking round trip is {waits['async_p50_ms']:.2f} ms to an async topic and "
        f"{waits['sync_p50_ms']:.2f} ms to a sync topic: {waits['added_p50_ms']:.2f} ms more;",
        f"* a slave that was away catches up at {caught_up['bytes_per_s'] / 1e9:.2f} GB/s while the master serves "
        "1,000 messages/s; a copy from file to file over loopback makes "
        f"{caught_up['raw_bytes_per_s'] / 1e9:.2f} GB/s;",
        f"* from the request to promote a slave to the first write that it acknowledged: {promoted['living_s']:.2f} s "
        f"if the master runs, {promoted['dead_s']:.2f} s if it was just killed with -9;",
        f"* to store a byte costs the master {cpu['alone']:.2f} ns of processor time, and to replicate it "
        f"{cpu['replicated']:.2f} ns more.",
    ]
    return lines


def _transactions(results: dict[str, Any]) -> list[str]:
    commits, branch, recovery, beside = (results[part] for part in ("commits", "open_branch", "recovery", "beside"))
    kinds = results.get("kinds")
    by_kind = [] if kinds is None else [
        f"* a single client's transaction takes {kinds['one_broker_ms']:.2f} ms with one broker, "
        f"{kinds['two_brokers_ms']:.2f} ms over two, {kinds['with_sqlite3_ms']:.2f} ms by `dbtx` with a row in "
        f"sqlite3, and {kinds['coordinated_ms']:.2f} ms by a Coordinator over two Producers;"
    ]  # fmt: skip
    return [
        "",
        "## Transactions",
        "",
        "Each transaction has ten messages of 1 KiB, and is on the disk before it is acknowledged. The disk makes "
        f"{commits['fsyncs_per_s']:,.0f} fsyncs/s of 160 KiB; the median of an fsync of 10 KiB is "
        f"{commits['fsync_p50_ms']:.2f} ms.",
        "",
        f"* 16 clients commit {commits['one_phase_per_s']:,.0f}/s in one phase, {commits['per_fsync']:.1f} "
        f"with each fsync of the broker, and {commits['two_phase_per_s']:,.0f}/s in two phases: a ratio of "
        f"{commits['two_to_one']:.2f};",
        f"* the median of a single client's commit is {commits['single_p50_ms']:.2f} ms: "
        f"{commits['over_two_fsyncs_ms']:.2f} ms more than two fsyncs;",
        *by_kind,
        f"* a branch with {branch['messages']:,} messages in batches of about 100 takes up to "
        f"{branch['mb']:.1f} MB in the broker;",
        f"* a broker that was killed with {recovery['journal_bytes'] / 1e9:.2f} GB in its journal, "
        f"{recovery['branches']:,.0f} prepared branches, serves again after {recovery['s']:.2f} s;",
        f"* `send_many` of 1 KiB without a transaction makes {beside['with'] / 1e6:.2f} M/s while 1,000 branches are "
        f"open, and {beside['without'] / 1e6:.2f} M/s without open branches: a ratio of {beside['ratio']:.2f}.",
    ]


def _scan(measured: dict[str, Any]) -> list[str]:
    lines = ["", "## A topic as a table", ""]
    lines.append(
        "`metamq.scan()` reads all columns of a topic with 4 partitions. Every value is different. The limits are the "
        "plain read of the topic's files, and the raw read and send. *Scan* reads the broker's files, which are on the "
        "same machine. For *sent*, the broker sends all messages, as between machines. The consumer makes the same "
        "RecordBatches (`batches, arrow`)."
    )
    names = ("bytes", "scan", "plain read", "scan / plain read", "sent", "read and send", "sent / read and send")
    names = (*names, "consumer", "sent / consumer", "scan, only `offset`")
    lines += ["", f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in measured["speeds"]:
        size = row["message_bytes"]

        def rate(name: str, row: dict[str, float] = row) -> str:
            return f"{row[name] / 1e6:.2f} M, {row[name] * row['message_bytes'] / 1e6:,.0f}"

        cells = [f"{size:,}", rate("files"), rate("plain_read"), f"{row['files_to_read']:.2f}", rate("sent")]
        cells += [rate("read_send"), f"{row['sent_to_read_send']:.2f}", rate("arrow"), f"{row['sent_to_arrow']:.2f}"]
        lines.append(f"| {' | '.join(cells)} | {row['offsets'] / 1e6:.2f} M |")
    return [*lines, "", "Rows per second, and MB/s of values.", "", _scan_memory(measured["memory"])]


def _scan_memory(large: dict[str, Any]) -> str:
    files, sent = large["files"], large["sent"]
    return (
        f"A process that the system allows {large['limit'] / 1e9:g} GB of memory (`RLIMIT_DATA`) reads "
        f"{large['messages'] * large['value_bytes'] / 1e9:g} GB: {large['messages']:,} messages of "
        f"{large['value_bytes']:,} bytes. DuckDB computes the number, the length and the largest of the values. It "
        f"takes {files['s']:.1f} s from the broker's files, and {sent['s']:.1f} s if the broker sends them. The "
        f"process has {files['peak_bytes'] / 1e6:.0f} MB at most, or {sent['peak_bytes'] / 1e6:.0f} MB; before the "
        f"scan, {files['before_bytes'] / 1e6:.0f} MB."
    )


def _console(measured: dict[str, Any]) -> list[str]:
    lines = ["", "## The console", ""]
    lines.append(
        f"Pages of `metamq console`, from the connection to the last byte. The cluster has {measured['brokers']} "
        f"brokers, a topic of {measured['partitions']:,} partitions, and groups with an offset for each partition. One "
        f"group runs, with {measured['members']} members. The file of styles is the limit: an answer that asks the "
        f"cluster nothing. Milliseconds of {measured['visits']} visits: the median, the longest, and the processor "
        "time of the console for one of them:"
    )
    heads = []
    for count in sorted({row["groups"] for row in measured["pages"]}):
        heads += [f"{_groups(count)}, p50", "longest", "processor"]
    lines += ["", f"| page | kB | {' | '.join(heads)} |", "|---" * (2 + len(heads)) + "|"]
    for page in dict.fromkeys(row["page"] for row in measured["pages"]):
        rows = [row for row in measured["pages"] if row["page"] == page]
        cells = [f"{row[figure]:,.0f}" for row in rows for figure in ("p50_ms", "max_ms", "processor_ms")]
        lines.append(f"| {page} | {rows[-1]['bytes'] / 1e3:,.0f} | {' | '.join(cells)} |")
    lacking = [row for row in measured["pages"] if row["incomplete"]]
    cells = [f"{row['page']} {row['incomplete']} ({_groups(row['groups'])})" for row in lacking]
    if cells:
        lines += ["", f"Visits whose page lacked a figure, since an answer took longer than 3 s: {', '.join(cells)}."]
    return lines


def _groups(count: int) -> str:
    return f"{count} group{'s' if count > 1 else ''}"


def _spark(measured: dict[str, Any]) -> list[str]:
    trickle, sink = measured["trickle"], measured["sink"]
    lines = ["", "## Spark", ""]
    lines.append(
        "A session of `local[2]` with the recommended settings reads all columns and writes them nowhere (`noop`). The "
        "ceiling is a source in Python that always yields the same RecordBatch: Spark's own path from the Python "
        "worker into the JVM. Broker, workers and JVM share the cores. The scan reads the broker's files, which are on "
        "the same machine. For *sent*, the broker sends all messages (`readFiles=false`), as between machines."
    )
    lines += ["", "| bytes | scan | sent | ceiling | scan / ceiling | sent / ceiling |", "|---|---|---|---|---|---|"]
    for row in measured["scans"]:
        size = row["message_bytes"]
        rates = (row["rows_per_s"], row["sent_rows_per_s"], row["ceiling_rows_per_s"])
        cells = [f"{rate / 1e6:.2f} M, {rate * size / 1e6:,.0f}" for rate in rates]
        lines.append(f"| {size:,.0f} | {' | '.join(cells)} | {row['ratio']:.2f} | {row['sent_ratio']:.2f} |")
    lines += ["", "Rows per second, and MB/s of values."]
    lines += [
        "",
        f"The sink writes rows of {sink['value_bytes']:.0f} bytes that Spark makes itself, until `save()` returns. At "
        f"least once it writes {sink['at_least_once'] / 1e6:.2f} M rows/s: {sink['least_to_noop']:.2f} of the "
        f"{sink['noop'] / 1e6:.2f} M that the query alone makes. Exactly once it writes "
        f"{sink['exactly_once'] / 1e6:.2f} M: {sink['exactly_to_least']:.2f} of at least once.",
        "",
        f"A streaming query with a trigger of 0 seconds reads 20 messages/s. From `send` to the row in `foreachBatch` "
        f"it takes {trickle['p50_ms']:.0f} ms at the median, {trickle['p99_ms']:.0f} ms at p99.",
    ]
    if "kafka" in measured:
        lines += ["", _against_kafka(measured["kafka"])]
    return lines


def _against_kafka(rates: dict[str, float]) -> str:
    return (
        f"Spark's own source for Kafka runs in the JVM. From a Kafka with its defaults (4.3, one node) it reads "
        f"{rates['kafka'] / 1e6:.2f} M rows/s, with rows of 100 bytes in {rates['partitions']} partitions. The source "
        f"of `metamq` reads {rates['metamq'] / 1e6:.2f} M of the same rows, which the broker sends too: "
        f"{rates['ratio']:.1f} times as many."
    )


def _failover(measured: dict[str, Any]) -> list[str]:
    names = {
        "stop": "SIGTERM",
        "kill": "kill -9",
        "freeze": "SIGSTOP for 1.5 sessions",
        "cut": "cut off its network for 1.5 sessions",
    }
    lines = ["", "## A master ends", ""]
    lines.append(
        "Three replicas, and a producer that sends one message after the other; each is acknowledged by all replicas "
        "in sync, two at least. The longest time without an acknowledgement, in seconds, in turns with Kafka 4.3 (3 "
        "nodes, each a broker and a controller; the same session time-out; librdkafka with short pauses between "
        "attempts), all on this machine. Of fewer than 100 rounds, p99 is the longest:"
    )
    lines += ["", "| | session | metamq p50 | p99 | of rounds | Kafka p50 | p99 | of rounds |", "|---" * 8 + "|"]
    for row in measured["rows"]:
        cells = []
        for system in ("metamq", "kafka"):
            figures = [row.get(f"{system}_{what}_s") for what in ("p50", "p99")]
            cells += ["-" if figure is None else f"{figure:.2f}" for figure in figures]
            cells.append(str(row.get(f"{system}_rounds", "-")))
        lines.append(f"| {names[row['fault']]} | {row['session_ms'] / 1000:g} s | {' | '.join(cells)} |")
    return lines


def _rolling(measured: dict[str, Any]) -> list[str]:
    return [
        "",
        f"A rolling restart of {measured['brokers']} brokers (three broker ids with two replicas each), while a "
        f"producer sends one message after the other: no send fails. The longest wait for an acknowledgement is "
        f"{measured['p50_s']:.2f} s (median of {measured['rounds']} restarts), {measured['max_s']:.2f} s at most.",
    ]


def _security(measured: dict[str, Any]) -> list[str]:
    lines = ["", "## Security", ""]
    lines.append(
        "Messages of 1 KiB in requests of about 1 MiB, with TLS 1.3 and the rights of a certificate, in turns with a "
        "cluster without security. GB/s, and processor seconds per GB of each process:"
    )
    lines += ["", "| | plain | TLS | ratio | broker plain | broker TLS | client plain | client TLS |", "|---" * 8 + "|"]
    for way in ("produce", "consume"):
        cells = [f"{measured[f'{kind}_{way}_bytes_per_s'] / 1e9:.2f}" for kind in ("plain", "tls")]
        cells.append(f"{measured[f'{way}_ratio']:.2f}")
        cells += [f"{measured[f'{kind}_{way}_{side}_s_per_gb']:.2f}" for side in SIDES for kind in ("plain", "tls")]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    lines += [
        "",
        f"A thousand new connections, one broker and one client process: {measured['certificate_connections_s']:.1f} s "
        f"by certificate, {measured['password_connections_s']:.1f} s by password. The checks of rights take "
        f"{measured['rights_to_put'] * 100:.2f} % of the broker's time for a PUT of one small message.",
    ]
    return lines


def _disk(measured: dict[str, Any]) -> list[str]:
    names = {
        "nothing": "nothing",
        "scan": "a consumer that reads a cold topic",
        "slave": "a new slave that copies a cold topic",
        "readers": "9,900 waiting readers, which one message wakes every two seconds",
        "retention": "retention that removes 10 GB, measured once",
    }
    scan = measured["scan"]
    lines = ["", "## Disk and loop", ""]
    lines.append(
        f"A consumer reads a topic that is not in the page cache at {scan['cold_bytes_per_s'] / 1e6:,.0f} MB/s, and "
        f"a cached one at {scan['warm_bytes_per_s'] / 1e6:,.0f} MB/s. The disk alone, read by system calls in the same "
        f"rounds, makes {scan['raw_bytes_per_s'] / 1e6:,.0f} MB/s: a ratio of {scan['ratio']:.2f}."
    )
    lines += ["", "A producer sends 1,000 messages a second. The time from `send` to the acknowledgement, beside:", ""]
    lines += ["| | p50 | p99 | p99.9 |", "|---|---|---|---|"]
    for row in measured["latency"]:
        cells = (f"{row[percentile]:.2f} ms" for percentile in ("p50_ms", "p99_ms", "p99_9_ms"))
        lines.append(f"| {names[row['beside']]} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "Other programs used the two cores and the disk during this run. So the broker, the producer and the waiting "
        "readers had real-time priority, and the disturbing scan and the slave the lowest: in use they have machines "
        "of their own. The rates in the first paragraph are of processes with real-time priority.",
    ]
    if "remark" in measured:
        lines += ["", measured["remark"]]
    return lines


def _puts(measured: dict[str, Any]) -> list[str]:
    servers = {
        "echo": "echo",
        "echo and write": "echo and write",
        "alone": "a broker alone",
        "async": "with a slave, `async`",
        "sync": "with a slave, `sync`",
    }
    lines = ["", "## Small requests", ""]
    lines.append(
        "PUTs of one message of 100 bytes, each with its own content, from one client process on the other core. A "
        "connection has one request under way, or 64 of as many producers. Microseconds of the processor of the server "
        "for one PUT. *Echo* answers frames of the same size on the same event loop, uvloop, and does nothing else; "
        "*echo and write* also appends what it has received to a file. In brackets: of the slave."
    )
    lines += ["", f"| connections | under way | messages | {' | '.join(servers.values())} | PUTs a second of a core |"]
    lines.append("|---" * (4 + len(servers)) + "|")
    shapes = dict.fromkeys(map(_shape, measured["rows"]))
    for shape in shapes:
        rows = {row["server"]: row for row in measured["rows"] if shape == _shape(row)}
        cells = [f"{rows[name]['us']:.0f}" for name in servers]
        cells = [
            f"{cell} ({rows[name]['slave_us']:.0f})" if "slave_us" in rows[name] else cell
            for name, cell in zip(servers, cells, strict=True)
        ]
        rate = f"{1e6 / rows['alone']['us']:,.0f}"
        lines.append(f"| {' | '.join([f'{one:,}' for one in shape] + cells + [rate])} |")
    lines += [
        "",
        "One request under way on one connection is the most expensive: the server sleeps and wakes for each of them. "
        "Requests that arrive while others are at work are stored and answered together. asyncio's own loop takes "
        f"{_raw_us(measured, 'echo, asyncio'):.0f} µs for an echo to 1,000 connections, uvloop "
        f"{_raw_us(measured, 'echo'):.0f} µs. A consumer that reads the messages of 100 connections adds "
        f"{measured['read_us']:.0f} µs to each PUT.",
        f"The load of the machine was {measured['load']:.0f}: other work ran beside it.",
    ]
    return lines


def _idle(measured: dict[str, Any]) -> list[str]:
    lines = ["", "## Idle clients", ""]
    lines.append(
        "Clients of one process that send and receive nothing. Each consumer is alone in its group. Memory, files and "
        "processor are those of one client; threads and sessions with ZooKeeper are those of the process."
    )
    lines += ["", "| clients | kB | files | threads | sessions | % of a core | to open, ms of a processor |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in measured["rows"]:
        what = f"{row['clients']:,} {row['api']} {row['kind']}s"
        cells = [f"{row['kb']:.0f}", f"{row['files']:.1f}", f"{row['threads']}", f"{row['sessions']}"]
        cells += [f"{row['client_percent']:.4f}", f"{row['open_cpu_ms']:.1f}"]
        lines.append(f"| {what} | {' | '.join(cells)} |")
    last = measured["rows"][-1]
    lines += [
        "",
        f"Each of the last {last['clients']:,} consumers takes {last['broker_percent']:.4f} % of a core and "
        f"{last['broker_kb']:.1f} kB of the broker, and {last['zookeeper_percent']:.4f} % of a core of ZooKeeper.",
    ]
    return lines


def _shape(row: dict[str, Any]) -> tuple[int, int, int]:
    return row["connections"], row["window"], row["messages"]


def _raw_us(measured: dict[str, Any], server: str) -> float:
    rows = [row for row in measured["rows"] if (row["server"], row["connections"]) == (server, 1000)]
    us: float = rows[0]["us"]
    return us


def _scale(measured: dict[str, Any]) -> list[str]:
    names = {
        "topic": "one more topic, until every replica offers it",
        "members": "all members start, until each group has one plan and all partitions",
        "join": "one more member, until the same",
        "kill": "a member is killed with -9, until the same, with its session's time-out",
        "promotion": "a slave is promoted, until all members know it and both replicas have renewed their offers",
        "commits": "each member commits each of its partitions, again and again",
        "idle": "nothing",
        "restart": "ZooKeeper is killed and started again, until it has answered all, and the groups are settled",
    }
    sizes, server = measured["sizes"], measured["zookeeper"]
    lines = ["", "## A large cluster, simulated", ""]
    lines.append(
        f"One ZooKeeper, {sizes['brokers']} broker ids with {sizes['replicas']} replicas each, {sizes['topics']} "
        f"topics with {sizes['partitions']:,} partitions together, and {sizes['consumers']} members in "
        f"{sizes['groups']} groups. The brokers and members are the product's code for ZooKeeper, with a session each, "
        f"without messages; all share the two cores. Sessions have a time-out of {sizes['session_ms'] / 1e3:g} s. "
        "Seconds, and seconds of a processor: of ZooKeeper, and of the simulated processes together."
    )
    lines += ["", "| event | seconds | ZooKeeper | processes | of it their event loops |", "|---" * 5 + "|"]
    for event, name in names.items():
        figures = measured["events"][event]
        cells = [f"{figures[f'{what}s']:.1f}" for what in ("", "zookeeper_cpu_", "processes_cpu_", "loops_cpu_")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [
        "",
        f"ZooKeeper then has {server['nodes']:,} nodes, {server['ephemeral_nodes']:,} of them ephemeral, "
        f"{server['watches']:,} watches and {server['sessions']:,} sessions. It uses {server['heap_used_mb']:,.0f} MB "
        f"of Java's heap, with garbage, and {server['memory_mb']:,.0f} MB of memory. The members commit "
        f"{measured['events']['commits']['per_s']:,.0f} offsets a second: {measured['constants']['commit_us']:.0f} µs "
        f"of ZooKeeper's processor each. The load of the machine was {measured['load']:.0f}: other work ran beside it.",
    ]
    return lines


def _checks(found: list[dict[str, Any]]) -> list[str]:
    lines = ["", "## Targets", ""]
    lines += ["Targets in messages per second are for a loopback of 2 GB/s, and are scaled by the loopback here.", ""]
    lines += ["| | figure | target | |", "|---|---|---|---|"]
    for check in found:
        mark = "reached" if check["reached"] else "**missed**"
        lines.append(f"| {check['what']} | {check['figure']:.2f} | {check['target']:.2f} | {mark} |")
    return lines


def plot(results: dict[str, Any], path: Path) -> None:
    """Draws the share of the raw limit that each way reaches."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "metamq"
    from matplotlib import pyplot

    limits = results["raw_bytes_per_s"]
    rows = results["messages_per_s"]
    ways = [way for way in WAYS if way != "listener"]
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=False)
    for place, size in zip(axes, sorted({row["message_bytes"] for row in rows}), strict=True):
        chosen = [row for row in rows if row["message_bytes"] == size]
        width = 0.8 / len(chosen)
        for number, row in enumerate(chosen):
            heights = [row[way] * size / 1e9 for way in ways]
            positions = [index + (number - (len(chosen) - 1) / 2) * width for index in range(len(ways))]
            place.bar(positions, heights, width, label=f"{row['partitions']:,} partitions")
        place.axhline(limits["copy_write"] / 1e9, linestyle="--", color="tab:red", label="raw copy and write")
        place.axhline(limits["read_send"] / 1e9, linestyle=":", color="black", label="raw read and send")
        place.set_xticks(range(len(ways)), [way.replace(", ", "\n") for way in ways], fontsize=8)
        place.set_title(f"{size:,}-byte messages")
        place.set_ylabel("GB of values per second")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Writes the page and the plot."""
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "bench" / "results" / "latest.json"
    results = json.loads(source.read_text())
    remarks: dict[str, str] = {}
    for part in OWN_FILES:
        if part not in results and (own := source.with_name(f"{part}.json")).exists():
            measured = json.loads(own.read_text())
            results[part] = measured[part]
            results["checks"] += measured["checks"]
            remarks[part] = " ".join(filter(None, [f"Measured {measured['date']}.", measured.get("remark")]))
    machine = results["machine"]
    lines = [INTRODUCTION.rstrip(), ""]
    lines.append(
        f"This run: {results['date']}, {machine['cpu']}, {machine['cores']} cores, Python {machine['python']}, "
        f"metamq {machine['metamq']}, {results['rounds']} rounds."
    )
    if "remark" in results:
        lines += ["", results["remark"]]
    if machine["gives_memory_back"]:
        lines += ["", "The machine gave freed memory back to its host during the run, so figures of writes vary."]
    for part, write in (
        ("throughput", _throughput),
        ("latency", _latency),
        ("lifecycle", _lifecycle),
        ("partitions", _partitions),
        ("rebalance", _rebalance),
        ("replication", _replication),
        ("transactions", _transactions),
        ("scan", _scan),
        ("console", _console),
        ("spark", _spark),
        ("failover", _failover),
        ("rolling", _rolling),
        ("security", _security),
        ("disk", _disk),
        ("puts", _puts),
        ("scale", _scale),
        ("idle", _idle),
    ):
        if part in results:
            lines += write(results[part])
        if part in remarks:
            lines += ["", remarks[part]]
    lines += _checks(results["checks"])
    lines.append(HOW.rstrip())
    (ROOT / "docs" / "performance.md").write_text("\n".join(lines) + "\n")
    if "throughput" in results:
        plot(results["throughput"], ROOT / "docs" / "performance.svg")


if __name__ == "__main__":
    main()
