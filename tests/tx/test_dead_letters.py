"""Dead letters are sent again exactly once, also if the process is killed or two do it at a time."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from metamq import DeadLetter, DeadLetterQueue, LetterFilter, aio
from metamq.client.handling.dead_letters import dead_letter_headers, dead_letter_topic
from metamq.client.model import Message
from metamq.errors import ConfigError, ConnectError, NotAuthorized, TopicNotFound, WrongType
from metamq.testing import Cluster
from metamq.tx.app import aio_dead_letters
from metamq.zk.groups.settled_letters import SettledLetters
from tests.one_zookeeper import cluster
from tests.parts import SLOW_S, read_to_end


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    """Two brokers, so a transaction has two branches."""
    with cluster(brokers=2) as found:
        yield found


@pytest.fixture
def group() -> str:
    return f"g-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def queue(running: Cluster, group: str) -> Iterator[DeadLetterQueue]:
    with DeadLetterQueue(group, running.zookeeper) as found:
        yield found


def give_up(running: Cluster, group: str, count: int) -> str:
    """Makes letters from a new topic, as listeners do: with the keys "0", "1", "2"; returns the topic."""
    topic = f"t-{group}"
    running.create_topic(topic, partitions=2)
    running.create_topic(dead_letter_topic(group), partitions=1)
    with running.producer() as producer:
        for number in range(count):
            key, value = b"%d" % (number % 3), b"%d" % number
            message = Message(topic, "0-0", number, key, value, {"own": b"header"}, 1_000_000 * number)
            error = ValueError("odd") if number % 2 else ConnectError("somewhere", "away")
            producer.send(dead_letter_topic(group), value, key, dead_letter_headers(message, error, 5))
    return topic


def values(running: Cluster, topic: str) -> list[int]:
    with running.consumer(topics=topic, start="earliest", idle_timeout_s=0.3) as consumer:
        return sorted(int(message.value) for message in read_to_end(consumer))


def test_letters_show_where_they_come_from_and_why(running: Cluster, group: str, queue: DeadLetterQueue) -> None:
    topic = give_up(running, group, 4)
    letters = list(queue.letters())
    assert [letter.id for letter in letters] == ["0-0:0", "0-0:1", "0-0:2", "0-0:3"]
    last = letters[3]
    assert (last.topic, last.partition, last.offset, last.key, last.value) == (topic, "0-0", 3, b"0", b"3")
    assert (last.attempts, last.resent, last.error) == (5, 0, "ValueError: odd")
    assert last.headers == {"own": b"header"}
    assert last.sent == datetime.fromtimestamp(3, UTC)
    found = queue.summary()
    assert (found.group, found.letters, found.errors) == (group, 4, {"ConnectError": 2, "ValueError": 2})
    assert found.oldest == letters[0].given_up <= letters[3].given_up == found.newest


LETTER = DeadLetter("0-0:7", datetime(2026, 11, 1, tzinfo=UTC), "t", "0-0", 1, datetime(2026, 10, 1, tzinfo=UTC), 5,
                    "ValueError: Odd", 0, b"k", b"v", {})  # fmt: skip


@pytest.mark.parametrize(
    ("selected", "is_selected"),
    [
        (LetterFilter(), True),
        (LetterFilter(ids=["0-0:7"]), True),
        (LetterFilter(ids=["0-0:8"]), False),
        (LetterFilter(ids=[]), False),
        (LetterFilter(error="odd"), True),
        (LetterFilter(error="even"), False),
        (LetterFilter(key=b"k"), True),
        (LetterFilter(key=b""), False),
        (LetterFilter(topic="t"), True),
        (LetterFilter(topic="u"), False),
        (LetterFilter(since=LETTER.given_up), True),
        (LetterFilter(until=LETTER.given_up), False),
        (LetterFilter(since=LETTER.given_up + timedelta(seconds=1)), False),
        (LetterFilter(error="odd", key=b"other"), False),
    ],
)
def test_a_filter(selected: LetterFilter, is_selected: bool) -> None:
    assert selected.selects(LETTER) == is_selected


def test_a_time_without_a_zone_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no time zone"):
        LetterFilter(since=datetime(2026, 11, 1))


def test_selected_letters_are_sent_again_and_the_others_stay(
    running: Cluster, group: str, queue: DeadLetterQueue
) -> None:
    topic = give_up(running, group, 10)
    assert queue.resend(LetterFilter(error="odd")) == 5
    with running.consumer(topics=topic, start="earliest", idle_timeout_s=0.3) as consumer:
        messages = read_to_end(consumer)
    assert sorted(int(message.value) for message in messages) == [1, 3, 5, 7, 9]
    assert all(message.headers == {"own": b"header", "metamq-resent": b"1"} for message in messages)
    assert {int(message.value) % 3: message.key for message in messages} == {0: b"0", 1: b"1", 2: b"2"}
    assert [int(letter.value) for letter in queue.letters()] == [0, 2, 4, 6, 8]
    assert queue.purge(LetterFilter(key=b"0")) == 2
    assert queue.resend() == 3
    assert (queue.resend(), queue.purge(), queue.summary().letters) == (0, 0, 0)
    assert values(running, topic) == [1, 2, 3, 4, 5, 7, 8, 9]


def test_a_letter_that_fails_again_says_how_often_it_was_sent(
    running: Cluster, group: str, queue: DeadLetterQueue
) -> None:
    topic = give_up(running, group, 1)

    def fail(message: Message[bytes]) -> None:
        raise ValueError("again")

    for _ in range(2):
        queue.resend()
        with running.consumer(topics=topic, group=group, start="earliest", idle_timeout_s=0.5) as consumer:
            consumer.run(fail, max_attempts=1)
    (letter,) = queue.letters()
    assert (letter.resent, letter.error, letter.headers) == (2, "ValueError: again", {"own": b"header"})


def test_another_topic(running: Cluster, group: str, queue: DeadLetterQueue) -> None:
    topic = give_up(running, group, 3)
    with pytest.raises(TopicNotFound, match=f"{group}-missing"):
        queue.resend(to=f"{group}-missing")
    running.create_topic(f"{group}-other", partitions=1)
    assert queue.resend(to=f"{group}-other") == 3
    assert (values(running, topic), values(running, f"{group}-other")) == ([], [0, 1, 2])


def test_a_group_without_letters(queue: DeadLetterQueue) -> None:
    assert queue.summary().letters == queue.resend() == queue.purge() == 0
    assert list(queue.letters()) == []


def test_a_new_topic_of_the_name_has_new_letters(running: Cluster, group: str, queue: DeadLetterQueue) -> None:
    give_up(running, group, 3)
    assert queue.purge() == 3
    with running.admin() as admin:
        for topic in (dead_letter_topic(group), f"t-{group}"):
            admin.delete(topic)
    give_up(running, group, 2)
    assert queue.summary().letters == 2


class CrashError(Exception):
    """Stands for the end of the process: what is prepared stays so."""


def crash(*_arguments: Any, **_named: Any) -> Any:
    raise CrashError


async def crash_after_the_decision(session: Any, group: str, settled: SettledLetters) -> Any:
    await _write(session, group, settled)
    raise CrashError


_write = aio_dead_letters.write_settled


@pytest.mark.parametrize("step", [crash, crash_after_the_decision], ids=["before", "after"])
def test_a_crash_at_the_decision(
    running: Cluster, group: str, monkeypatch: pytest.MonkeyPatch, step: Callable[..., Any]
) -> None:
    topic = give_up(running, group, 20)
    with monkeypatch.context() as patched, DeadLetterQueue(group, running.zookeeper) as first:
        patched.setattr(aio_dead_letters, "write_settled", step)
        with pytest.raises(CrashError):
            first.resend()
        assert values(running, topic) == [], "prepared, and not committed"
    with DeadLetterQueue(group, running.zookeeper) as second:
        assert second.resend() == (20 if step is crash else 0)
        assert second.summary().letters == 0
    assert values(running, topic) == list(range(20))


@pytest.mark.slow
@pytest.mark.parametrize("by_other", [20, 0])
def test_a_late_decision_of_a_paused_process_fails(
    running: Cluster, group: str, monkeypatch: pytest.MonkeyPatch, by_other: int
) -> None:
    """It has prepared; another process ends its transaction, and resends all letters or none. Then it continues."""
    topic = give_up(running, group, 20)
    with DeadLetterQueue(group, running.zookeeper) as paused, DeadLetterQueue(group, running.zookeeper) as other:
        at_the_decision, goes_on = threading.Event(), threading.Event()

        async def wait(session: Any, group: str, settled: SettledLetters) -> Any:
            if not at_the_decision.is_set():
                at_the_decision.set()
                await asyncio.to_thread(goes_on.wait, SLOW_S)
            return await _write(session, group, settled)

        monkeypatch.setattr(aio_dead_letters, "write_settled", wait)
        sent: list[int] = []
        thread = threading.Thread(target=lambda: sent.append(paused.resend()))
        thread.start()
        assert at_the_decision.wait(SLOW_S)
        assert other.resend(LetterFilter(error="" if by_other else "no such error")) == by_other
        goes_on.set()
        thread.join(SLOW_S)
        assert sent == [20 - by_other]
    assert values(running, topic) == list(range(20))


@pytest.mark.slow
def test_two_at_a_time(running: Cluster, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = give_up(running, group, 200)
    monkeypatch.setattr(aio_dead_letters, "CHUNK_LETTERS", 10)
    sent: list[int] = []

    def resend() -> None:
        with DeadLetterQueue(group, running.zookeeper) as own:
            sent.append(own.resend())

    threads = [threading.Thread(target=resend) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SLOW_S)
    assert (len(sent), sum(sent)) == (3, 200)
    assert values(running, topic) == list(range(200))


PROGRAM = """
import sys
from metamq import DeadLetterQueue
from metamq.tx.app import aio_dead_letters
aio_dead_letters.CHUNK_LETTERS = 20

