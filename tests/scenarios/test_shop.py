"""docs/shop.md: its code as printed, with a real PostgreSQL: kills lose no order and ship none twice."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psycopg
import pytest

from metamq.testing import Cluster, cluster
from metamq.zk.server.ports import free_port
from tests.parts import SLOW_S, http_get, read_to_end, wait_until
from tests.postgres import Postgres, running_postgres
from tests.scenarios.test_fastapi import process, served, write_files

pytestmark = pytest.mark.slow
PRODUCTS = ("tea", "coffee", "rice")


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch) -> Iterator[Postgres]:
    with running_postgres() as server:
        place = dict(part.split("=") for part in server.dsn.split())
        for variable, name in (("PGHOST", "host"), ("PGUSER", "user"), ("PGDATABASE", "dbname")):
            monkeypatch.setenv(variable, place[name])
        yield server


@pytest.fixture
def running() -> Iterator[Cluster]:
    with cluster() as one:
        yield one


@pytest.fixture
def commands(tmp_path: Path, database: Postgres, running: Cluster, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The arguments of the recovery, and of the worker. Their files, the tables and the topic are there."""
    arguments = write_files("docs/shop.md", tmp_path)
    monkeypatch.setenv("METAMQ_ZOOKEEPER", running.zookeeper)
    for _ in range(2):  # it may be repeated
        subprocess.run([sys.executable, "-W", "error", "shop.py"], cwd=tmp_path, check=True, timeout=250)
    return arguments


@pytest.fixture
def worker(commands: list[list[str]]) -> list[str]:
    return commands[1]


def on_port(worker: list[str], port: int) -> list[str]:
    return [*worker, "--http-port", str(port)]


class Customers(threading.Thread):
    """Order a dragon, and then other products until the service is gone."""

    def __init__(self, client: httpx.Client) -> None:
        super().__init__()
        self.accepted: list[int] = []
        self._client = client

    def run(self) -> None:
        for product in itertools.chain(["dragon"], itertools.cycle(PRODUCTS)):
            try:
                answer = self._client.post("/orders", json={"product": product})
            except httpx.TransportError:
                return
            if answer.status_code == 201:
                self.accepted.append(answer.json()["id"])


def rows(database: Postgres, query: str) -> list[int]:
    with psycopg.connect(database.dsn) as connection:
        return [number for (number,) in connection.execute(query).fetchall()]  # type: ignore[call-overload]


def test_kills_lose_no_order_and_ship_none_twice(
    commands: list[list[str]], database: Postgres, running: Cluster, tmp_path: Path
) -> None:
    accepted: list[int] = []
    recovery, worker = commands
    with process(tmp_path, running, *recovery):
        for _ in range(3):
            with (
                process(tmp_path, running, *on_port(worker, free_port())) as shipping,
                served(tmp_path, running, "web:app") as (web, client),
            ):
                customers = Customers(client)
                customers.start()
                wait_until(lambda: len(customers.accepted) > 40, what="some orders")  # noqa: B023
                shipped = f"SELECT order_id FROM parcels WHERE order_id >= {customers.accepted[0]}"
                wait_until(lambda: len(rows(database, shipped)) > 5, what="some parcels")  # noqa: B023
                for one in (shipping, web):
                    one.kill()
                    one.wait()
                customers.join(SLOW_S)
                accepted += customers.accepted
        ordered = rows(database, "SELECT id FROM orders WHERE product <> 'dragon' ORDER BY id")
        assert set(accepted) <= set(rows(database, "SELECT id FROM orders"))
        with process(tmp_path, running, *on_port(worker, free_port())):
            parcels = "SELECT order_id FROM parcels ORDER BY order_id"
            wait_until(lambda: rows(database, parcels) == ordered, what="all parcels")
    with running.consumer(topics="orders", idle_timeout_s=0.5, decode=json.loads) as consumer:
        sent = [message.value["id"] for message in read_to_end(consumer)]
    assert sorted(sent) == rows(database, "SELECT id FROM orders ORDER BY id")
    with running.consumer(topics="shipping.dead-letter", idle_timeout_s=0.5, decode=json.loads) as consumer:
        assert {message.value["product"] for message in read_to_end(consumer)} == {"dragon"}


def test_while_the_database_is_down_orders_wait(
    worker: list[str], database: Postgres, running: Cluster, tmp_path: Path
) -> None:
    port = free_port()
    with (
        process(tmp_path, running, *on_port(worker, port)) as shipping,
        served(tmp_path, running, "web:app") as (_web, client),
    ):
        number = client.post("/orders", json={"product": "tea"}).json()["id"]
        wait_until(lambda: client.get(f"/orders/{number}/parcel").status_code == 200, what="the parcel")
        assert http_get(port, "/readyz") == (200, "ready\n")
        shipping.send_signal(signal.SIGSTOP)
        waiting = client.post("/orders", json={"product": "rice"}).json()["id"]
        database.crash()
        shipping.send_signal(signal.SIGCONT)
        assert client.post("/orders", json={"product": "rice"}).status_code == 503
        assert client.get("/readyz").status_code == 503
        wait_until(lambda: http_get(port, "/readyz")[0] == 200)
        database.start()
        wait_until(lambda: client.get(f"/orders/{waiting}/parcel").status_code == 200, what="the parcel")
    with running.admin() as admin:
        assert "shipping.dead-letter" not in admin.topics()


def test_metrics_traces_and_logs(
    commands: list[list[str]], database: Postgres, running: Cluster, tmp_path: Path
) -> None:
    shop = tmp_path / "shop.py"
    shop.write_text(f"import telemetry\n{shop.read_text()}")
    recovery, worker = commands
    ports = free_port(), free_port()
    recovery = [*recovery, "--http-port", str(ports[0]), "--log-format", "json"]
    with (
        (tmp_path / "web.spans").open("w") as web_spans,
        (tmp_path / "worker.spans").open("w") as worker_spans,
        process(tmp_path, running, *recovery),
        process(tmp_path, running, *on_port(worker, ports[1]), "--log-format", "json", stdout=worker_spans),
        served(tmp_path, running, "web:app", web_spans) as (_web, client),
    ):
        number = client.post("/orders", json={"product": "tea"}).json()["id"]
        wait_until(lambda: client.get(f"/orders/{number}/parcel").status_code == 200, what="the parcel")
        assert 'metamq_dbtx_stored_messages_total{topic="orders"} 1.0' in client.get("/metrics/").text
        assert "metamq_consumer_handler_seconds_count" in http_get(ports[1], "/metrics")[1]
        wait_until(lambda: 'passes_total{result="good"}' in http_get(ports[0], "/metrics")[1], what="a pass")
    (sent,) = (one for one in spans(tmp_path / "web.spans") if one["name"] == "dbtx")
    processed = [one for one in spans(tmp_path / "worker.spans") if one["name"] == "process orders"]
    links = [link["context"]["trace_id"] for one in processed for link in one["links"]]
    assert links == [sent["context"]["trace_id"]]


def spans(file: Path) -> list[dict[str, Any]]:
    """The spans that a program has printed."""
    found, text, decoder = [], file.read_text(), json.JSONDecoder()
    while text := text.lstrip():
        one, end = decoder.raw_decode(text)
        found.append(one)
        text = text[end:]
    return found
