"""A Producer and its process: forks, the end of the process, Ctrl-C."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time

import pytest

from metamq.client.producer import producer as client_producer
from metamq.testing import Cluster
from metamq.zk.cluster.topics import TopicConfig
from tests.parts import Stored, read_topic

NUMBERS = itertools.count()


@pytest.fixture
def topic(parts: Cluster, request: pytest.FixtureRequest) -> TopicConfig:
    with parts.admin() as admin:
        return admin.create_topic(f"{request.node.originalname}-{next(NUMBERS)}", partitions=1)


def stored(parts: Cluster, topic: TopicConfig) -> list[bytes]:
    messages: list[Stored] = read_topic(parts.broker, topic.topic, topic.id)["0-0"]
    return [message.value for message in messages]


def script(parts: Cluster, topic: TopicConfig, code: str, *flags: str) -> subprocess.Popen[str]:
    """A process that runs the code with `producer`, `topic` and the modules that these tests use."""
    head = (
        "import os, sys, time, signal, threading\n"
        "import metamq\n"
        f"topic = {topic.topic!r}\n"
        f"zookeeper = {parts.zookeeper!r}\n"
    )
    return subprocess.Popen(
        [sys.executable, *flags, "-c", head + code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def run(parts: Cluster, topic: TopicConfig, code: str, *flags: str) -> tuple[int, str, str]:
    with script(parts, topic, code, *flags) as process:
        try:
            out, err = process.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return process.returncode, out, err


# -- forks ------------------------------------------------------------------------------------------

FORKS = """
producer = metamq.Producer(zookeeper, linger_ms=200)
before = producer.send(topic, b"before the fork", b"k")
stored = producer.send(topic, b"stored")
stored.result(60)
pending = producer.send(topic, b"pending in the parent", b"k")
child = os.fork()
if child == 0:
    for call in (
        lambda: producer.send(topic, b"lost"),
        lambda: producer.send_many(topic, [b"lost"]),
        lambda: producer.flush(),
        lambda: pending.result(60),
        lambda: pending.add_done_callback(print),
        lambda: producer.close(),
    ):
        try:
            call()
            print("child: no error")
        except metamq.errors.ForkedError as error:
            print("child:", error)
    producer.__exit__(None, None, None)
    print("child:", stored.result(0).offset >= 0)
    with metamq.Producer(zookeeper) as own:
        print("child:", own.send(topic, b"of the child").result(60).offset >= 0)
    {end}
_, status = os.waitpid(child, 0)
print("parent: child ended with", status)
print("parent:", pending.result(60).offset >= 0)
print("parent:", producer.send(topic, b"after").result(60).offset >= 0)
producer.close()
"""


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)"])
def test_a_producer_does_not_work_in_a_fork_and_a_new_one_does(parts: Cluster, end: str) -> None:
    with parts.admin() as admin:
        topic = admin.create_topic(f"forked-{end[:2]}", partitions=1)
    code, out, err = run(parts, topic, FORKS.replace("{end}", end))
    lines = out.splitlines()
    said = "child: this producer was made before the process forked, and does not work in the child. "
    # close() of a producer that is not this process's: nothing to do, nothing to say.
    assert [line for line in lines if line.startswith("child")][:5] == [said + "Make the producer in the child."] * 5
    assert "child: no error" not in lines[:5]
    assert lines.count("child: True") == 2
    assert lines[-3:] == ["parent: child ended with 0", "parent: True", "parent: True"]
    assert code == 0, err
    assert sorted(stored(parts, topic)) == sorted(
        [b"before the fork", b"stored", b"pending in the parent", b"of the child", b"after"]
    )


def test_forks_while_other_threads_send(parts: Cluster, topic: TopicConfig) -> None:
    code, out, err = run(
        parts,
        topic,
        """
producer = metamq.Producer(zookeeper)
ending = threading.Event()
count = [0, 0, 0]
def send_on(n):
    while not ending.is_set():
        delivery = producer.send(topic, b"x", b"k" if n else None)
        if count[n] % 50 == 0:
            delivery.result(60)
        count[n] += 1
threads = [threading.Thread(target=send_on, args=(n,)) for n in range(3)]
for thread in threads: thread.start()
for _ in range(15):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            producer.send(topic, b"lost")
        except metamq.errors.ForkedError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
