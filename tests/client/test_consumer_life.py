"""How a consumer ends: Ctrl-C, close from another thread, a fork, an exit without close. Real processes and signals."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest

from metamq import Consumer, TopicPartition
from metamq.client.background import background
from metamq.errors import ClosedError, ConfigError, ForkedError

if TYPE_CHECKING:
    from tests.client.conftest import Shop

INTERRUPT_LIMIT_S = 30.0
"""What is interrupted waits for longer, if not for ever; on a machine that is busy it takes a while."""


@contextmanager
def script(shop: Shop, body: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs `body`, with `topic, group` from its arguments and `say(word)` to tell how far it is."""
    head = f"""
        import sys, time, threading
        from metamq import Consumer, TopicPartition, errors
        servers, (topic, group) = {shop.cluster.zookeeper!r}, sys.argv[1:]
        def say(*words):
            print(*words, flush=True)
    """
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(head) + textwrap.dedent(body), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    said = process.stdout.readline().strip()
    if not said:
        raise AssertionError(process.communicate()[1])
    return said


def tp(topic: str) -> TopicPartition:
    return TopicPartition(topic, "0-0")


WAITING = {
    "iteration": "for message in consumer: say(int(message.value))",
    "batches": "for batch in consumer.batches(): say(int(batch.values[-1]))",
    "run": "consumer.run(lambda message: say(int(message.value)))",
}


@pytest.mark.parametrize("way", WAITING)
def test_ctrl_c_ends_a_blocking_wait_at_once_and_loses_nothing(shop: Shop, group: str, way: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 5)
    body = f"""
        try:
            with Consumer(servers, topics=topic, group=group, commit_interval_ms=100) as consumer:
                try:
                    {WAITING[way]}
                except KeyboardInterrupt:
                    say("interrupted", time.monotonic())
                    raise
        except KeyboardInterrupt:
            say("closed", time.monotonic())
    """
    with script(shop, body, topic, group) as process:
        while int(line(process)) < 4:
            pass
        # It waits for the next message now, and what was handled before is done.
        shop.until(lambda: shop.committed(group)[tp(topic)] == 5)
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        interrupted, closed = float(line(process).split()[1]), float(line(process).split()[1])
        assert process.wait(60) == 0
        assert interrupted - start < INTERRUPT_LIMIT_S
        assert closed - start < INTERRUPT_LIMIT_S
        assert process.stderr is not None
        # Its connection to ZooKeeper closes within a second, as a rule.
        said = process.stderr.read().splitlines()
        assert [text for text in said if "is still closing in the background" not in text] == []
    assert shop.committed(group)[tp(topic)] == 5
    assert shop.admin.describe_group(group).members == ()


def test_ctrl_c_in_the_middle_of_a_message_leaves_it_to_come_again(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 5)
    body = """
        with Consumer(servers, topics=topic, group=group) as consumer:
            for message in consumer:
                say(int(message.value))
                while message.offset == 2:
                    time.sleep(0.1)  # one sleep misses a signal that comes just before it
    """
    with script(shop, body, topic, group) as process:
        assert [line(process) for _ in range(3)] == ["0", "1", "2"]
        process.send_signal(signal.SIGINT)
        process.wait(60)
    assert shop.committed(group)[tp(topic)] == 2


@pytest.mark.parametrize("way", ["iterating", "batches"])
def test_ctrl_c_wherever_it_comes_leaves_no_batch_stuck(shop: Shop, group: str, way: str) -> None:
    topic, files = (
        shop.topic(),
        ("client/consumer/consumer.py", "client/consumer/receivers.py", "client/fetch/inbox.py"),
    )
    total = 150
    for number in range(total):  # a batch each
        shop.numbers(topic, 1, number)
    left = 0

    def interrupt(frame: FrameType, event: str, _argument: object) -> None:
        """Python looks for signals where a function of Python begins, and after one of C."""
        nonlocal left
        if event in ("call", "c_return") and frame.f_code.co_filename.endswith(files):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    with shop.consumer(topic, group, idle_timeout_s=60) as consumer:
        seen: list[int] = []
        kept: list[object] = []
        """Python swallows a Ctrl-C that comes while a generator is thrown away."""

        def read_one() -> None:
            loop: Iterator[Any] = iter(consumer) if way == "iterating" else consumer.batches()
            kept.append(loop)
            seen.append(next(loop).offset)

        for number in range(1, total):
            left = number
            sys.setprofile(interrupt)
            try:
                read_one()
            except KeyboardInterrupt:
                sys.setprofile(None)
                read_one()
                continue
            finally:
                sys.setprofile(None)
            break  # it has fewer such places
        assert seen == list(range(number))
        assert number > 15


