"""`metamq console` on a real cluster: the command as a process, and its answers over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import unescape
from itertools import count
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote, urlsplit

import pytest
from starlette.testclient import TestClient

from metamq import Topic
from metamq.cli.show.replica_view import Finding
from metamq.cli.up_console import PORT, PORTS_TRIED
from metamq.client.settings import ClusterAccess
from metamq.console import app, console_view
from metamq.console.visitors import Visitors
from metamq.testing import Cluster
from metamq.tx import XAResource
from metamq.wire.xa import Xid
from tests.cli.conftest import COMMAND, LIMIT_S, unset
from tests.one_zookeeper import cluster
from tests.parts import SLOW_S
from tests.test_docs import ROOT, SHELL

PAGES = (
    "/", "/brokers", "/topics", "/topic?name=orders", "/messages?name=orders&from=-10", "/groups", "/group?name=etl",
    "/letters", "/letters?name=failing", "/transactions",
)  # fmt: skip
LATER = datetime(2026, 1, 2, tzinfo=UTC)
TRIP = """{"type": "record", "name": "Trip", "fields": [
    {"name": "number", "type": "int"}, {"name": "place", "type": "string"}]}"""
HOSTILE = "<script>alert(1)</script>\u202e\x07"


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the console."""

    status: int
    headers: dict[str, str]
    body: str


@dataclass(frozen=True, slots=True)
class Running:
    """A console that runs."""

    cluster: Cluster
    url: str

    def ask(self, path: str, method: str = "GET", body: str | None = None, **headers: str) -> Answer:
        with contextlib.closing(http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=LIMIT_S)) as connection:
            connection.request(method, path, body, headers=headers)
            response = connection.getresponse()
            names = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, names, response.read().decode())


@contextlib.contextmanager
def console(
    running: Cluster, *options: str, port: Sequence[str] = ("--port", "0"), **environment: str
) -> Iterator[Running]:
    """Starts the command; ends it with SIGTERM, which is no failure."""
    process = subprocess.Popen(
        [*COMMAND, "console", *port, "-o", "json", *options],
        stdout=subprocess.PIPE,
        env={**unset(os.environ), "METAMQ_ZOOKEEPER": running.zookeeper, **environment},
    )
    try:
        assert process.stdout is not None
        yield Running(running, json.loads(process.stdout.readline())["console"])
        process.terminate()
        assert process.wait(LIMIT_S) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with cluster() as one:
        one.create_topic("orders", 2)
        with one.producer() as producer:
            producer.send_many("orders", [b"x"] * 30)
        give_up(one)
        with one.consumer(group="etl", topics=["orders"], consumer_id="reader"), console(one) as shown:
            yield shown


def give_up(one: Cluster) -> None:
    """A group gives one message up."""
    one.create_topic("odd", 1)
    with one.producer() as producer:
        producer.send("odd", b'{"total": 17}', key=b"customer-7").result(60)

    def fail(_message: Any) -> None:
        raise KeyError("colour")

    with one.consumer(group="failing", topics="odd", idle_timeout_s=0.3) as consumer:
        consumer.run(fail, max_attempts=1)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_no_script_and_asks_no_other_host(running: Running, page: str) -> None:
    answer = running.ask(page)
    assert answer.status == 200
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
    assert (answer.headers["x-content-type-options"], answer.headers["referrer-policy"]) == ("nosniff", "no-referrer")
    assert "<script" not in answer.body
    links = re.findall(r'(?:href|src|action)="([^"]*)"', answer.body)
    assert len(links) > 4
    assert [link for link in links if not re.match(r"/(?!/)|#", link)] == []


def test_pages_show_the_cluster(running: Running) -> None:
    health = running.ask("/").body
    assert "topic orders" in health
    assert "group etl" in health
    brokers = running.ask("/brokers").body
    assert "master" in brokers
    assert "/topic?name=orders" in running.ask("/topics").body
    topic = running.ask("/topic?name=orders").body
    assert '<a href="/group?name=etl"><bdi>etl</bdi></a>' in topic
    assert "2 partitions" in topic
    assert "<dt>Messages</dt><dd>30</dd>" in topic
    assert "/group?name=etl" in running.ask("/groups").body
    group = running.ask("/group?name=etl").body
    assert "<dt>Lag</dt><dd>30</dd>" in group
    with running.cluster.admin() as admin:
        assert (address := admin.brokers()[0].address) is not None
        assert address in brokers
        assert f"<td>{admin.brokers()[0].status}</td>" in brokers
        assert admin.explain_group("etl").text.splitlines()[0] in group


