"""`metamq worker`: real processes that end by signals in the middle of their work, and errors before it."""

from __future__ import annotations

import json
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metamq.testing import Cluster
from tests.one_zookeeper import cluster
from tests.parts import http_get, wait_until

Metamq = Callable[..., Any]
Start = Callable[..., "subprocess.Popen[bytes]"]

MESSAGES = 400
HANDLERS = """
import asyncio, logging, os, signal, sqlite3, sys, threading, time
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from metamq import DatabaseOffsets, Producer, RetryLater, Topic

logging.getLogger(__name__).info("imported")
gate = threading.Event()

@dataclass
class Order:
    number: int

def note(text):
    with open("noted", "a") as file:
        file.write(f"{text}\\n")

def slow(message):
    time.sleep(0.01)
    note(message.value.decode())

async def slow_async(message):
    await asyncio.sleep(0.01)
    note(message.value.decode())

def slow_end(message):
    note("begins")
    while not os.path.exists("up"):
        time.sleep(0.01)

def logs(message):
    logging.getLogger("shop").info("billed")

async def logs_async(message):
    await asyncio.sleep(0)
    await asyncio.to_thread(logs, message)

def hangs(message):
    note("hangs")
    gate.wait()

def hangs_with_the_signal(message):
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    hangs(message)

async def hangs_async(message):
    note("hangs")
    await asyncio.Event().wait()

async def cancelled(message):
    raise asyncio.CancelledError

def exits(message):
    sys.exit(3)

async def exits_async(message):
    sys.exit(3)

def typed(message):
    note(message.value.number + 1)

def later(message):
    if "metamq-attempts" not in message.headers:
        raise RetryLater(0.05)
    if message.headers["metamq-attempts"] == b"1":
        raise LookupError("not yet")
    note(message.topic)

def plus_one(message):
    note(message.value + 1)

def fails(message):
    raise LookupError("no such customer")

def outage(message):
    note("down")
    raise ConnectionError("down") if not os.path.exists("up") else LookupError("bad")

class Down(Exception):
    pass

def commits(message, consumer):
    note(message.value.decode())
    consumer.commit(message)

def commits_with_rows(message, consumer):
    consumer.commit(message, connection=sqlite3.connect("rows"))

def generates(message):
    yield note("never")

async def generates_async(message):
    yield note("never")

def nothing(message):
    pass

@contextmanager
def lifespan():
    note("begins")
    with Producer() as producer:
        producer.send("%(sent)s", b"from the lifespan").result()
        yield
    note("ends")

@asynccontextmanager
async def lifespan_async():
    note("begins")
    yield
    note("ends")

async def no_context():
    pass

@contextmanager
def slow_start():
    note("begins")
    time.sleep(600)
    yield

@asynccontextmanager
async def slow_start_async():
    note("begins")
    await asyncio.sleep(600)
    yield

orders = Topic("%(topic)s", Order)
offsets = DatabaseOffsets(lambda: sqlite3.connect("rows"))
three = 3
"""


@pytest.fixture
def folder(topic: str, metamq: Metamq, tmp_path: Path) -> Path:
    """The folder of the module `handlers`; the test's topic has messages."""
    assert metamq("topic", "create", f"{topic}-sent", "--partitions", 1).status == 0
    (tmp_path / "handlers.py").write_text(HANDLERS % {"topic": topic, "sent": f"{topic}-sent"})
    return tmp_path


@pytest.fixture
def worker(folder: Path, topic: str, process: Start) -> Callable[..., subprocess.Popen[bytes]]:
    def start(handler: str, *more: object, **settings: Any) -> subprocess.Popen[bytes]:
        return process("worker", f"handlers:{handler}", "-g", topic, "-t", topic, *more, cwd=folder, **settings)

    return start


Work = Callable[..., "subprocess.Popen[bytes]"]


def fill(running: Cluster, topic: str, count: int = MESSAGES) -> list[str]:
    values = [str(number) for number in range(count)]
    with running.producer() as producer:
        producer.send_many(topic, [value.encode() for value in values])
    return values


def noted(folder: Path) -> list[str]:
    file = folder / "noted"
    return file.read_text().splitlines() if file.exists() else []


def committed(metamq: Metamq, group: str) -> int:
    """The committed offset of the group in the one partition of its topic."""
    (only,) = described(metamq, group)["partitions"]
    return int(only["committed"] or 0)


def described(metamq: Metamq, group: str) -> dict[str, Any]:
    (only,) = metamq("group", "describe", group, "-o", "json").json
    found: dict[str, Any] = only
    return found


