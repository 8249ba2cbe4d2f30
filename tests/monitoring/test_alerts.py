"""The files of monitoring/: they name only metrics that exist, and each alert goes off for its fault, and for no other.

Faults are staged on real brokers and clients, whose metrics are recorded before and during the fault. `promtool test
rules` then evaluates the rules over these series, so no test waits for minutes. For a few faults, which would take
hours to stage, one recorded figure is raised (WRITTEN), or the series are written. One test runs Prometheus itself.
"""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import subprocess
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from kazoo.client import KazooClient
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from metamq import Message
from metamq.errors import MetamqError
from metamq.prometheus import ClientCollector
from metamq.testing import BrokerProcess, Cluster
from metamq.testing import cluster as own_cluster
from metamq.tx import create_outcome_table, dbtx
from tests.broker.test_disk import flip
from tests.monitoring.programs import program
from tests.one_zookeeper import cluster
from tests.parts import http_get, read_to_end, wait_until

FOLDER = Path(__file__).parents[2] / "monitoring"
ALERTS = (FOLDER / "alerts.yml").read_text()
NAMES = re.findall(r"- alert: (\w+)", ALERTS)
EXPRESSIONS = [
    " ".join(found.split()) for found in re.findall(r"expr: (?:>-\n)?(.*?)\n +(?:for|labels):", ALERTS, re.DOTALL)
]
BOARD = json.loads((FOLDER / "grafana.json").read_text())
QUERIES = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
AGES = re.compile(
    r"metamq_(transactions_oldest_prepared|group_lag(_age)?|producer_oldest|dbtx_oldest|consumer_oldest_running)_seconds"
)
"""Metrics that grow with the clock while a fault lasts."""
LISTENS = re.compile(r'msg="Listening on" address=127.0.0.1:(\d+)')
CHANGE_MINUTES = 10
LONG_AFTER, SOON_AFTER = CHANGE_MINUTES + 25, CHANGE_MINUTES + 5
"""Minutes at which an alert is asked for: after every `for`, or inside of the ranges of increase()."""

Series = dict[str, float]
"""The values of a scrape, by metric and labels as PromQL writes them."""


def series(families: Iterator[Metric] | Any, **labels: str) -> Series:
    """One scrape, with the labels that Prometheus adds."""
    found = {}
    for family in families:
        for sample in family.samples:
            named = ", ".join(f'{name}="{value}"' for name, value in sorted({**sample.labels, **labels}.items()))
            found[f"{sample.name}{{{named}}}"] = float(sample.value)
    return found


def scrape(broker: BrokerProcess, name: str) -> Series:
    """A scrape of a broker as Prometheus stores it: without an answer there is only up == 0."""
    up = f'up{{instance="{name}", job="metamq"}}'
    if not broker.running:
        return {up: 0}
    _status, text = http_get(broker.http_port, "/metrics")
    return {up: 1, **series(text_string_to_metric_families(text), instance=name, job="metamq")}


def clients(*them: Any) -> Series:
    registry = CollectorRegistry()
    registry.register(ClientCollector(*them))
    return series(registry.collect(), instance="shop-1", job="shop")