@pytest.fixture(scope="module")
def log(running: Running) -> str:
    """A topic of one partition with nine messages, whose values are JSON, and then hostile ones."""
    running.cluster.create_topic("log", 1)
    with running.cluster.producer() as producer:
        for number in range(9):
            when = datetime(2026, 1, 1, 12, number, tzinfo=UTC)
            value = json.dumps({"n": number, "nested": {"x": [number]}}).encode()
            producer.send("log", value, f"k{number % 3}".encode(), {"h": b"v%d" % number}, timestamp=when).result(60)
        for hostile in (HOSTILE.encode(), b"\xff\x00", b"x" * 1_000_000):
            producer.send("log", hostile, hostile[:50], {"<b>": hostile[:50]}, timestamp=LATER).result(60)
    return "log"


@pytest.mark.parametrize(
    ("query", "places"),
    [
        ("from=2&where=.n<5", [2, 3, 4]),
        ("from=earliest&key=k1", [1, 4, 7]),
        ("from=@2026-01-01T12:07Z&where=.n>0", [7, 8]),
        ("from=-4&partition=0-0", [11, 10, 9, 8]),
        ("from=99", []),
        ("", [11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0]),
    ],
)
def test_messages_by_offset_time_key_and_value(running: Running, log: str, query: str, places: list[int]) -> None:
    body = running.ask(f"/messages?name={log}&{quote(query, safe='=&@')}").body
    assert re.findall(r'<th scope="row" class="time">0-0:(\d+)</th>', body) == [str(one) for one in places]
    assert ("No message matches" in body) == (not places)


def test_messages_of_other_people_are_text(running: Running, log: str) -> None:
    body = running.ask(f"/messages?name={log}").body
    assert "<script" not in body
    assert "<b>" not in body
    assert not {"\u202e", "\x07", "\x00"} & set(body)
    assert "(1,000,000 bytes)" in body
    assert len(body) < 60_000
    assert "&#34;nested&#34;: {\n" in body


def test_any_value_can_be_shown(running: Running) -> None:
    running.cluster.create_topic("odd-values", 1)
    values = [rb'{"half": "\ud83d"}', b"[" * 1100 + b"]" * 1100, *[b"[" * 450 + b"0" * 3000 + b"]" * 450] * 50]
    with running.cluster.producer() as producer:
        for value in values:
            producer.send("odd-values", value).result(60)
    page = running.ask("/messages?name=odd-values&from=earliest")
    assert page.status == 200
    assert "\\ud83d" in page.body
    assert len(page.body) < 10 * sum(map(len, values))


def fill_typed(one: Cluster) -> None:
    """A typed topic has hostile values, and one that does not decode."""
    one.create_topic("trips", 1)
    trips = Topic.avro("trips", TRIP)
    with one.admin() as admin, one.producer() as producer:
        admin.register_schema(trips)
        producer.send("trips", b"<b>odd").result(60)
        for number in range(2):
            producer.send(trips, {"number": number, "place": HOSTILE}).result(60)


def test_a_typed_topic_is_decoded(running: Running) -> None:
    fill_typed(running.cluster)
    page = running.ask("/messages?name=trips&from=earliest").body
    assert "<b>odd" not in page
    odd, *rows = re.findall("<tr><th.*?</tr>", page, re.DOTALL)
    assert "Not decoded: <bdi>it does not begin with a zero byte and the id of a schema</bdi>" in odd
    assert ("&lt;b&gt;odd" in odd, "<details>" in odd) == (True, False)
    assert "<script" not in page
    for number, row in enumerate(rows):
        assert f'"number": {number},' in unescape(row)
        assert "<summary>Stored bytes</summary>" in row
        assert r"\x00\x00\x00\x00\x01" in unescape(row)
    found = running.ask(f"/messages?name=trips&where={quote('.number == 1')}").body
    assert (found.count("<summary>"), "trips" in found) == (1, True)