def ended(one: subprocess.Popen[bytes]) -> tuple[int, str]:
    _out, err = one.communicate(timeout=250)
    return one.returncode, err.decode()


def ready(one: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert one.stdout is not None
    line = one.stdout.readline()
    assert line, ended(one)
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("handler", ["slow", "slow_async"])
@pytest.mark.parametrize("order", ["partition", "key"])
def test_sigterm_in_the_middle_loses_nothing_and_doubles_nothing(
    running: Cluster, topic: str, folder: Path, worker: Work, handler: str, order: str
) -> None:
    values = fill(running, topic)
    for done in (20, 60):
        one = worker(handler, "--order", order)
        wait_until(lambda: len(noted(folder)) > done, what="some messages")  # noqa: B023
        one.send_signal(signal.SIGTERM)
        status, talk = ended(one)
        assert (status, "Traceback" in talk) == (0, False), talk
        assert len(noted(folder)) < MESSAGES
    status, talk = ended(worker(handler, "--order", order, "--idle-timeout", "500ms"))
    assert status == 0, talk
    assert Counter(noted(folder)) == Counter(values)


def test_a_failed_message_comes_later_from_the_retry_topic(
    running: Cluster, topic: str, folder: Path, worker: Work
) -> None:
    fill(running, topic, 1)
    one = worker("later", "--retry-later", "50ms")
    wait_until(lambda: noted(folder) == [f"{topic}.retry"], what="the third attempt")
    one.send_signal(signal.SIGTERM)
    assert ended(one)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("handler", ["hangs", "hangs_async"])
def test_a_second_signal_does_not_wait(
    running: Cluster, topic: str, folder: Path, worker: Work, metamq: Metamq, handler: str
) -> None:
    fill(running, topic, 1)
    one = worker(handler, "--http-port", "0", "-o", "json")
    port = ready(one)["http_port"]
    wait_until(lambda: noted(folder) == ["hangs"])
    one.send_signal(signal.SIGTERM)
    wait_until(lambda: http_get(port, "/readyz") == (503, "stopping\n"))
    one.send_signal(signal.SIGTERM)
    status, talk = ended(one)
    assert (status, "Traceback" in talk) == (130, False), talk
    assert described(metamq, topic)["members"] == []  # it has left
    status, talk = ended(worker("slow", "--idle-timeout", "500ms"))
    assert noted(folder) == ["hangs", "0"]  # the message was not done


def test_a_signal_that_another_thread_takes_is_noticed(
    running: Cluster, topic: str, folder: Path, worker: Work
) -> None:
    """The system may give it to any thread, and then does not wake the main one."""
    fill(running, topic, 1)
    one = worker("hangs_with_the_signal", "--http-port", "0", "-o", "json")
    port = ready(one)["http_port"]
    wait_until(lambda: http_get(port, "/readyz") == (503, "stopping\n"))


@pytest.mark.parametrize(("handler", "lifespan"), [("nothing", "slow_start"), ("slow_async", "slow_start_async")])
def test_a_signal_before_the_first_message_ends_it_at_once(
    folder: Path, worker: Work, handler: str, lifespan: str
) -> None:
    one = worker(handler, "--lifespan", f"handlers:{lifespan}")
    wait_until(lambda: noted(folder) == ["begins"])
    one.send_signal(signal.SIGINT)
    status, talk = ended(one)
    assert (status, "Traceback" in talk) == (0, False), talk


def test_the_port_says_if_it_is_ready(running: Cluster, topic: str, folder: Path, worker: Work) -> None:
    fill(running, topic, 1)
    one = worker("hangs", "--http-port", "0", "-o", "json")
    port = ready(one)["http_port"]
    wait_until(lambda: noted(folder) == ["hangs"])
    assert http_get(port, "/readyz") == (200, "ready\n")
    assert http_get(port, "/healthz") == (200, "alive\n")
    assert http_get(port, "/")[0] == 404
    status, metrics = http_get(port, "/metrics")
    assert status == 200
    assert f'metamq_consumer_lag_messages{{group="{topic}",topic="{topic}"}} 1.0' in metrics
    running.broker.kill()
    wait_until(lambda: http_get(port, "/readyz")[0] == 503)
    assert f"{topic}/0-0: " in http_get(port, "/readyz")[1]
    running.broker.start()
    wait_until(lambda: http_get(port, "/readyz") == (200, "ready\n"))
    one.send_signal(signal.SIGTERM)
    wait_until(lambda: http_get(port, "/readyz") == (503, "stopping\n"))


def test_a_handler_that_tries_again_leaves_the_worker_ready(
    running: Cluster, topic: str, folder: Path, worker: Work
) -> None:
    fill(running, topic, 1)
    options = ("--retry-on", "ConnectionError", "--retry-delay", "1ms")
    port = ready(worker("outage", *options, "--http-port", "0", "-o", "json"))["http_port"]
    wait_until(lambda: len(noted(folder)) > 2)
    assert http_get(port, "/readyz") == (200, f"ready\n{topic}/0-0: the handler tries again: ConnectionError: down\n")


@pytest.mark.slow
def test_it_is_ready_while_another_broker_can_be_reached(folder: Path, process: Start) -> None:
    with cluster(brokers=2) as two:
        two.create_topic("orders", partitions=2)
        command = ("worker", "handlers:slow", "-g", "g", "-t", "orders", "--http-port", "0", "-o", "json")
        port = ready(process(*command, cwd=folder, env={"METAMQ_ZOOKEEPER": two.zookeeper}))["http_port"]
        for broker in two.brokers:
            fill(two, "orders", 10)
            assert http_get(port, "/readyz") == (200, "ready\n")
            broker.kill()
            wait_until(lambda: f"orders/{broker.broker_id}-0: " in http_get(port, "/readyz")[1])  # noqa: B023
            assert http_get(port, "/readyz")[0] == 200
            broker.start()
            wait_until(lambda: http_get(port, "/readyz") == (200, "ready\n"))
        for broker in two.brokers:
            broker.kill()
        wait_until(lambda: http_get(port, "/readyz")[0] == 503)
        assert "orders/0-0: " in http_get(port, "/readyz")[1]


def test_a_taken_port_is_an_error(worker: Work, running: Cluster) -> None:
    with_port = worker("nothing", "--http-port", "0", "-o", "json")
    status, talk = ended(worker("nothing", "--http-port", ready(with_port)["http_port"]))
    assert status == 1
    assert "Choose another --http-port" in talk


@pytest.mark.slow
@pytest.mark.parametrize(("handler", "lifespan"), [("slow", "lifespan"), ("slow_async", "lifespan_async")])
def test_the_lifespan_surrounds_the_messages(
    running: Cluster, topic: str, folder: Path, worker: Work, handler: str, lifespan: str
) -> None:
    fill(running, topic, 2)
    options = ("--lifespan", f"handlers:{lifespan}", "--idle-timeout", "200ms", "--zookeeper", running.zookeeper)
    # Its own Producer, too, finds the cluster that the option names.
    status, talk = ended(worker(handler, *options, env={"METAMQ_ZOOKEEPER": "127.0.0.1:1"}))
    assert status == 0, talk
    assert noted(folder) == ["begins", "0", "1", "ends"]


@pytest.mark.slow
def test_options_reach_run_and_the_consumer(
    running: Cluster, topic: str, folder: Path, worker: Work, metamq: Metamq
) -> None:
    fill(running, topic, 1)
    idle = ("--idle-timeout", "200ms")
    pauses = ("--retry-delay", "5ms", "--retry-delay-max", "1ms", "--jitter", 0.5)
    status, talk = ended(worker("fails", "--max-attempts", 2, *pauses, *idle))
    assert status == 0, talk
    assert "given up after 2 attempts" in talk
    assert "LookupError: no such customer" in metamq("dlq", "show", topic, "-o", "json").text

    fill(running, topic, 1)
    status, talk = ended(worker("fails", "--no-dead-letter", "--max-attempts", 1))
    assert status == 1
    assert "the worker ends: LookupError: no such customer" in talk

    one = worker("outage", "--retry-on", "ConnectionError", "--max-attempts", 1, "--retry-delay", "1ms", *idle)
    wait_until(lambda: noted(folder).count("down") > 2)
    (folder / "up").touch()
    assert ended(one)[0] == 0

    fill(running, topic, 1)
    status, talk = ended(worker("fails", "--give-up-on", "LookupError", *idle))
    assert (status, "given up after 1 attempt: " in talk) == (0, True), talk


def test_decode_turns_bytes_into_values(running: Cluster, topic: str, folder: Path, worker: Work) -> None:
    fill(running, topic, 8)
    status, talk = ended(worker("plus_one", "--decode", "builtins:int", "--idle-timeout", "200ms"))
    assert (status, noted(folder)[-1]) == (0, "8"), talk


def test_a_handler_that_hangs(running: Cluster, topic: str, worker: Work) -> None:
    fill(running, topic, 1)
    limits = ("--handler-timeout", "100ms", "--max-attempts", 1, "--idle-timeout", "200ms")
    status, talk = ended(worker("hangs_async", *limits))
    assert (status, "HandlerTimeout" in talk) == (0, True), talk


@pytest.mark.parametrize(
    ("handler", "error"), [("cancelled", "CancelledError"), ("exits", "SystemExit"), ("exits_async", "SystemExit")]
)
@pytest.mark.parametrize("order", ["partition", "key"])
def test_a_handler_that_ends_the_program(
    running: Cluster, topic: str, worker: Work, metamq: Metamq, handler: str, error: str, order: str
) -> None:
    fill(running, topic, 1)
    status, talk = ended(worker(handler, "--order", order))
    place = f"metamq: {topic}/0-0 offset 0"
    assert (status, f"{place}: the handler raised {error}, which ends the worker" in talk) == (1, True), talk
    assert "Traceback" not in talk
    assert described(metamq, topic)["members"] == []  # it has left


def test_a_typed_topic(running: Cluster, topic: str, folder: Path, process: Start) -> None:
    with running.producer() as producer:
        producer.send(topic, b'{"number": 16}').result()
    command = ("worker", "handlers:typed", "-g", topic, "-t", "handlers:orders", "--idle-timeout", "200ms")
    status, talk = ended(process(*command, cwd=folder))
    assert (status, noted(folder)) == (0, ["17"]), talk


def test_a_handler_that_commits_gets_the_consumer(
    running: Cluster, topic: str, folder: Path, worker: Work, metamq: Metamq
) -> None:
    fill(running, topic, 3)
    status, talk = ended(worker("commits", "--no-auto-commit", "--idle-timeout", "200ms"))
    assert status == 0, talk
    assert noted(folder) == ["0", "1", "2"]
    assert committed(metamq, topic) == 3


@pytest.mark.parametrize("options", [[], ["--no-auto-commit"]])
def test_a_commit_that_the_options_do_not_allow_is_no_dead_letter(
    running: Cluster, topic: str, worker: Work, metamq: Metamq, options: list[str]
) -> None:
    fill(running, topic, 3)
    status, talk = ended(worker("commits_with_rows", *options))
    assert status == 1, talk
    assert "commit(connection=...) needs offsets in a database" in talk
    assert "--offsets and --no-auto-commit" in " ".join(talk.split())
    assert "Traceback" not in talk
    assert metamq("topic", "describe", f"{topic}.dead-letter").status == 1  # it does not exist


def json_lines(talk: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in talk.splitlines()]


def test_its_log_lines_are_json(running: Cluster, topic: str, folder: Path, worker: Work) -> None:
    fill(running, topic, 1)
    one = worker("slow_end", "--log-format", "json")
    wait_until(lambda: noted(folder) == ["begins"])
    one.send_signal(signal.SIGTERM)
    assert one.stderr is not None
    lines = []
    for line in one.stderr:
        lines.append(json.loads(line))
        if lines[-1]["message"] == "stopping: 1 message in progress":
            (folder / "up").touch()
    assert one.wait(60) == 0
    said = [(line["logger"], line["message"]) for line in lines]
    assert ("handlers", "imported") in said
    assert ("metamq.cli", f"handlers:slow_end works on {topic}") in said
    assert said[-1] == ("metamq.cli", "stopped")
    assert all("group" in line for line in lines)


@pytest.mark.parametrize("handler", ["logs", "logs_async"])
@pytest.mark.parametrize("order", ["partition", "key"])
def test_the_log_lines_of_a_handler_name_its_message(
    running: Cluster, topic: str, worker: Work, handler: str, order: str
) -> None:
    fill(running, topic, 2)
    options = ("--log-format", "json", "--order", order, "--idle-timeout", "500ms")
    status, talk = ended(worker(handler, *options))
    assert status == 0, talk
    lines = [line for line in json_lines(talk) if line["logger"] == "shop"]
    assert sorted((line["topic"], line["partition"], line["offset"]) for line in lines) == [
        (topic, "0-0", 0),
        (topic, "0-0", 1),
    ]


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["handlers:slow", "-t", "no-such-topic"], 1, "topic 'no-such-topic' does not exist"),
        (["handlers:exits"], 1, "the handler raised SystemExit, which ends the worker"),
        (["handlers:slow", "--zookeeper", "127.0.0.1:1"], 3, "no connection to ZooKeeper at 127.0.0.1:1"),
    ],
)
def test_the_error_that_ends_it_is_json(
    running: Cluster, folder: Path, topic: str, process: Start, arguments: list[str], status: int, says: str
) -> None:
    fill(running, topic, 1)
    one = process("worker", *arguments, "-g", topic, "-t", topic, "--log-format", "json", cwd=folder)
    found, talk = ended(one)
    last = json_lines(talk)[-1]
    assert (found, last["level"], says in last["message"]) == (status, "ERROR", True), talk


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["handlers"], "'handlers' is not MODULE:NAME Write it like shop.billing:bill"),
        (["handlrs:slow"], "there is no module 'handlrs', for handlrs:slow The command looks in its folder"),
        (["handlers:slw"], "the module handlers has no 'slw' Did you mean handlers:slow?"),
        (["handlers:three"], "handlers:three is a value of type int, not a function Write `def three(message)`"),
        (["handlers:Down"], "handlers:Down is a class, not a function"),
        (["handlers:lifespan"], "handlers:lifespan does not take one message"),
        (["lacking:slow"], "the module lacking imports no_such_package, which is not there Install the package"),
        (["broken:slow"], "the import of broken failed: ZeroDivisionError: division by zero"),
        (["handlers:generates"], "without `yield`: no message would reach the code of generates Write `return`"),
        (["handlers:generates_async"], "without `yield`: no message would reach the code of generates_async"),
        (["handlers:slow", "--lifespan", "handlers:slow"], "handlers:slow is not a function without arguments"),
        (["handlers:slow", "--retry-on", "handlers:three"], "--retry-on handlers:three is no class of exceptions"),
        (
            ["handlers:slow", "--retry-on", "OperationalError"],
            "--retry-on OperationalError: Python has no exception of this name Write MODULE:CLASS, as sqlalchemy.exc",
        ),
        (["handlers:slow", "--retry-on", "ConectionError"], "Did you mean ConnectionError? Write MODULE:CLASS"),
        (
            ["handlers:slow", "--retry-on", "sqlalchemy:OperationalError"],
            "the module sqlalchemy has no exception of this name Write MODULE:CLASS, as sqlalchemy.exc",
        ),
        (["handlers:slow", "--give-up-on", "KeyErr"], "--give-up-on KeyErr: Python has no exception of this name Did"),
        (["handlers:slow", "--retry-on", "handlers:Dow"], "Did you mean handlers:Down? Write MODULE:CLASS"),
        (["handlers:slow", "-t", "handlers:three"], "handlers:three is a Topic, and there is another --topic"),
        (
            ["handlers:slow", "--decode", "handlers:three"],
            "--decode handlers:three is a value of type int, not a functi",
        ),
        (
            ["handlers:slow", "--offsets", "handlers:three"],
            "--offsets handlers:three is a value of type int Give the p",
        ),
        (
            ["handlers:commits", "--no-auto-commit", "--offsets", "handlers:offsets", "--order", "key"],
            "--order key does not work with --no-auto-commit and --offsets of a database",
        ),
        (["handlers:slow", "--no-auto-commit"], "handlers:slow cannot commit, and --no-auto-commit leaves that to it"),
        (["handlers:commits", "--offsets", "handlers:offsets"], "handlers:commits gets the consumer, but"),
    ],
)
def test_wrong_options_name_the_wrong_thing_and_the_next_step(
    folder: Path, topic: str, process: Start, arguments: list[str], says: str
) -> None:
    (folder / "lacking.py").write_text("import no_such_package")
    (folder / "broken.py").write_text("1 / 0")
    status, talk = ended(process("worker", *arguments, "-g", topic, "-t", topic, cwd=folder))
    assert status == 2, talk
    assert says in " ".join(talk.split())
    assert "Traceback" not in talk
    assert noted(folder) == []


def test_a_typed_topic_has_no_other_decoding(folder: Path, topic: str, process: Start) -> None:
    command = ("worker", "handlers:typed", "-g", topic, "-t", "handlers:orders", "--decode", "json:loads")
    status, talk = ended(process(*command, cwd=folder))
    assert (status, "--topic is a Topic, which decodes the values" in talk, "Leave --decode out" in talk) == (
        2,
        True,
        True,
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["handlers:slow", "--lifespan", "handlers:no_context"], "the lifespan returns no context manager"),
        (["handlers:slow", "--lifespan", "handlers:lifespan_async"], "the lifespan is for asyncio"),
        (["handlers:slow", "-t", "no-such-topic"], "no-such-topic"),
        (["handlers:slow", "--handler-timeout", "1s"], "run: `handler_timeout_s` is only for asyncio"),
    ],
)
def test_errors_name_the_wrong_thing_and_the_next_step(
    folder: Path, topic: str, process: Start, arguments: list[str], says: str
) -> None:
    status, talk = ended(process("worker", *arguments, "-g", topic, "-t", topic, cwd=folder))
    assert status == 1, talk
    assert says in " ".join(talk.split())
    assert "Traceback" not in talk
