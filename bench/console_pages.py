"""The pages of `metamq console` over HTTP: a topic of 1,000 partitions, groups on all of them, letters, a branch.

Each visit opens a connection, and reads the whole page. Some pages show the last answer for a second; before a visit to
one of these, the bench waits until the console asks the cluster again.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psutil

from metamq.console.console_view import SAMPLE_S
from metamq.testing import Cluster, cluster
from metamq.tx import XAResource
from metamq.wire.xa import Xid

BROKERS = 2
PARTITIONS = 1000
MESSAGES = 20
"""The messages in each partition."""
GROUPS = (1, 10)
"""The number of groups that have an offset for each partition: one that runs, then more that have left."""
MEMBERS = 4
"""The members of the group that runs."""
VISITS = 3
"""The visits of each page in a round."""
LIMIT_S = 60.0
PAGES = {
    "Health": "/",
    "Brokers": "/brokers",
    "Topics": "/topics",
    "Topic": "/topic?name=many",
    "Messages": "/messages?name=many",
    "Messages of one partition": "/messages?name=many&partition=0-0",
    "Groups": "/groups",
    "Group": "/group?name=group-0",
    "Dead letters": "/letters",
    "Dead letters of a group": "/letters?name=failing",
    "Transactions": "/transactions",
    "a file": "/static/console.css",
}
REMEMBERED = ("Health", "Brokers", "Topics", "Groups")
UNKNOWN = "The doctor still looks", "cannot finish", "The search ended", "Not read:", "not served", "does not answer"
"""The texts of a page that is not complete, since an answer took too long."""
UNKNOWN_GROUP = '<td class="number">–</td>'


def fill(running: Cluster) -> None:
    """Makes the topics and their messages, and a dead letter."""
    running.create_topic("many", PARTITIONS)
    running.create_topic("odd", 1)
    values = [b'{"total": %d}' % number for number in range(MESSAGES)]
    with running.admin() as admin, running.producer() as producer:
        for name in admin.describe_topic("many").config.partition_names:
            producer.send_many("many", values, partition=name)
        producer.send("odd", b"not JSON")
    logging.disable(logging.ERROR)  # the next message is given up
    with running.consumer(group="failing", topics="odd", idle_timeout_s=1.0) as consumer:
        consumer.run(lambda message: json.loads(message.value), max_attempts=1)
    logging.disable(logging.NOTSET)


def wait_until_owned(running: Cluster) -> None:
    """Waits until every partition of the group that runs has an owner, and each member has its share."""
    with running.admin() as admin:
        while True:
            shares = [len(member.partitions) for member in admin.describe_group("group-0").members]
            if shares == [PARTITIONS // MEMBERS] * MEMBERS:
                return
            time.sleep(0.2)


def read_all(running: Cluster, group: str) -> None:
    """Lets a group read the whole topic, and leave."""
    with running.consumer(group=group, topics="many", idle_timeout_s=LIMIT_S) as consumer:
        left = PARTITIONS * MESSAGES
        for batch in consumer.batches():
            left -= len(batch)
            if not left:
                return


@contextlib.contextmanager
def prepared(running: Cluster) -> Iterator[None]:
    """A branch in doubt."""
    with XAResource(0, running.zookeeper) as resource:
        xid = Xid(1, b"order-17", b"")
        resource.start(xid)
        resource.send("odd", b"in doubt")
        resource.end(xid)
        resource.prepare(xid)
        yield
        resource.rollback(xid)


class Console(NamedTuple):
    """The host and port of a console, and its process."""

    address: str
    pid: int


class Visit(NamedTuple):
    """One answer, its time, and the processor time of the console."""

    took_ms: float
    processor_ms: float
    body: bytes


@contextlib.contextmanager
def console(running: Cluster) -> Iterator[Console]:
    """Runs the command, which ends with this process."""
    command = [sys.executable, "-m", "metamq.cli", "console", "--port", "0", "-o", "json", "--with-parent"]
    command += ["--zookeeper", running.zookeeper]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield Console(urlsplit(json.loads(process.stdout.readline())["console"]).netloc, process.pid)
    finally:
        process.terminate()
        process.communicate(timeout=LIMIT_S)


def ask(address: str, path: str) -> bytes:
    """Reads one page by a new connection; the page may say that an answer took too long. Raises RuntimeError."""
    with contextlib.closing(http.client.HTTPConnection(address, timeout=LIMIT_S)) as connection:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
    if response.status not in (HTTPStatus.OK, HTTPStatus.SERVICE_UNAVAILABLE):
        raise RuntimeError(f"{path} has status {response.status}: {body.decode()}")
    return body


def processor_s(shown: Console) -> float:
    """Returns the processor seconds of the console so far."""
    times = psutil.Process(shown.pid).cpu_times()
    return float(times.user + times.system)


def visit(shown: Console, page: str) -> Visit:
    """Opens a page."""
    if page in REMEMBERED:
        time.sleep(SAMPLE_S + 0.1)
    before_s, began = processor_s(shown), time.perf_counter()
    body = ask(shown.address, PAGES[page])
    return Visit((time.perf_counter() - began) * 1000, (processor_s(shown) - before_s) * 1000, body)


def is_complete(page: str, body: bytes) -> bool:
    """Returns True if the page shows everything."""
    texts = (*UNKNOWN, UNKNOWN_GROUP) if page == "Groups" else UNKNOWN
    return not any(text.encode() in body for text in texts)


def visits(shown: Console, groups: int, count: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Visits each page some times, after a warm-up. The clock of processors is coarse, so their time is a mean."""
    found: dict[str, list[Visit]] = {page: [] for page in PAGES}
    for number in range(count + 1):
        for page, seen in found.items():
            one = visit(shown, page)
            if number:
                seen.append(one)
    rows = []
    for page, seen in found.items():
        row: dict[str, Any] = {"page": page, "groups": groups}
        row["p50_ms"] = statistics.median(one.took_ms for one in seen)
        row["max_ms"] = max(one.took_ms for one in seen)
        row["processor_ms"] = statistics.fmean(one.processor_ms for one in seen)
        row["bytes"] = len(seen[-1].body)
        row["incomplete"] = sum(not is_complete(page, one.body) for one in seen)
        rows.append(row)
        say(", ".join(f"{name} {value:.1f}" if isinstance(value, float) else f"{value}" for name, value in row.items()))
    return rows


def measure(rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measures every page, with each number of groups: times in milliseconds, and its size."""
    count = rounds * VISITS
    pages: list[dict[str, Any]] = []
    made = 1
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(cluster(brokers=BROKERS))
        fill(running)
        read_all(running, "group-0")
        for _ in range(MEMBERS):
            stack.enter_context(running.consumer(group="group-0", topics="many"))
        wait_until_owned(running)
        stack.enter_context(prepared(running))
        shown = stack.enter_context(console(running))
        for groups in GROUPS:
            while made < groups:
                read_all(running, f"group-{made}")
                made += 1
            pages += visits(shown, groups, count, say)
    return {"brokers": BROKERS, "partitions": PARTITIONS, "members": MEMBERS, "visits": count, "pages": pages}