def test_ctrl_c_in_a_call_that_waits(shop: Shop, group: str) -> None:
    topic = shop.topic()
    body = """
        consumer = Consumer(servers, topics=topic, group=group, on_assigned=lambda _: None)
        held = threading.Event()
        consumer._background.call_soon(lambda: (say("stuck"), held.wait(60)))
        try:
            consumer.lag()
        except KeyboardInterrupt:
            say("interrupted", time.monotonic())
        held.set()
        consumer.close()
    """
    with script(shop, body, topic, group) as process:
        assert line(process) == "stuck"
        shop.until(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S")
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert float(line(process).split()[1]) - start < INTERRUPT_LIMIT_S
        assert process.wait(60) == 0


def test_close_from_another_thread_ends_the_loop(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 5)
    with shop.consumer(topic, group) as consumer:

        def close_when_it_waits() -> None:
            shop.until(lambda: shop.committed(group)[tp(topic)] == 5)
            consumer.close()

        threads = [threading.Thread(target=close_when_it_waits) for _ in range(2)]
        for thread in threads:
            thread.start()
        assert [int(message.value) for message in consumer] == [0, 1, 2, 3, 4]
        with pytest.raises(ClosedError):
            next(consumer.batches())
    # The block ends when the other thread's close has ended: the process may go.
    assert shop.committed(group)[tp(topic)] == 5
    assert shop.admin.describe_group(group).members == ()
    for thread in threads:
        thread.join()


def test_a_call_that_waits_while_its_client_is_closed_says_so() -> None:
    async def wait_for_what_close_cancels() -> None:
        raise asyncio.CancelledError

    with pytest.raises(ClosedError, match="while this call waited for an answer"):
        background().run(wait_for_what_close_cancels())


def test_close_from_another_thread_does_not_wait_for_the_message_in_hand(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 5)
    consumer = shop.consumer(topic, group)
    messages = iter(consumer)
    next(messages)
    next(messages)
    start = time.monotonic()
    thread = threading.Thread(target=consumer.close)
    thread.start()
    thread.join(60)
    assert time.monotonic() - start < 30
    assert list(messages) == []
    assert shop.committed(group)[tp(topic)] == 1


USES: dict[str, Callable[[Consumer[Any], str], object]] = {
    "iteration": lambda consumer, topic: next(iter(consumer)),
    "batches": lambda consumer, topic: next(consumer.batches()),
    "run": lambda consumer, topic: consumer.run(print),
    "commit": lambda consumer, topic: consumer.commit(),
    "commit in a transaction": lambda consumer, topic: consumer.commit(connection=sqlite3.connect(":memory:")),
    "seek": lambda consumer, topic: consumer.seek(tp(topic), 0),
    "pause": lambda consumer, topic: consumer.pause(tp(topic)),
    "pause of all": lambda consumer, topic: consumer.pause(),
    "resume": lambda consumer, topic: consumer.resume(),
    "lag": lambda consumer, topic: consumer.lag(),
    "assignment": lambda consumer, topic: consumer.assignment,
    "with": lambda consumer, topic: consumer.__enter__(),
}


@pytest.mark.parametrize("in_a_group", [True, False])
def test_after_close_every_use_says_so(shop: Shop, group: str, in_a_group: bool) -> None:
    topic = shop.topic()
    shop.numbers(topic, 5)
    consumer = shop.consumer(topic, group if in_a_group else None)
    messages = iter(consumer)
    next(messages)
    consumer.close()
    for name, use in USES.items():
        with pytest.raises(ClosedError, match=r"this consumer is closed\. Make a new one") as caught:
            use(consumer, topic)
        assert caught.value.outcome == "not_done", name
    assert list(messages) == [], "a loop that was running just ends"
    assert consumer.health().partitions == {}
    consumer.close()


def test_during_close_callbacks_may_use_the_consumer_and_no_loop_begins(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 5)
    told: list[Any] = []
    consumers: list[Consumer[Any]] = []

    def on_revoked(partitions: list[TopicPartition]) -> None:
        consumer = consumers[0]
        told.append((consumer.assignment, consumer.lag()))
        consumer.commit({tp(topic): 2})
        with pytest.raises(ClosedError):
            next(iter(consumer))
        told.append("committed")

    with shop.consumer(topic, group, auto_commit=False, on_revoked=on_revoked) as consumer:
        consumers.append(consumer)
        next(iter(consumer))
    assert told == [([tp(topic)], {tp(topic): 4}), "committed"]
    assert shop.committed(group)[tp(topic)] == 2


@pytest.mark.slow
def test_close_before_anything_was_fetched(shop: Shop, group: str) -> None:
    topic = shop.topic(20)
    for _ in range(5):
        shop.consumer(topic, group).close()
        shop.consumer(topic).close()
    assert shop.admin.describe_group(group).members == ()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_in_a_forks_child_the_consumer_says_so_and_a_new_one_works(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.producer.send_many(topic, [b"%d" % number for number in range(10)]).result(60)
    with shop.consumer(topic, group) as consumer:
        messages = iter(consumer)
        next(messages)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            verdict = "?"
            try:
                verdict = _in_the_child(shop, topic, consumer, messages)
            except BaseException as error:
                verdict = repr(error)
            finally:
                os.write(write, verdict.encode())
                os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            assert pipe.read() == "well"
        assert os.waitpid(child, 0)[1] == 0
        # The parent goes on as if nothing had been.
        assert [int(next(messages).value) for _ in range(9)] == list(range(1, 10))
    assert shop.committed(group)[tp(topic)] == 10


def _in_the_child(shop: Shop, topic: str, consumer: object, messages: Iterator[object]) -> str:
    assert isinstance(consumer, Consumer)
    for use in (lambda: next(messages), consumer.commit, consumer.lag, consumer.close):
        with pytest.raises(ForkedError, match="in the child"):
            use()
    with shop.consumer(topic) as mine:
        return "well" if int(next(iter(mine)).value) == 0 else "wrong message"


def test_a_signal_handler_that_waits_in_the_middle_of_the_loop_is_told_and_may_close(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 2)
    with shop.consumer(topic, group) as consumer:
        messages = iter(consumer)
        assert next(messages).offset == 0
        with consumer._core.inbox.lock:  # as in the middle of taking a batch
            for wait in (consumer.commit, consumer.lag, consumer.pause, lambda: consumer.seek(tp(topic), 0)):
                with pytest.raises(ConfigError, match="interrupts the loop over this consumer"):
                    wait()
            assert consumer.assignment == [tp(topic)]
            assert consumer.health().partitions[tp(topic)].in_hand
            consumer.close()
        shop.until(lambda: consumer._core.inbox.closed)
        assert list(messages) == []
    assert shop.admin.describe_group(group).members == ()


@pytest.mark.slow
def test_a_signal_handler_may_close_whenever_it_comes(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 200)
    body = """
        import contextlib, signal
        for number in range(20):
            closed = contextlib.suppress(errors.ClosedError, errors.OwnershipLost)
            with closed, Consumer(servers, topics=topic) as consumer:
                signal.signal(signal.SIGALRM, lambda *_: consumer.close())
                for message in consumer:
                    if message.offset == 0:
                        signal.setitimer(signal.ITIMER_REAL, 1e-4 * (number + 1))
                    if message.offset == 199:
                        consumer.seek((topic, "0-0"), 0)  # which may come after it was closed
        say("well")
    """
    with script(shop, body, topic, group) as process:
        assert line(process) == "well"
        assert process.wait(60) == 0


WAYS: dict[str, Callable[[Any], object]] = {
    "iteration": lambda consumer: next(iter(consumer)),
    "batches": lambda consumer: next(consumer.batches()),
    "run": lambda consumer: consumer.run(lambda _: consumer.close()),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_second_thread_that_iterates_is_refused_while_the_first_is_at_it(shop: Shop, group: str, way: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 5)
    use = WAYS[way]
    with ThreadPoolExecutor(1, "second") as second, shop.consumer(topic, group, idle_timeout_s=60) as consumer:
        for message in consumer:
            refused = second.submit(use, consumer)
            with pytest.raises(ConfigError, match=r"thread 'MainThread' iterates this consumer already\..*concurrency"):
                refused.result(60)
            assert consumer.health().partitions[tp(topic)].done_offset == message.offset, "it is not done by that"
            if message.offset == 2:
                break
        second.submit(use, consumer).result(60)  # the first has left its loop


def test_a_loop_may_be_handed_on_from_thread_to_thread(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 5)
    with shop.consumer(topic, group) as consumer:
        messages = iter(consumer)
        got = []
        for _ in range(2):
            thread = threading.Thread(target=lambda: got.append(next(messages).offset))
            thread.start()
            thread.join(60)
        assert [*got, next(messages).offset, next(iter(consumer)).offset] == [0, 1, 2, 3]


def test_a_loop_that_a_dead_thread_left_open_holds_up_nobody(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 5)
    with shop.consumer(topic, group) as consumer:
        kept: list[Any] = []

        def leave_it_open() -> None:
            kept.append(consumer.batches())
            next(kept[0])

        thread = threading.Thread(target=leave_it_open)
        thread.start()
        thread.join(60)
        consumer.seek(tp(topic), 0)
        assert next(iter(consumer)).offset == 0


def test_an_unclosed_consumer_warns_and_gives_its_partitions_back(shop: Shop, group: str) -> None:
    topic = shop.topic()
    consumers = [shop.consumer(topic, group)]
    shop.until(lambda: consumers[0].assignment)
    with pytest.warns(ResourceWarning, match="a Consumer was not closed"):
        consumers.clear()
    gc.collect()
    shop.until(lambda: shop.admin.describe_group(group).members == ())


@pytest.mark.slow
def test_a_process_that_ends_without_close_ends(shop: Shop, group: str) -> None:
    topic = shop.topic()
    shop.numbers(topic, 5)
    body = """
        consumer = Consumer(servers, topics=topic, group=group)
        for message in consumer:
            if message.offset == 3:
                break
        say("read")
    """
    with script(shop, body, topic, group) as process:
        assert line(process) == "read"
        assert process.wait(60) == 0