def is_firing(tmp_path: Path, before: Series, during: Series, alert: str, minute: int = LONG_AFTER) -> bool:
    """Whether the alert fires, by promtool: `before` for ten minutes, then `during`."""
    inputs = []
    for name in sorted({*before, *during}):
        first = f"{before[name]}+0x{CHANGE_MINUTES - 1}" if name in before else f"_x{CHANGE_MINUTES}"
        growth = 60 if AGES.match(name) and during.get(name) else 0
        then = f"{during[name]}+{growth}x60" if name in during else "_x60"
        inputs.append({"series": name, "values": f"{first} {then}"})
    query = f'count by (alertname) (ALERTS{{alertname="{alert}", alertstate="firing"}})'
    asked = {"expr": query, "eval_time": f"{minute}m", "exp_samples": []}
    tests = [{"interval": "1m", "input_series": inputs, "promql_expr_test": [asked]}]
    file = tmp_path / "rules_test.json"  # JSON is YAML
    file.write_text(
        json.dumps({"rule_files": [str(FOLDER / "alerts.yml")], "evaluation_interval": "1m", "tests": tests})
    )
    done = subprocess.run([program("promtool"), "test", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0 or f'alertname="{alert}"' in done.stdout + done.stderr, done.stderr
    return done.returncode != 0


def fires(tmp_path: Path, before: Series, during: Series, alert: str, minute: int = LONG_AFTER) -> None:
    """Checks that the fault sets off the alert, and that the alert is silent without the fault."""
    assert is_firing(tmp_path, before, during, alert, minute), {name: during[name] for name in during if "up{" in name}
    assert not is_firing(tmp_path, before, before, alert, minute)


def value(scraped: Series, metric: str) -> float:
    """The sum of a metric's values."""
    return sum(number for name, number in scraped.items() if name.startswith(f"{metric}{{"))


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with cluster(group_lag_s=0.05) as one:
        yield one


def exported(running: Cluster) -> set[str]:
    """The names of all metrics of a broker and of the clients."""
    _status, text = http_get(running.broker.http_port, "/metrics")
    with running.producer() as producer, running.consumer(topics="names") as consumer:
        families = [*text_string_to_metric_families(text), *ClientCollector(producer, consumer).collect()]
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
    return {f"{family.name}{suffix}" for family in families for suffix in suffixes.get(family.type, ("",))}


def test_rules_and_board_name_only_metrics_that_exist(running: Cluster) -> None:
    running.create_topic("names")
    used = {name for one in EXPRESSIONS + QUERIES for name in re.findall(r"\bmetamq_\w+", one)}
    assert len(EXPRESSIONS) == len(NAMES)
    assert len(used) > 25
    assert used <= exported(running), used - exported(running)


def test_grafanas_classes_know_every_field_of_the_board() -> None:
    board = json.loads(JSONEncoder().encode(Dashboard.from_json(BOARD)))
    assert _missing(BOARD, board) == []
    wrong = {**BOARD, "panels": [{**BOARD["panels"][0], "tittle": "a seeded fault"}]}
    board = json.loads(JSONEncoder().encode(Dashboard.from_json(wrong)))
    assert _missing(wrong, board) == ["panels/0/tittle"]


def _missing(wanted: Any, found: Any) -> list[str]:
    """Returns the paths of the fields and values of a document that another one lacks."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        pairs = [(key, value, found.get(key)) for key, value in wanted.items()]
    elif isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        pairs = [(str(number), value, found[number]) for number, value in enumerate(wanted)]
    else:
        return [] if wanted == found else [""]
    return [f"{key}/{path}".rstrip("/") for key, value, other in pairs for path in _missing(value, other)]


def test_each_alert_has_a_line_in_the_runbook_of_alerts() -> None:
    page = (FOLDER.parent / "docs" / "monitoring.md").read_text()
    assert re.findall(r"^### (\w+)$", page, re.MULTILINE) == NAMES
    assert re.findall(r"runbook: docs/monitoring.md#(\w+)", ALERTS) == [name.lower() for name in NAMES]


@pytest.mark.slow
def test_promtool_accepts_the_rules() -> None:
    done = subprocess.run(
        [program("promtool"), "check", "rules", FOLDER / "alerts.yml"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(NAMES)} rules found" in done.stdout


@pytest.mark.slow
def test_a_killed_slave_and_a_killed_master(tmp_path: Path) -> None:
    with cluster() as pair:
        master, slave = pair.broker, pair.add_slave()
        both = {"b-0": master, "b-1": slave}

        def all_of() -> Series:
            return {name: number for one in both for name, number in scrape(both[one], one).items()}

        wait_until(lambda: value(all_of(), "metamq_replication_insync_replicas") == 2)
        before = all_of()
        slave.kill()
        wait_until(lambda: value(all_of(), "metamq_replication_insync_replicas") == 1)
        fires(tmp_path, before, all_of(), "MetamqSlaveNotInSync")
        fires(tmp_path, before, all_of(), "MetamqBrokerDown")
        assert not is_firing(tmp_path, before, all_of(), "MetamqNoMaster")
        slave.start()
        wait_until(lambda: value(all_of(), "metamq_replication_insync_replicas") == 2)
        master.kill()
        wait_until(lambda: value(all_of(), "metamq_replication_linked") == 0)
        fires(tmp_path, before, all_of(), "MetamqNoMaster")
        fires(tmp_path, before, all_of(), "MetamqSlaveUnlinked")


@pytest.mark.slow
def test_a_damaged_log(tmp_path: Path) -> None:
    with cluster(scrub_every_s=0.1) as one:
        one.create_topic("t", partitions=1, flush="ack", segment_bytes=3000)
        with one.producer() as producer:
            for number in range(40):
                producer.send("t", b"%d" % number * 100).result(60)
        before = scrape(one.broker, "b-0")
        logs = [path for path in one.broker.data.rglob("*.log") if "~" not in str(path)]
        flip(str(min(logs)), 100)
        wait_until(lambda: value(scrape(one.broker, "b-0"), "metamq_log_damaged_partitions") == 1)
        fires(tmp_path, before, scrape(one.broker, "b-0"), "MetamqDamagedLog")
        fires(tmp_path, before, scrape(one.broker, "b-0"), "MetamqBrokerNotReady")


@pytest.mark.slow
def test_without_zookeeper_lags_are_not_read(tmp_path: Path) -> None:
    with own_cluster(group_lag_s=0.05) as one:
        wait_until(lambda: "metamq_group_lag_age_seconds" in str(scrape(one.broker, "b-0")))
        before = scrape(one.broker, "b-0")
        one.zookeeper_server.stop()
        wait_until(lambda: value(scrape(one.broker, "b-0"), "metamq_group_lag_age_seconds") > 1)
        during = scrape(one.broker, "b-0")
    fires(
        tmp_path,
        {name: 0 if "lag_age" in name else number for name, number in before.items()},
        during,
        "MetamqGroupLagNotRead",
    )


@pytest.mark.slow
def test_a_group_that_does_not_commit_and_a_transaction_in_doubt(running: Cluster, tmp_path: Path) -> None:
    running.create_topic("orders", partitions=1)
    with running.producer() as producer, running.consumer(topics="orders", group="billing", auto_commit=False):
        wait_until(lambda: 'group="billing"' in str(scrape(running.broker, "b-0")))
        before = scrape(running.broker, "b-0")
        producer.send("orders", b"1").result(60)
        wait_until(lambda: value(scrape(running.broker, "b-0"), "metamq_group_lag_seconds") > 0)
        fires(tmp_path, before, scrape(running.broker, "b-0"), "MetamqGroupBehind")
        xid = producer.xid(1, "doubt")
        producer.tpc_begin(xid)
        producer.send("orders", b"2")
        producer.tpc_prepare()
        wait_until(lambda: value(scrape(running.broker, "b-0"), "metamq_transactions_oldest_prepared_seconds") > 0)
        fires(tmp_path, before, scrape(running.broker, "b-0"), "MetamqTransactionInDoubt")
        producer.tpc_rollback()


@pytest.mark.slow
def test_failed_messages_and_a_stuck_producer(tmp_path: Path) -> None:
    with cluster() as one, one.producer() as producer:
        one.create_topic("t", partitions=1)
        producer.send("t", b"1").result(60)
        assert isinstance(producer.send("nowhere", b"1").exception(60), MetamqError)
        before = clients(producer)
        assert isinstance(producer.send("nowhere", b"2").exception(60), MetamqError)
        fires(tmp_path, before, clients(producer), "MetamqMessagesFailed", SOON_AFTER)
        one.broker.freeze()
        producer.send("t", b"2")
        wait_until(lambda: value(clients(producer), "metamq_producer_oldest_seconds") > 0)
        during = clients(producer)
        one.broker.thaw()
        fires(tmp_path, before, during, "MetamqProducerStuck")


@pytest.mark.slow
def test_a_dbtx_block_that_stays_open(running: Cluster, tmp_path: Path) -> None:
    running.create_topic("blocks", partitions=1)
    with contextlib.closing(sqlite3.connect(tmp_path / "rows")) as database, running.producer() as producer:
        create_outcome_table(database)
        with dbtx(database, producer) as tx:
            tx.send("blocks", b"1")
        before = clients(producer)
        with dbtx(database, producer) as tx:
            tx.send("blocks", b"2")
            wait_until(lambda: value(clients(producer), "metamq_dbtx_oldest_seconds") > 0)
            during = clients(producer)
        idle = {name: 0.0 if "oldest" in name else number for name, number in before.items()}
        fires(tmp_path, idle, during, "MetamqBlockStuck")


WRITTEN: Mapping[str, tuple[str, float]] = {
    "MetamqMessagesGivenUp": ("metamq_replication_given_up_messages_total", 3),
    "MetamqDelayedDropped": ("metamq_delayed_refused_total", 1),
    "MetamqRequestsHeldBack": ("metamq_broker_requests_held_back", 2),
    "MetamqFailedLogins": ("metamq_broker_failed_logins_total", 100),
}


@pytest.mark.slow
@pytest.mark.parametrize("alert", WRITTEN)
def test_figures_of_a_broker_that_rise(alert: str, running: Cluster, tmp_path: Path) -> None:
    """The recorded figures of a broker, with one of them as in the fault."""
    metric, risen = WRITTEN[alert]
    before = scrape(running.broker, "b-0")
    (name,) = [one for one in before if one.startswith(f"{metric}{{")]
    fires(tmp_path, before, {**before, name: before[name] + risen}, alert, SOON_AFTER + 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alert", "metric"),
    [
        ("MetamqMessagesGivenUp", "metamq_replication_given_up_messages_total"),
        ("MetamqDelayedDropped", "metamq_delayed_refused_total"),
        ("MetamqMessagesFailed", "metamq_producer_failed_messages_total"),
        ("MetamqMessagesLost", "metamq_consumer_lost_messages_total"),
        ("MetamqDeadLetters", "metamq_consumer_dead_letters_total"),
    ],
)
def test_the_first_value_of_a_counter_counts(alert: str, metric: str, tmp_path: Path) -> None:
    """The counter appears with its first event, or the first scrape comes after it."""
    name = f'{metric}{{instance="shop-1", job="shop"}}'
    fires(tmp_path, {}, {name: 1.0}, alert, SOON_AFTER)
    assert not is_firing(tmp_path, {}, {name: 1.0}, alert, CHANGE_MINUTES + 62), "it is over after the range"


@pytest.mark.slow
def test_replicas_in_sync_are_counted_for_a_broker_id_over_a_failover(tmp_path: Path) -> None:
    """The master is lost, and its slave takes over: one replica is in sync."""

    def replica(name: str, number: int, insync: int | None) -> Series:
        labels = f'broker="0", instance="{name}", job="metamq"'
        info = f'metamq_replica_info{{{labels}, replica="{number}"}}'
        return {info: 1.0, **({} if insync is None else {f"metamq_replication_insync_replicas{{{labels}}}": insync})}

    before = {**replica("b-0", 0, 2), **replica("b-1", 1, None)}
    fires(tmp_path, before, replica("b-1", 1, 1), "MetamqSlaveNotInSync")
    fires(tmp_path, before, replica("b-1", 2, 1), "MetamqSlaveNotInSync")  # another replica has the address now
    assert not is_firing(tmp_path, before, {**replica("b-0", 0, None), **replica("b-1", 1, 2)}, "MetamqSlaveNotInSync")


@pytest.mark.slow
def test_a_long_interval_between_readings_is_no_fault(tmp_path: Path) -> None:
    labels = '{instance="b-0", job="metamq"}'
    age, interval = f"metamq_group_lag_age_seconds{labels}", f"metamq_group_lag_interval_seconds{labels}"
    before = {age: 0.0, interval: 3600.0}
    assert not is_firing(tmp_path, before, {age: 1.0, interval: 3600.0}, "MetamqGroupLagNotRead")
    fires(tmp_path, {}, {age: 1.0, interval: 30.0}, "MetamqGroupLagNotRead")


@pytest.mark.slow
def test_lost_messages(running: Cluster, tmp_path: Path) -> None:
    running.create_topic("lossy", partitions=1)
    with running.consumer(topics="lossy", group="slow") as consumer:
        before = clients(consumer)
    (name,) = [one for one in before if one.startswith("metamq_consumer_lost_messages_total{")]
    fires(tmp_path, before, {**before, name: 7.0}, "MetamqMessagesLost", SOON_AFTER)


@pytest.mark.slow
def test_a_group_whose_offsets_are_in_a_file_and_that_published_no_progress(running: Cluster, tmp_path: Path) -> None:
    running.create_topic("letters", partitions=1)
    with running.producer() as producer:
        producer.send("letters", b"1").result(60)
    with running.consumer(topics="letters", group="copies", idle_timeout_s=1) as consumer:
        read_to_end(consumer)
    lags = [f'metamq_group_lag_{name}{{broker="0", group="copies"' for name in ("messages", "unknown_partitions")]
    wait_until(lambda: lags[0] in str(scrape(running.broker, "b-0")))
    before = scrape(running.broker, "b-0")
    record = {"next": None, "epoch": None, "topic_id": None, "generation": 9, "consumer": "c", "kept_by": "files"}
    zookeeper = KazooClient(running.zookeeper)
    zookeeper.start()
    zookeeper.set("/meta/consumers/copies/offsets/letters/0-0", json.dumps(record).encode())
    zookeeper.stop()
    zookeeper.close()
    wait_until(lambda: lags[0] not in str(scrape(running.broker, "b-0")))
    fires(tmp_path, before, scrape(running.broker, "b-0"), "MetamqGroupLagUnknown")


@pytest.mark.slow
def test_a_dead_letter_and_a_handler_that_does_not_return(running: Cluster, tmp_path: Path) -> None:
    running.create_topic("jobs", partitions=1)
    busy, go_on = threading.Event(), threading.Event()

    def handle(message: Message[bytes]) -> None:
        if message.value == b"bad":
            raise ValueError("bad")
        if message.value == b"slow":
            busy.set()
            go_on.wait(600)

    with running.producer() as producer, running.consumer(topics="jobs", group="workers") as consumer:
        thread = threading.Thread(target=consumer.run, args=(handle,), kwargs={"max_attempts": 1})
        thread.start()
        producer.send("jobs", b"good").result(60)
        wait_until(lambda: value(clients(consumer), "metamq_consumer_handler_seconds_count") == 1)
        before = clients(consumer)
        for job in (b"bad", b"slow"):
            producer.send("jobs", job).result(60)
        assert busy.wait(60)
        during = clients(consumer)
        consumer.stop()
        go_on.set()
        thread.join(60)
    idle = {name: 0.0 if "running" in name else number for name, number in before.items()}
    fires(tmp_path, idle, during, "MetamqDeadLetters", SOON_AFTER)
    fires(tmp_path, idle, during, "MetamqHandlerStuck")


@pytest.mark.slow
def test_a_slow_disk(tmp_path: Path) -> None:
    """100 fsyncs a minute: fast ones before, then each between 1 s and 2.5 s."""
    labels = 'instance="b-0", job="metamq"'
    fast, slow = ("0.0005", "1.0"), ("2.5", "+Inf")
    inputs = {f'metamq_disk_fsync_seconds_bucket{{{labels}, le="{le}"}}': (100, 0) for le in fast}
    inputs |= {f'metamq_disk_fsync_seconds_bucket{{{labels}, le="{le}"}}': (100, 100) for le in slow}
    written = [{"series": name, "values": f"0+{a}x9 {10 * a}+{b}x60"} for name, (a, b) in inputs.items()]
    query = 'count by (alertname) (ALERTS{alertname="MetamqSlowDisk", alertstate="firing"})'
    expected = {9: [], 35: [{"labels": '{alertname="MetamqSlowDisk"}', "value": 1}]}
    asked = [{"expr": query, "eval_time": f"{at}m", "exp_samples": found} for at, found in expected.items()]
    file = tmp_path / "rules_test.json"
    rules = {"rule_files": [str(FOLDER / "alerts.yml")], "evaluation_interval": "1m"}
    file.write_text(
        json.dumps({**rules, "tests": [{"interval": "1m", "input_series": written, "promql_expr_test": asked}]})
    )
    done = subprocess.run([program("promtool"), "test", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def prometheus_get(port: int, path: str, **query: str) -> Any:
    """The data of an answer of Prometheus's HTTP API."""
    url = f"/api/v1/{path}?{urllib.parse.urlencode(query)}"
    status, text = http_get(port, url)
    assert status == 200, (query, text)
    return json.loads(text)["data"]


@pytest.mark.slow
def test_prometheus_runs_the_rules_and_the_queries_of_the_board(running: Cluster, tmp_path: Path) -> None:
    dead = BrokerProcess(running.zookeeper, tmp_path / "dead", 7)
    dead.start()
    dead.kill()
    ports = [running.broker.http_port, dead.http_port]
    scrape = {"job_name": "metamq", "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}]}
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(FOLDER / "alerts.yml")],
        "scrape_configs": [scrape],
    }
    (tmp_path / "prometheus.json").write_text(json.dumps(config))
    command = [
        program("prometheus"), f"--config.file={tmp_path}/prometheus.json", f"--storage.tsdb.path={tmp_path}/data",
        "--web.listen-address=127.0.0.1:0",
    ]  # fmt: skip
    said = tmp_path / "prometheus.log"
    with said.open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            wait_until(lambda: LISTENS.search(said.read_text()))
            port = int(LISTENS.findall(said.read_text())[0])
            wait_until(lambda: http_get(port, "/-/ready")[0] == 200)

            def alerts() -> set[str]:
                """Those of brokers: groups of other tests may have alerts of their own."""
                labels = [one["labels"] for one in prometheus_get(port, "alerts")["alerts"]]
                return {one["alertname"] for one in labels if "instance" in one}

            wait_until(alerts)
            assert alerts() == {"MetamqBrokerDown"}
            wait_until(lambda: {rule["health"] for rule in rules_of(port)} == {"ok"})
            assert {rule["name"] for rule in rules_of(port)} == set(NAMES)
            for query in QUERIES:
                prometheus_get(port, "query", query=query.replace("$__rate_interval", "1m"))
            # The rules may have run before the first scrape of the broker.
            wait_until(lambda: prometheus_get(port, "query", query="metamq_broker_ready")["result"])
            (ready,) = prometheus_get(port, "query", query="metamq_broker_ready")["result"]
            assert ready["value"][1] == "1"
        finally:
            server.terminate()


def rules_of(port: int) -> list[dict[str, Any]]:
    return [rule for group in prometheus_get(port, "rules")["groups"] for rule in group["rules"]]


def test_every_alert_is_set_off_by_a_test() -> None:
    text = Path(__file__).read_text()
    assert [name for name in NAMES if f'"{name}"' not in text] == []