def told(step):
    async def run(*arguments):
        print(step.__name__, flush=True)
        return await step(*arguments)
    return run

for place, name in (
    (aio_dead_letters, "write_settled"), (aio_dead_letters.Producer, "tpc_prepare"),
    (aio_dead_letters.Producer, "tpc_commit"), (aio_dead_letters.Producer, "tpc_recover"),
):
    setattr(place, name, told(getattr(place, name)))
with DeadLetterQueue(sys.argv[2], sys.argv[1]) as queue:
    print("open", flush=True)
    queue.resend()
"""


@pytest.mark.slow
def test_killed_at_any_time(running: Cluster, group: str, report_figures: Callable[[str], None]) -> None:
    """A kill comes as a random step begins, and so in it or in the next one."""
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    count, kills = 1000, Counter[bool]()
    topic = give_up(running, group, count)
    while not kills[True]:
        child = subprocess.Popen([sys.executable, "-c", PROGRAM, running.zookeeper, group], stdout=subprocess.PIPE)
        assert child.stdout is not None
        for _ in range(chance.randrange(1, 25)):
            child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        kills[child.wait() == 0] += 1
        child.stdout.close()
    with DeadLetterQueue(group, running.zookeeper) as queue:
        assert queue.resend() == 0, f"seed {seed}"
    assert values(running, topic) == list(range(count)), f"seed {seed}"
    report_figures(f"seed {seed}: {kills[False]} kills before {count} letters were sent")


def test_asyncio(running: Cluster, group: str) -> None:
    topic = give_up(running, group, 5)

    async def settle() -> None:
        async with aio.DeadLetterQueue(group, running.zookeeper) as queue:
            assert (await queue.summary()).letters == 5
            assert [int(letter.value) async for letter in queue.letters(LetterFilter(error="odd"))] == [1, 3]
            progress: list[int] = []
            assert await queue.resend(LetterFilter(ids=["0-0:0", "0-0:1"]), progress=progress.append) == 2
            assert progress == [2]
            assert await queue.purge() == 3

    asyncio.run(settle())
    assert values(running, topic) == [0, 1]


def test_messages_that_are_no_letters_are_passed_over(running: Cluster, group: str, queue: DeadLetterQueue) -> None:
    topic = give_up(running, group, 1)
    with running.producer() as producer:
        producer.send(dead_letter_topic(group), b"sent by hand")
    assert (queue.summary().letters, queue.resend()) == (1, 1)
    assert values(running, topic) == [0]
    with pytest.raises(ConfigError, match="is a dead-letter topic"):
        queue.resend(to=dead_letter_topic(group))


def test_letters_that_come_during_a_call_are_left_to_the_next(
    running: Cluster, group: str, queue: DeadLetterQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of listeners that still fail: else one call would send the same messages again and again."""
    topic = give_up(running, group, 6)
    monkeypatch.setattr(aio_dead_letters, "CHUNK_LETTERS", 2)

    def fail_again(_count: int) -> None:
        give_up_again()

    with running.producer() as producer:

        def give_up_again() -> None:
            message = Message(topic, "0-0", 0, None, b"99", {}, 0)
            producer.send(dead_letter_topic(group), b"99", None, dead_letter_headers(message, ValueError("x"), 1))

        assert queue.resend(progress=fail_again) == 6
    assert [letter.value for letter in queue.letters()] == [b"99"] * 3


