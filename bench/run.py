"""`./dev bench`: measures every figure of docs/performance.md, and the raw limits of this machine, in one run.

    ./dev bench                 all parts, but for the long ones
    ./dev bench --quick         one round, for a first look
    ./dev bench --only latency  a part: throughput, latency, lifecycle, partitions, rebalance, replication,
                                transactions, scan, console, spark
    ./dev bench --only scan --gigabytes 10
                                the memory of a scan, with a topic of this size; it needs as much disk space
    ./dev bench --only failover a part that takes an hour, and is not in the run of all parts; others of this kind are
                                rolling, security, disk, cores, puts and idle
    ./dev bench --only scale --brokers 100 --partitions 20000 --consumers 40
                                a simulation of a cluster of this size on ZooKeeper, without data; it takes minutes

Writes bench/results/latest.json, from which bench/report.py makes docs/performance.md. Figures are medians over the
rounds. Every round measures the raw limits too, so that both see the same machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import metamq
from metamq.testing import cluster

sys.path.insert(0, str(Path(__file__).parent))

import latency
import lifecycle
import partitions
import raw
import replication
import scale
import scan
import throughput
import transactions
from settle import gives_memory_back

RESULTS = Path(__file__).parent / "results"
PARTS = (
    "throughput", "latency", "lifecycle", "partitions", "rebalance", "replication", "transactions", "scan", "console",
    "spark",
)  # fmt: skip
LONG_PARTS = ("failover", "rolling", "security", "disk", "cores", "puts", "scale", "idle")
COMPARED = (1024, 4)
"""The shape that is compared with the raw limits, which are measured directly before it."""
ENOUGH_FSYNCS = 1250
"""Fsyncs per second for 5,000 transactions, four per fsync."""
SHAPES = ((100, 1), (100, 4), (100, 1000), (1024, 1), (1024, 4), (1024, 1000))


def say(text: str) -> None:
    """Prints a line on standard error."""
    print(text, file=sys.stderr, flush=True)


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Returns the median of each figure."""
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def run_throughput(rounds: int) -> dict[str, Any]:
    """Measures the raw limits and every way to produce and consume, round by round."""
    raws: list[dict[str, float]] = []
    rates: dict[tuple[int, int], list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, cluster(folder=Path(folder)) as running:
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            for size, partitions in SHAPES:
                if (size, partitions) == COMPARED:
                    raws.append(raw.measure(folder))
                    say("raw: " + ", ".join(f"{k} {v / 1e9:.2f} GB/s" for k, v in raws[-1].items()))
                say(f"{size} B, {partitions} partitions")
                rates[size, partitions].append(throughput.measure(running, size, partitions, say))
    many = {}
    for size in (100, 1024):
        pairs = zip(rates[size, 1000], rates[size, 4], strict=True)
        many[str(size)] = medians([{way: many[way] / few[way] for way in few} for many, few in pairs])
    return {
        "raw_bytes_per_s": medians(raws),
        "to_raw": medians([_to_raw(*one) for one in zip(raws, rates[COMPARED], strict=True)]),
        "many_to_few": many,
        "messages_per_s": [
            {"message_bytes": size, "partitions": partitions, **medians(measured)}
            for (size, partitions), measured in rates.items()
        ],
    }


def _to_raw(limits: dict[str, float], rates: dict[str, float]) -> dict[str, float]:
    """Returns the ratios to the raw limits of one round, with figures of the same minute."""
    return {
        "send_many / copy_write": rates["send_many"] * COMPARED[0] / limits["copy_write"],
        "batches / read_send": rates["batches"] * COMPARED[0] / limits["read_send"],
    }


def run_latency(rounds: int) -> dict[str, Any]:
    """Measures latency; returns the median of each percentile."""
    with cluster() as running:
        measured = [latency.measure(running) for _ in range(rounds)]
    found = {name: medians([one[name] for one in measured]) for name in measured[0]}
    for name, figures in found.items():
        say(f"{name}: " + ", ".join(f"{k} {v:.3f}" for k, v in figures.items()))
    return found


def run_lifecycle(rounds: int) -> dict[str, Any]:
    """Measures start-up, recovery and memory."""
    return {"by_log_size": lifecycle.against_size(say), "many_partitions": lifecycle.many_partitions(say)}


def run_partitions(rounds: int) -> dict[str, Any]:
    """Measures the cost of many partitions and of many topics."""
    return partitions.measure(rounds, say)


def run_rebalance(rounds: int) -> dict[str, Any]:
    """Measures join, leave and kill of a member among ten."""
    import rebalance

    measured: dict[str, Any] = rebalance.measure(say)
    return measured


def run_replication(rounds: int) -> dict[str, Any]:
    """Measures a master and its slave."""
    return replication.measure(rounds, say)


def run_transactions(rounds: int) -> dict[str, Any]:
    """Measures commits, memory and recovery."""
    return transactions.measure(rounds, say)


def run_scan(rounds: int, gigabytes: float) -> dict[str, Any]:
    """Measures a topic read as a table: its speed, and its memory with a topic of this size."""
    return scan.measure(rounds, gigabytes, say)


def run_console(rounds: int) -> dict[str, Any]:
    """Measures the pages of the console. It needs the extra `console`."""
    import console_pages

    return console_pages.measure(rounds, say)


def run_spark(rounds: int) -> dict[str, Any]:
    """Measures Spark's scan, sink and latency. It needs pyspark; the other parts do not."""
    import spark

    return spark.measure(rounds, say)


def run_failover(rounds: int) -> dict[str, Any]:
    """Measures the time without an acknowledgement when a master ends, beside Kafka."""
    import failover

    return failover.measure(rounds, say)


def run_rolling(rounds: int) -> dict[str, Any]:
    """Measures the latest message in a rolling restart of six brokers."""
    import rolling

    return rolling.measure(rounds, say)


def run_security(rounds: int) -> dict[str, Any]:
    """Measures TLS, logins and rights, beside a cluster without them. It needs the extra `security`."""
    import secure

    return secure.measure(rounds, say)


def run_disk(rounds: int) -> dict[str, Any]:
    """Measures a cold scan, and the latency of a producer beside work that needs the disk or the loop."""
    import disk

    return disk.measure(rounds, say)


def run_cores(rounds: int) -> dict[str, Any]:
    """Measures one and two broker processes of a command."""
    import cores

    return cores.measure(rounds, say)


def run_puts(rounds: int) -> dict[str, Any]:
    """Measures a broker's processor time for small requests, beside echo servers."""
    import puts

    return puts.measure(rounds, say)


def run_scale(rounds: int, sizes: scale.Sizes) -> dict[str, Any]:
    """Simulates a large cluster on ZooKeeper."""
    return scale.measure(sizes, say)


def run_idle(rounds: int, most: int) -> dict[str, Any]:
    """Measures a thousand idle clients of each kind in one process, then `most` consumers, if that is above 0."""
    import idle

    return idle.measure(say, most)


class Targets:
    """The project's targets: (what, figure, target, reached) of each that was measured."""

    def __init__(self) -> None:
        self.found: list[tuple[str, float, float, bool]] = []

    def at_least(self, what: str, figure: float, target: float) -> None:
        self.found.append((what, figure, target, figure >= target))

    def at_most(self, what: str, figure: float, target: float) -> None:
        self.found.append((what, figure, target, figure <= target))

    def throughput(self, measured: dict[str, Any]) -> None:
        limits = measured["raw_bytes_per_s"]
        rates = {(row["message_bytes"], row["partitions"]): row for row in measured["messages_per_s"]}
        scale = limits["loopback"] / 2e9
        ratios = measured["to_raw"]
        self.at_least("send_many 1 KiB / raw copy and write", ratios["send_many / copy_write"], 0.40)
        self.at_least("batches 1 KiB / raw read and send", ratios["batches / read_send"], 0.50)
        small = rates[100, 4]
        self.at_least("send 100 B, M/s", small["send"] / 1e6, 1.0 * scale)
        self.at_least("iteration 100 B, M/s", small["iteration"] / 1e6, 1.5 * scale)
        self.at_least("batches values 100 B, M/s", small["batches, values"] / 1e6, 5.0 * scale)
        self.at_least("batches arrow 100 B, M/s", small["batches, arrow"] / 1e6, 5.0 * scale)
        for size, ways in measured["many_to_few"].items():
            for way, ratio in ways.items():
                self.at_least(f"{way} {size} B, 1,000 / 4 partitions", ratio, 0.80)

    def latency(self, measured: dict[str, Any]) -> None:
        self.at_most("blocking round trip p50, ms", measured["round_trip"]["p50_ms"], 0.3)
        self.at_most("end to end p50 at 1,000/s, ms", measured["end_to_end"]["p50_ms"], 1.0)

    def lifecycle(self, measured: dict[str, Any]) -> None:
        many = measured["many_partitions"]
        self.at_most("broker with 1,000 partitions, MB", max(many["used_mb"], many["restarted_mb"]), 120)
        self.at_most("its restart after a clean stop, s", many["restart_after_clean_stop_s"], 3.0)

    def partitions(self, measured: dict[str, Any]) -> None:
        most, topics = measured["by_count"][-1], measured["topics"]
        what = f"{most['partitions']:,} partitions"
        self.at_most(f"creation of {what}, s", most["created"]["s"], 10)
        self.at_most(f"start with {what}, s", most["clean"]["s"], 3)
        self.at_most(f"start with {what} after kill -9, s", most["killed"]["s"], 3)
        self.at_most(f"stop with {what}, s", most["stop_s"], 5)
        self.at_most(f"broker with {what}, MB", most["mb"], 100)
        self.at_most(f"one more topic beside {topics['topics']:,}, s", topics["one_more"]["s"], 0.2)
        self.at_most(f"doctor with {topics['topics']:,} topics, s", topics["doctor_s"], 3)

    def rebalance(self, measured: dict[str, Any]) -> None:
        for event in ("join", "leave", "kill"):
            self.at_most(f"steady after {event}, s", measured[f"{event}_s"], 1.0)

    def replication(self, measured: dict[str, Any]) -> None:
        for row in measured["throughput"]:
            self.at_least(f"sync / async, send_many {row['message_bytes']:.0f} B", row["ratio"], 0.60)
        self.at_most("added latency of sync p50, ms", measured["latency"]["added_p50_ms"], 1.0)
        self.at_least("catching up / raw copy", measured["catching_up"]["ratio"], 0.50)
        for fate in ("living", "dead"):
            self.at_most(f"promotion, {fate} master, s", measured["promotion"][f"{fate}_s"], 1.0)

    def transactions(self, measured: dict[str, Any]) -> None:
        commits = measured["commits"]
        target = 5000 * min(commits["fsyncs_per_s"] / ENOUGH_FSYNCS, 1)
        self.at_least("one-phase commits, 16 clients, per s", commits["one_phase_per_s"], target)
        self.at_least("transactions per fsync", commits["per_fsync"], 4.0)
        self.at_least("two-phase / one-phase", commits["two_to_one"], 0.50)
        self.at_most("a commit over two fsyncs p50, ms", commits["over_two_fsyncs_ms"], 1.0)
        self.at_most("an open branch with a million messages, MB", measured["open_branch"]["mb"], 50)
        self.at_most("recovery of a journal of 1 GB, s", measured["recovery"]["s"], 10)
        self.at_least("send_many with / without open branches", measured["beside"]["ratio"], 0.95)

    def scan(self, measured: dict[str, Any]) -> None:
        large = measured["memory"]
        size_gb = large["messages"] * large["value_bytes"] / 1e9
        for way, name in (("files", "from files"), ("sent", "sent by the broker")):
            self.at_most(f"memory of a scan of {size_gb:g} GB, {name}, MB", large[way]["peak_bytes"] / 1e6, 1000)

    def console(self, measured: dict[str, Any]) -> None:
        for row in measured["pages"]:
            if row["page"] == "a file":
                continue
            groups = f"{row['groups']} group{'s' if row['groups'] > 1 else ''}"
            self.at_most(f"console, {row['page']}, {groups}, p50, ms", row["p50_ms"], 500)

    def spark(self, measured: dict[str, Any]) -> None:
        for row, target in zip(measured["scans"], (0.70, 0.50), strict=True):
            self.at_least(f"Spark's scan / its ceiling, {row['message_bytes']:.0f} B", row["ratio"], target)
        self.at_least("Spark's sink, at least once / noop", measured["sink"]["least_to_noop"], 0.40)
        self.at_least("Spark's sink, exactly / at least once", measured["sink"]["exactly_to_least"], 0.70)
        self.at_most("Spark, a trickle end to end p50, ms", measured["trickle"]["p50_ms"], 100)

    def failover(self, measured: dict[str, Any]) -> None:
        for row in measured["rows"]:
            session_s = row["session_ms"] / 1000
            limit_s = 0.3 if row["fault"] == "stop" else session_s + 0.5
            what = f"gap p99, {row['fault']}, session {session_s:g} s"
            self.at_most(f"{what}, s", row["metamq_p99_s"], limit_s)
            if "kafka_p50_s" in row and row["fault"] != "stop":
                ratio = row["metamq_p50_s"] / row["kafka_p50_s"]
                self.at_most(f"gap p50 / Kafka's, {row['fault']}, session {session_s:g} s", ratio, 1.0)

    def rolling(self, measured: dict[str, Any]) -> None:
        self.at_most("latest message in a rolling restart, s", measured["max_s"], 1.0)

    def cores(self, measured: dict[str, Any]) -> None:
        self.at_least("small PUTs, two processes / one, by processor time", measured["put"]["possible_ratio"], 1.8)
        self.at_least("large fetches, two processes / one, by processor time", measured["fetch"]["possible_ratio"], 1.6)

    def puts(self, measured: dict[str, Any]) -> None:
        for row in measured["rows"]:
            connections, window = row["connections"], row["window"]
            if row["server"] in ("alone", "async", "sync") and row["messages"] == 1 and connections * window > 1:
                what = f"{row['server']}, connections x under way {connections:,} x {window}"
                self.at_least(f"PUTs a second of a core, {what}", 1e6 / row["us"], 20_000)

    def scale(self, measured: dict[str, Any]) -> None:
        """It has no targets: the figures depend on the sizes."""

    def idle(self, measured: dict[str, Any]) -> None:
        for row in measured["rows"]:
            what = f"{row['clients']:,} idle {row['api']} {row['kind']}s"
            self.at_most(f"{what}, kB each", row["kb"], 50)
            self.at_most(f"{what}, % of a core each", row["client_percent"], 0.02)
            self.at_most(f"{what}, threads each", row["threads"] / row["clients"], 0.05)

    def security(self, measured: dict[str, Any]) -> None:
        for way in ("produce", "consume"):
            for side in ("broker", "client"):
                added = measured[f"added_{way}_{side}_s_per_gb"]
                self.at_most(f"TLS adds, {way}, {side}: processor s per GB", added, 1.5)
            self.at_least(f"TLS / plain, {way} 1 KiB", measured[f"{way}_ratio"], 0.50)
        for way in ("certificate", "password"):
            self.at_most(f"1,000 new connections by {way}, s", measured[f"{way}_connections_s"], 10)
        self.at_most("checks of rights / a PUT", measured["rights_to_put"], 0.01)

    def disk(self, measured: dict[str, Any]) -> None:
        self.at_least("cold scan / raw disk", measured["scan"]["ratio"], 0.80)
        for row in measured["latency"]:
            self.at_most(f"producer p99.9 beside {row['beside']}, ms", row["p99_9_ms"], 10)


def checks(results: dict[str, Any]) -> list[tuple[str, float, float, bool]]:
    """Returns (what, figure, target, reached) for each of the project's targets."""
    targets = Targets()
    for name in (*PARTS, *LONG_PARTS):
        if name in results:
            getattr(targets, name)(results[name])
    return targets.found


def machine() -> dict[str, Any]:
    """Describes the machine."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "metamq": metamq.__version__,
        "gives_memory_back": gives_memory_back(),
    }


def _sizes(arguments: argparse.Namespace) -> scale.Sizes:
    return scale.Sizes(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(scale.Sizes)})


def main() -> int:
    """Runs the chosen parts; returns 1 if a target is missed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=(*PARTS, *LONG_PARTS), action="append")
    parser.add_argument("--gigabytes", type=float, default=scan.GIGABYTES, help="size of the topic for a scan's memory")
    parser.add_argument("--clients", type=int, default=0, help="idle: also so many consumers in one process")
    for field in dataclasses.fields(scale.Sizes):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=type(field.default),
            default=field.default,
            help="of the part scale, see bench/scale.py",
        )
    parser.add_argument("--remark", help="a sentence about this run, for the report")
    parser.add_argument("--output", type=Path, default=RESULTS / "latest.json")
    arguments = parser.parse_args()
    runners: dict[str, Callable[[int], dict[str, Any]]] = {
        "throughput": run_throughput,
        "latency": run_latency,
        "lifecycle": run_lifecycle,
        "partitions": run_partitions,
        "rebalance": run_rebalance,
        "replication": run_replication,
        "transactions": run_transactions,
        "scan": partial(run_scan, gigabytes=arguments.gigabytes),
        "console": run_console,
        "spark": run_spark,
        "failover": run_failover,
        "rolling": run_rolling,
        "security": run_security,
        "disk": run_disk,
        "cores": run_cores,
        "puts": run_puts,
        "scale": partial(run_scale, sizes=_sizes(arguments)),
        "idle": partial(run_idle, most=arguments.clients),
    }
    results: dict[str, Any] = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "rounds": 0}
    results["rounds"] = 1 if arguments.quick else arguments.rounds
    if arguments.remark:
        results["remark"] = arguments.remark
    if gives_memory_back():
        say("This machine gives freed memory back to its host, which may slow down writes by up to six times.")
        say("To turn that off, as root: echo 11 > /sys/module/page_reporting/parameters/page_reporting_order")
    for part in arguments.only or PARTS:
        say(f"== {part}")
        results[part] = runners[part](results["rounds"])
    found = checks(results)
    results["checks"] = [
        {"what": what, "figure": figure, "target": target, "reached": reached}
        for what, figure, target, reached in found
    ]
    arguments.output.parent.mkdir(exist_ok=True)
    arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    say(f"written to {arguments.output}; `python bench/report.py` makes docs/performance.md from it")
    for what, figure, target, reached in found:
        print(f"{'ok  ' if reached else 'MISS'}  {what:48} {figure:10.3f}   target {target:g}")
    return 0 if all(reached for *_rest, reached in found) else 1


if __name__ == "__main__":
    sys.exit(main())