def test_the_newest_of_many(running: Running) -> None:
    running.cluster.create_topic("many", 2)
    with running.cluster.producer() as producer:
        producer.send_many("many", [b'{"n":%d}' % number for number in range(2000)]).result(60)
    for query in ("from=-1000000", "from=-1000000&where=.n>=0"):
        page = running.ask(f"/messages?name=many&{query}").body
        shown = [int(one) for one in re.findall(r'"n": (\d+)', unescape(page))]
        assert len(shown) == 50
        assert min(shown) >= 1900


@pytest.mark.parametrize(
    ("query", "status", "words"),
    [
        ("from=yesterday", 400, "is not a place in a log"),
        ("where=x", 400, "is not a condition"),
        ("partition=0-9", 404, "has no partition"),
    ],
)
def test_a_wrong_question_is_explained(running: Running, log: str, query: str, status: int, words: str) -> None:
    answer = running.ask(f"/messages?name={log}&{query}")
    assert (answer.status, words in unescape(answer.body)) == (status, True)
    assert running.ask("/messages?name=nowhere").status == 404


def test_a_page_loads_itself_again_if_it_is_asked_to(running: Running, log: str) -> None:
    address = f"/messages?name={log}&from=-1"
    assert "http-equiv" not in running.ask(address).body
    assert "http-equiv" not in running.ask(f"{address}&refresh=0;url=x").body
    page = unescape(running.ask(f"{address}&refresh=2").body)
    assert '<meta http-equiv="refresh" content="2">' in page
    assert f'<a href="{address}">Stop</a>' in page


def test_a_dead_letter_shows_where_it_is_from_and_why(running: Running) -> None:
    assert "/letters?name=failing" in running.ask("/letters").body
    page = unescape(running.ask("/letters?name=failing").body)
    assert page.count("KeyError: 'colour'") == 2
    assert "<summary>Traceback</summary>" in page
    assert "metamq dlq resend failing" in page
    assert "/messages?name=odd&partition=0-0&from=0" in page
    assert "customer-7" in page
    assert running.ask("/letters?name=none").status == 404


def test_an_open_transaction_has_its_next_step(running: Running) -> None:
    assert "No transaction is open" in running.ask("/transactions").body
    with XAResource(0, running.cluster.zookeeper) as resource:
        xid = Xid(1, b"order-17", b"")
        resource.start(xid)
        resource.send("orders", b"in doubt")
        resource.end(xid)
        resource.prepare(xid)
        body = running.ask("/transactions").body
        resource.rollback(xid)
    assert str(xid) in unescape(body)
    assert "prepared" in body
    assert "metamq tx" in body


@pytest.mark.parametrize("page", [*PAGES, "/static/console.css"])
def test_the_console_changes_nothing(running: Running, page: str) -> None:
    for method in ("POST", "PUT", "DELETE"):
        assert running.ask(page, method).status == 405
    assert running.ask("/resend", "POST", "name=failing").status == 404


@pytest.mark.parametrize("host", ["attacker.example", "attacker.example:80", "127.0.0.1.attacker.example", ""])
def test_another_host_name_is_refused(running: Running, host: str) -> None:
    refused = running.ask("/topics", Host=host)
    assert refused.status == 400
    assert "orders" not in refused.body
    assert running.ask("/topics", Host="localhost").status == 200


@pytest.mark.parametrize("page", ["/topic", "/group"])
def test_a_hostile_name_is_text(running: Running, page: str) -> None:
    answer = running.ask(f"{page}?name={quote(HOSTILE)}")
    assert answer.status == 404
    assert "<script" not in answer.body
    assert not {"\u202e", "\x07"} & set(answer.body)


def test_a_wrong_address_says_so(running: Running) -> None:
    assert "no group &#39;none&#39;" in running.ask("/group?name=none").body
    assert running.ask("/group").status == 400
    assert running.ask("/nowhere").status == 404
    assert running.ask("/static/../app.py").status == 404
    assert 'href="//' not in running.ask("//evil.example/x").body