ending.set()
for thread in threads: thread.join()
producer.close()
print(sum(count))
""",
    )
    assert code == 0, err
    assert len(stored(parts, topic)) == int(out)


# -- the end of the process -------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [["-W", "always"], ["-W", "error"]], ids=["warned", "strict"])
def test_a_producer_that_nobody_closed_flushes_at_exit(parts: Cluster, flags: list[str]) -> None:
    with parts.admin() as admin:
        topic = admin.create_topic(f"unclosed-{flags[1]}", partitions=1)
    code, _, err = run(
        parts,
        topic,
        """
producer = metamq.Producer(zookeeper, linger_ms=10_000)
for n in range(1000):
    producer.send(topic, b"%d" % n, b"k")
""",
        *flags,
    )
    assert "a Producer was not closed: use `with` or close()" in err
    assert code == 0
    assert len(stored(parts, topic)) == 1000


def test_a_producer_that_was_dropped_flushes_too(parts: Cluster, topic: TopicConfig) -> None:
    code, _, err = run(
        parts,
        topic,
        """
producer = metamq.Producer(zookeeper)
stored = threading.Event()
producer.send(topic, b"dropped").add_done_callback(lambda d: stored.set())
del producer
assert stored.wait(60)
""",
        "-W",
        "always",
    )
    assert "ResourceWarning: a Producer was not closed" in err
    assert code == 0
    assert stored(parts, topic) == [b"dropped"]


@pytest.mark.parametrize("limit_s", [1.0, pytest.param(5.0, marks=pytest.mark.long)])
def test_at_exit_it_waits_no_longer_than_five_seconds(parts: Cluster, topic: TopicConfig, limit_s: float) -> None:
    assert client_producer.AT_EXIT_FLUSH_S == 5.0
    with script(
        parts,
        topic,
        f"""
import metamq.client.producer.producer
metamq.client.producer.producer.AT_EXIT_FLUSH_S = {limit_s}
producer = metamq.Producer(zookeeper)
producer.send(topic, b"x").result(60)
print("ready")
sys.stdin.readline()
producer.send(topic, b"never")
print("ending")
""",
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        parts.broker.freeze()
        try:
            print("go", file=process.stdin, flush=True)
            assert process.stdout.readline() == "ending\n"
            begun = time.monotonic()
            _, err = process.communicate(timeout=90)
            assert time.monotonic() - begun < limit_s + 20
        finally:
            parts.broker.thaw()
    assert "messages were not stored before the process ended: " in err
    assert f"flush() of 1 message for topic {topic.topic!r} took longer than {limit_s:g} s" in err


# -- Ctrl-C -----------------------------------------------------------------------------------------

WAITS = {
    "result": "producer.send(topic, b'x').result()",
    "result with a limit": "producer.send(topic, b'x').result(30)",
    "result of many": "producer.send_many(topic, [b'x'] * 10).result()",
    "flush": "producer.send(topic, b'x'); producer.flush()",
    "close": "producer.send(topic, b'x'); producer.close()",
    "full buffer": "[producer.send_many(topic, [b'x' * 1000]) for _ in range(1000)]",
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
def test_ctrl_c_ends_every_wait_at_once(parts: Cluster, topic: TopicConfig, wait: str) -> None:
    with script(
        parts,
        topic,
        f"""
signal.signal(signal.SIGINT, signal.default_int_handler)
producer = metamq.Producer(zookeeper, buffer_bytes=20_000)
producer.send(topic, b"x").result(60)
print("ready")
sys.stdin.readline()
print("waiting")
try:
    {wait}
except KeyboardInterrupt:
    print(time.monotonic())
os._exit(0)
""",
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        parts.broker.freeze()
        try:
            print("go", file=process.stdin, flush=True)
            assert process.stdout.readline() == "waiting\n"
            time.sleep(0.1)  # so that it waits by now; if it does not, the wait is cut short all the same
            begun = time.monotonic()
            process.send_signal(signal.SIGINT)
            ended = process.stdout.readline()
            process.wait(60)
        finally:
            parts.broker.thaw()
    assert ended, "no KeyboardInterrupt"
    assert float(ended) - begun < 20  # the shortest of these waits takes 30


def test_ctrl_c_in_a_with_block_still_brings_out_what_was_sent(parts: Cluster, topic: TopicConfig) -> None:
    with script(
        parts,
        topic,
        """
signal.signal(signal.SIGINT, signal.default_int_handler)
with metamq.Producer(zookeeper, linger_ms=60_000) as producer:
    producer.send(topic, b"x", b"k")
    print("ready")
    while True:
        time.sleep(0.1)  # one sleep misses a signal that comes just before it
""",
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=90)
    assert "KeyboardInterrupt" in err
    assert stored(parts, topic) == [b"x"]