def test_a_change_that_is_refused_leaves_nothing_prepared(
    running: Cluster, group: str, queue: DeadLetterQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = give_up(running, group, 3)

    async def refuse(*_arguments: Any) -> Any:
        raise NotAuthorized("etl", "write", "znode")

    with monkeypatch.context() as patched:
        patched.setattr(aio_dead_letters, "write_settled", refuse)
        with pytest.raises(NotAuthorized):
            queue.resend()
    with running.producer() as producer:
        assert [xid for xid in producer.tpc_recover() if xid.gtrid.startswith(b"letters-")] == []
    assert (queue.resend(), values(running, topic)) == (3, [0, 1, 2])


def test_a_cancelled_call_is_repeated_in_the_same_task(
    running: Cluster, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = give_up(running, group, 3)

    async def hang(*_arguments: Any) -> Any:
        await asyncio.Event().wait()

    async def resend() -> int:
        async with aio.DeadLetterQueue(group, running.zookeeper) as queue:
            with monkeypatch.context() as patched:
                patched.setattr(aio_dead_letters, "write_settled", hang)
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(2):
                        await queue.resend()
            return await queue.resend()

    assert asyncio.run(resend()) == 3
    assert values(running, topic) == [0, 1, 2]


def test_settled_ranges() -> None:
    settled = SettledLetters("id").settle([("0-0", n) for n in (1, 2, 5, 7)], committing="x")
    assert settled.settled == {"0-0": [(1, 3), (5, 6), (7, 8)]}
    assert [n for n in range(9) if settled.has("0-0", n)] == [1, 2, 5, 7]
    assert not settled.has("0-1", 1)
    assert settled.of_topic("id", {"0-0": 6}).settled == {"0-0": [(0, 6), (7, 8)]}
    assert settled.of_topic("id", {"0-0": 0}) == settled
    other = settled.of_topic("another", {})
    assert (other.topic_id, other.settled, other.committing) == ("another", {}, "x")


@pytest.mark.parametrize(
    "wrong", [{"ids": "0-0:7"}, {"ids": 7}, {"error": b"x"}, {"key": 7}, {"topic": None}, {"since": "-1h"}]
)
def test_wrong_filters(wrong: dict[str, Any]) -> None:
    with pytest.raises(WrongType, match=f"`{next(iter(wrong))}`"):
        LetterFilter(**wrong)


def test_a_header_that_a_producer_forged(running: Cluster, group: str, queue: DeadLetterQueue) -> None:
    give_up(running, group, 0)
    message = Message("t", "0-0", 0, b"k", b"v", {"metamq-resent": b"banana", "metamq-topic": b"elsewhere"}, 0)
    with running.producer() as producer:
        producer.send(dead_letter_topic(group), b"v", b"k", dead_letter_headers(message, ValueError(), 1))
    (letter,) = queue.letters(LetterFilter(key="k"))
    assert (letter.topic, letter.resent) == ("t", 0)
    wrong: Any = "0-0:0"
    with pytest.raises(WrongType, match="`selected`"):
        queue.purge(wrong)