@pytest.mark.slow
def test_a_frozen_broker_is_shown_and_other_pages_work() -> None:
    with cluster() as one:
        one.create_topic("orders", 2)
        with console(one) as shown, one.freeze(one.broker):
            assert "orders" in shown.ask("/topics").body
            assert 'class="problem"' in shown.ask("/brokers").body
            assert shown.ask("/topic?name=orders").status in (200, 503)
            assert "ZooKeeper session" in shown.ask("/").body


def test_a_taken_port_is_named(running: Running) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [*COMMAND, "console", "--port", port, "--zookeeper", running.cluster.zookeeper],
            env=unset(os.environ), capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
    assert done.returncode == 1
    assert f"127.0.0.1:{port}" in done.stderr
    assert "--port" in done.stderr


def test_without_port_it_takes_the_next_free_one(running: Running) -> None:
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # another process has the port
            stack.enter_context(socket.create_server(("127.0.0.1", PORT)))
        shown = stack.enter_context(console(running.cluster, port=()))
        assert shown.ask("/brokers").status == 200
        assert PORT < int(shown.url.rstrip("/").rpartition(":")[2]) < PORT + PORTS_TRIED


def test_without_the_extra_the_next_step_is_printed(tmp_path: Path) -> None:
    code = "import sys; sys.modules['jinja2'] = None; from metamq.cli.app import run; sys.exit(run(['console']))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=unset(os.environ), capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 1
    assert "pip install 'metamq[console]'" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("block", "address"), [(0, "http://127.0.0.1:"), (1, "https://console.example.org:")])
def test_the_commands_of_the_page_run(running: Running, tmp_path: Path, block: int, address: str) -> None:
    """Without those for docker-compose.yml, which need an engine."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**unset(os.environ), "METAMQ_ZOOKEEPER": running.cluster.zookeeper, "PATH": path}
    subprocess.run([*COMMAND, "security", "init"], cwd=tmp_path, env=environment, check=True, timeout=LIMIT_S)
    command = SHELL.findall((ROOT / "docs" / "console.md").read_text())[block]
    with subprocess.Popen(
        ["bash", "-e", "-c", command], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, start_new_session=True
    ) as shell:
        try:
            assert shell.stderr is not None
            assert any(f"The console is at {address}".encode() in line for line in shell.stderr)
        finally:
            os.killpg(shell.pid, signal.SIGTERM)
            assert b"Traceback" not in shell.communicate(timeout=LIMIT_S)[1]


def test_a_fault_of_a_page_is_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_any: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(app, "_topics", fail)
    visitors = Visitors(ClusterAccess("127.0.0.1:1"), None, lambda _access: lambda _report: True, with_login=True)
    monkeypatch.setattr(visitors, "visit", fail)
    client = TestClient(app.make_app(visitors, app.ConsoleRules()), "http://127.0.0.1", raise_server_exceptions=False)
    with client:
        answer = client.get("/topics")
    assert answer.status_code == 500
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "failed to make this page" in answer.text


def test_the_doctor_looks_again_after_a_visit_that_took_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_view, "ANSWER_S", 0.05)
    monkeypatch.setattr(console_view, "SAMPLE_S", 3600.0)
    visits, is_slow = count(1), threading.Event()

    def look(report: Callable[[Finding], None]) -> bool:
        report(Finding("visit", "ok", str(next(visits))))
        return is_slow.wait(SLOW_S)

    async def use() -> None:
        view = console_view.ConsoleView(cast("Any", None), {}, look)
        found = await view.examine()
        assert (found.is_done, [one.detail for one in found.findings]) == (False, ["1"])
        is_slow.set()
        await until_done(view, "1")
        await until_done(view, "1")
        monkeypatch.setattr(console_view, "SAMPLE_S", -1.0)  # the visit is longer ago
        await until_done(view, "2")
        view.close()

    async def until_done(view: console_view.ConsoleView, expected: str) -> None:
        async with asyncio.timeout(SLOW_S):
            while not (found := await view.examine()).is_done:
                pass
        assert [one.detail for one in found.findings] == [expected]

    asyncio.run(use())
