"""Groups under attack: members killed, frozen, thawed, joining and leaving at random, as processes.

Each member tells in a file what it handles and commits, and under which claim. A judge goes through all of it; a
watcher looks at the nodes in ZooKeeper, or the rows in the database, all the while. The judge has to find what is wrong
with doctored histories, too.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from metamq import Consumer, Message, TopicPartition
from metamq.errors import ClosedError, ConnectError
from metamq.zk.groups.ownership import read_offset
from metamq.zk.session.session import Session
from tests.client.group_judge import Commit, Freeze, Handled, History, judge
from tests.database_offsets import offsets_in

if TYPE_CHECKING:
    from tests.client.conftest import Shop

MEMBER = Path(__file__).with_name("group_member.py")
SESSION_TIMEOUT_MS = 2_000


# The judge


def a_history() -> History:
    """Two members, one partition of ten messages: a handles 0 to 4, commits 3 and is killed; b goes on from 3."""
    first = [Handled("a", "0-0", 100, offset, float(offset)) for offset in range(5)]
    second = [Handled("b", "0-0", 200, offset, 10.0 + offset) for offset in range(3, 10)]
    commits = [Commit("a", "0-0", 100, 3, "ok"), Commit("b", "0-0", 200, 10, "ok")]
    return History(first + second, commits, [], {"0-0": 10}, {"0-0": 10})


DOCTORED: dict[str, tuple[Callable[[History], History], str]] = {
    "a message is lost": (lambda h: replace(h, handled=[e for e in h.handled if e.offset != 7]), "never handled"),
    "a partition is never read": (lambda h: replace(h, ends={**h.ends, "0-1": 4}), "0-1: never handled"),
    "the end is not committed": (lambda h: replace(h, committed={"0-0": 9}), "9 is committed of 10"),
    "two messages are swapped": (
        lambda h: replace(h, handled=[*h.handled[:2], h.handled[3], h.handled[2], *h.handled[4:]]),
        "does not go on in order",
    ),
    "one is handled twice under a claim": (
        lambda h: replace(h, handled=[*h.handled[:3], h.handled[2], *h.handled[3:]]),
        "does not go on in order",
    ),
    "what was committed comes again": (
        lambda h: replace(h, handled=[*h.handled[:5], Handled("b", "0-0", 200, 2, 9.5), *h.handled[5:]]),
        "an earlier one committed 3",
    ),
    "a former owner's commit gets through": (
        lambda h: replace(h, commits=[*h.commits, Commit("a", "0-0", 100, 5, "ok")]),
        "an earlier one committed 5",
    ),
    "the next owner begins where nobody committed": (
        lambda h: replace(h, commits=[Commit("a", "0-0", 100, 2, "ok"), h.commits[1]]),
        "where nobody committed",
    ),
    "a former owner goes on": (
        lambda h: replace(h, handled=[*h.handled, Handled("a", "0-0", 100, 5, 14.0)]),
        "a begins 5 1.000 s after",
    ),
    "one that was frozen goes on for long": (
        lambda h: replace(h, handled=[*h.handled, Handled("a", "0-0", 100, 5, 16.5)], freezes=[Freeze("a", 4.5, 15.0)]),
        "a begins 5 3.500 s after",
    ),
    "two members have one claim": (
        lambda h: replace(h, handled=[*h.handled[:-1], h.handled[-1]._replace(member="c")]),
        "is of two members",
    ),
}


def test_the_judge_finds_nothing_wrong_with_a_history_that_is_well() -> None:
    history = a_history()
    assert judge(history) == []
    # A frozen member finishes what it had in hand; a commit without an answer may have been carried out or not.
    thawed = [*history.handled, Handled("a", "0-0", 100, 5, 15.2)]
    assert judge(replace(history, handled=thawed, freezes=[Freeze("a", 4.5, 15.0)])) == []
    unknown = [Commit("a", "0-0", 100, 3, "unknown"), Commit("a", "0-0", 100, 5, "unknown"), history.commits[1]]
    assert judge(replace(history, commits=unknown)) == []


@pytest.mark.parametrize("name", DOCTORED)
def test_the_judge_bites(name: str) -> None:
    doctor, verdict = DOCTORED[name]
    assert any(verdict in problem for problem in judge(doctor(a_history())))


# The group


@dataclass
class Member:
    names: list[str]
    """Several members of one process share its session."""
    process: subprocess.Popen[str]
    frozen_at: float | None = None


@dataclass
class Attacked:
    """A group of member processes, and what befell them."""

    shop: Shop
    topic: str
    group: str
    folder: Path
    partitions: list[str]
    database: str = ""
    consumers: int = 1
    """The members of each process."""
    members: list[Member] = field(default_factory=list)
    leaving: list[Member] = field(default_factory=list)
    freezes: list[Freeze] = field(default_factory=list)
    _names: int = 0

    def join(self) -> Member:
        names = [f"m{self._names + number}" for number in range(self.consumers)]
        self._names += self.consumers
        arguments = [self.shop.cluster.zookeeper, self.topic, self.group, ",".join(names), str(self.folder)]
        command = [sys.executable, str(MEMBER), *arguments, self.database, str(SESSION_TIMEOUT_MS)]
        with (self.folder / f"{names[0]}.err").open("w") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        member = Member(names, process)
        self.members.append(member)
        return member

    def joined(self) -> None:
        """Until all who are joining are members."""
        for member in self.members:
            assert member.process.stdout is not None
            assert member.process.stdout.readline() == "joined\n", self.errors()

    def leave(self, member: Member) -> None:
        """Does not wait: it may wait for a database's lock, which a frozen member holds."""
        self._end(member, signal.SIGTERM)

    def kill(self, member: Member) -> None:
        self._end(member, signal.SIGKILL)

    def _end(self, member: Member, number: signal.Signals) -> None:
        self.thaw(member)
        member.process.send_signal(number)
        self.members.remove(member)
        self.leaving.append(member)

    def wait_left(self) -> None:
        """Until all who are leaving have ended. None may be frozen."""
        while self.leaving:
            self.leaving[-1].process.communicate(timeout=90)
            self.leaving.pop()

    def freeze(self, member: Member) -> None:
        if member.frozen_at is None:
            member.frozen_at = time.monotonic()
            member.process.send_signal(signal.SIGSTOP)

    def thaw(self, member: Member) -> None:
        if member.frozen_at is not None:
            member.process.send_signal(signal.SIGCONT)
            self.freezes += [Freeze(name, member.frozen_at, time.monotonic()) for name in member.names]
            member.frozen_at = None

    def produce(self, count: int) -> None:
        """`count` messages to each partition; does not wait."""
        for partition in self.partitions:
            for _ in range(count):
                self.shop.producer.send(self.topic, b".", partition=partition)

    def ends(self) -> dict[str, int]:
        partitions = self.shop.admin.describe_topic(self.topic).partitions
        return {each.partition: each.stable_offset or 0 for each in partitions}

    def committed(self) -> dict[str, int]:
        if self.database:
            with closing(sqlite3.connect(self.database, timeout=60)) as connection:
                rows = connection.execute("SELECT partition_name, next_offset FROM metamq_offsets").fetchall()
            return {partition: max(offset, 0) for partition, offset in rows}
        return {tp.partition: offset or 0 for tp, offset in self.shop.committed(self.group).items()}

    def history(self) -> History:
        return History(*self.told(), [*self.freezes, *self.stalls()], self.ends(), self.committed())

    def lines(self) -> Iterator[tuple[str, str, list[Any]]]:
        """(member, what, fields) of what the members wrote down."""
        for file in self.folder.glob("*.log"):
            for line in file.read_text().splitlines():
                what, *fields = json.loads(line)
                yield file.stem, what, fields

    def stalls(self) -> list[Freeze]:
        """When members stood still, frozen or on a machine that had no time for them."""
        return [Freeze(member, *fields) for member, what, fields in self.lines() if what == "stall"]

    def told(self) -> tuple[list[Handled], list[Commit]]:
        """What the members wrote down. It asks no database: a frozen member may hold SQLite's lock."""
        handled, commits = [], []
        for member, what, fields in self.lines():
            if what == "handle":
                handled.append(Handled(member, *fields))
            elif what == "commit":
                commit = Commit(member, *fields)
                if commits and commits[-1] == commit._replace(outcome="unknown"):
                    commits.pop()  # it was told before it was tried
                commits.append(commit)
        return handled, commits

    def errors(self) -> str:
        return "\n".join(f"{file.name}: {file.read_text()}" for file in self.folder.glob("*.err"))

    def drain(self, limit_s: float = 120.0) -> None:
        """Until everything is handled and committed; then all leave."""
        self.shop.producer.flush()
        ends = self.ends()
        self.shop.until(lambda: self.committed() == ends, limit_s)
        while self.members:
            self.leave(self.members[0])
        self.wait_left()


class Watcher:
    """Looks at the owner nodes and at what is committed, over and over, in a thread with a session of its own.

    The owner node and the claim in the offset node change in one transaction: seen between two equal looks at the
    offset node, they name the same member. Generations and committed offsets never go down.
    """

    def __init__(self, attacked: Attacked) -> None:
        self.problems: list[str] = []
        self.looks = 0
        self._attacked = attacked
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._watch())
        except Exception as error:
            self.problems.append("".join(traceback.format_exception(error)))

    async def _watch(self) -> None:
        servers, group = self._attacked.shop.cluster.zookeeper, self._attacked.group
        seen: dict[str, tuple[int, int]] = {}
        async with await Session.open(servers) as session:
            while not self._stop.is_set():
                for partition in self._attacked.partitions:
                    try:
                        await self._look(session, group, TopicPartition(self._attacked.topic, partition), seen)
                    except ConnectError:
                        await asyncio.sleep(0.05)
                self._look_at_database(seen)
                await asyncio.sleep(0)

    async def _look(self, session: Session, group: str, tp: TopicPartition, seen: dict[str, tuple[int, int]]) -> None:
        before = await read_offset(session, group, tp)
        owner = await session.get_or_none(session.paths.owner(group, *tp))
        after = await read_offset(session, group, tp)
        if before is None or after is None:
            return
        self.looks += 1
        if before == after and owner is not None and owner.data.decode() != before[0].consumer:
            self.problems.append(f"{tp}: {owner.data!r} owns what {before[0].consumer} claimed")
        for record, _ in (before, after):
            self._compare(tp.partition, seen, record.generation, record.committed.offset if record.committed else 0)

    def _look_at_database(self, seen: dict[str, tuple[int, int]]) -> None:
        if self._attacked.database:
            with closing(sqlite3.connect(self._attacked.database, timeout=60)) as connection:
                rows = list(connection.execute("SELECT partition_name, generation, next_offset FROM metamq_offsets"))
            for partition, generation, next_offset in rows:
                self._compare(f"row of {partition}", seen, generation, next_offset)

    def _compare(self, place: str, seen: dict[str, tuple[int, int]], generation: int, offset: int) -> None:
        before = seen.get(place, (0, -1))
        if generation < before[0] or offset < before[1]:
            self.problems.append(f"{place}: claim {generation} at {offset} after claim {before[0]} at {before[1]}")
        seen[place] = generation, offset


@contextmanager
def attacked(shop: Shop, folder: Path, group: str, partitions: int, storage: str) -> Iterator[Attacked]:
    """A group to attack; at the end it is drained, and its history is judged."""
    database = ""
    if storage == "database":
        database = str(folder / "offsets.sqlite3")
        with closing(sqlite3.connect(database)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")  # the watcher reads while a frozen member writes
        offsets_in(lambda: sqlite3.connect(database))
    topic = shop.topic(partitions)
    target = Attacked(shop, topic, group, folder, [f"0-{index}" for index in range(partitions)], database)
    try:
        with Watcher(target) as watcher:
            yield target
            for member in target.members:
                target.thaw(member)
            target.drain()
        assert judge(target.history()) == [], target.errors()
        assert watcher.problems == []
        assert watcher.looks > 20
    finally:
        for member in target.members + target.leaving:
            member.process.kill()
            member.process.communicate()


STORAGES = ["zookeeper", "database"]


@pytest.mark.slow
@pytest.mark.parametrize("storage", STORAGES)
def test_a_member_that_is_killed_or_leaves_is_followed_by_the_others(
    shop: Shop, group: str, tmp_path: Path, storage: str
) -> None:
    with attacked(shop, tmp_path, group, 6, storage) as target:
        members = [target.join() for _ in range(3)]
        target.joined()
        target.produce(100)
        shop.until(lambda: len(target.history().handled) > 100)
        target.kill(members[0])
        shop.until(lambda: len(target.history().handled) > 250)
        target.leave(members[1])
        target.produce(20)


@pytest.mark.slow
@pytest.mark.parametrize("storage", STORAGES)
def test_a_member_frozen_past_its_session_finds_its_partitions_gone_and_commits_nothing(
    shop: Shop, group: str, tmp_path: Path, storage: str
) -> None:
    with attacked(shop, tmp_path, group, 6, storage) as target:
        members = [target.join() for _ in range(2)]
        target.joined()
        target.produce(200)

        def are_all_busy() -> bool:
            handled = target.told()[0]
            return len({each.partition for each in handled}) == 6 and len({each.member for each in handled}) == 2

        shop.until(are_all_busy)
        target.freeze(members[0])

        def is_back() -> bool:
            """When it handles messages under a new claim."""
            target.produce(1)
            return any(each.member == "m0" and each.generation not in claimed for each in target.history().handled)

        def is_followed() -> bool:
            target.produce(1)
            return len({each.partition for each in target.told()[0] if each.member == "m1"}) == 6

        shop.until(lambda: [each.consumer_id for each in shop.admin.describe_group(group).members] == ["m1"])
        if storage == "zookeeper":  # in the database the frozen member may hold the lock
            shop.until(is_followed)
        handled, told_before = target.told()
        claimed = {each.generation for each in handled if each.member == "m0"}
        followed = {each.partition: each.generation for each in handled if each.member == "m1"}
        # It may have been stopped in a transaction of the database, which then waits for it.
        target.thaw(members[0])
        shop.until(is_back)
    # What it commits under claims that were followed once it is thawed fails, but for what had reached the storage.
    mine = [each for each in target.told()[1] if each.member == "m0"]
    late = [each for each in mine if each.generation < followed.get(each.partition, 0)]
    through = [each for each in late if each.outcome == "ok" and each not in told_before]
    assert [each for each in through if each._replace(outcome="unknown") not in told_before] == []


def attack(target: Attacked, chance: random.Random, duration_s: float) -> dict[str, int]:
    """Ten members at most, three at least; what happens next is chance."""
    most, least = 10 // target.consumers, 3 // target.consumers
    steps: dict[str, int] = defaultdict(int)
    thaws: list[tuple[float, Member]] = []
    end = time.monotonic() + duration_s
    while time.monotonic() < end:
        target.produce(chance.randrange(3))
        awake = [member for member in target.members if member.frozen_at is None]
        step = chance.choices(["join", "leave", "kill", "freeze", "wait"], [4, 2, 2, 2, 3])[0]
        if step == "join" and len(target.members) < most:
            target.join()
        elif step in ("leave", "kill") and len(awake) > least:
            (target.leave if step == "leave" else target.kill)(chance.choice(awake))
        elif step == "freeze" and len(awake) > least:
            victim = chance.choice(awake)
            target.freeze(victim)
            thaws.append((time.monotonic() + chance.choice([0.3, 1.5, 3.5]), victim))
        else:
            step = "wait"
        steps[step] += 1
        for due in [due for due in thaws if due[0] <= time.monotonic()]:
            target.thaw(due[1])
            thaws.remove(due)
        threading.Event().wait(chance.random() * 0.5)
    return steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("duration_s", "storage", "consumers"),
    [
        (6, "zookeeper", 1),
        (6, "zookeeper", 3),
        (6, "database", 1),
        pytest.param(60, "zookeeper", 1, marks=[pytest.mark.long, pytest.mark.timeout(240)]),
        pytest.param(60, "zookeeper", 3, marks=[pytest.mark.long, pytest.mark.timeout(240)]),
        pytest.param(60, "database", 3, marks=[pytest.mark.long, pytest.mark.timeout(240)]),
    ],
)
def test_ten_members_that_come_and_go_at_random(
    shop: Shop, group: str, tmp_path: Path, duration_s: float, storage: str, consumers: int
) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    with attacked(shop, tmp_path, group, 20, storage) as target:
        target.consumers = consumers
        for _ in range(-(-5 // consumers)):
            target.join()
        target.joined()  # on a slow machine the attack would be over before
        target.produce(20)
        steps = attack(target, random.Random(seed), duration_s)
        print(dict(steps))
    history = target.history()
    print(len(history.handled), "handled", len(history.commits), "commits")


# A member that is stuck


@pytest.mark.slow
def test_a_stuck_member_is_seen_from_outside_and_can_be_evicted(
    shop: Shop, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for turn in range(10):  # so short a session may end on a machine that is slow
        if is_seen_and_evicted(shop, f"{group}-{turn}", monkeypatch):
            return
    raise AssertionError("no session lives")


def is_seen_and_evicted(shop: Shop, group: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """False: its session has ended."""
    # Its session lives, so it keeps its partitions; but its beat tells that nothing gets done.
    monkeypatch.setattr("metamq.client.group.rebalance.BEAT_S", 0.05)
    monkeypatch.setattr("metamq.client.consumer.health.PROGRESS_CHECK_S", 0.05)
    topic = shop.topic(2)
    stuck, go_on = threading.Event(), threading.Event()
    ends: list[ClosedError] = []

    def handler(message: Message[bytes]) -> None:
        stuck.set()
        go_on.wait(120)

    def ages() -> dict[str, int]:
        return {each.consumer_id: each.progress_age_ms for each in shop.admin.describe_group(group).members}

    with (
        shop.consumer(topic, group, consumer_id="a", session_timeout_ms=1_000) as a,
        shop.consumer(topic, group, consumer_id="b", idle_timeout_s=60) as b,
    ):
        session = a._core._session
        assert session is not None
        shop.until(lambda: len(a.assignment) == len(b.assignment) == 1 or session.generation > 1)
        if session.generation > 1:
            return False
        running = threading.Thread(target=run_and_tell, args=(a, handler, ends))
        running.start()
        shop.numbers(topic, 1)  # to 0-0, which is a's
        assert stuck.wait(60)
        # Longer than its session's time-out. b has nothing to do either, but says so.
        shop.until(lambda: ages().get("a", 0) > 1_500 or session.generation > 1)
        shop.until(lambda: ages()["b"] < 1_000)
        if session.generation > 1:
            go_on.set()
            a.close()
            running.join(60)
            return False
        assert b.assignment == [TopicPartition(topic, "0-1")]
        assert shop.admin.evict(group, "a") == (TopicPartition(topic, "0-0"),)
        assert next(iter(b)).offset == 0
        go_on.set()
        running.join(60)
        assert "evicted" in str(ends[0])
        with pytest.raises(ClosedError, match="evicted"):
            next(iter(a))
        b.commit({TopicPartition(topic, "0-0"): 1})
    assert shop.committed(group)[TopicPartition(topic, "0-0")] == 1
    return True


def run_and_tell(
    consumer: Consumer[bytes], handler: Callable[[Message[bytes]], object], ends: list[ClosedError]
) -> None:
    try:
        consumer.run(handler)
    except ClosedError as error:
        ends.append(error)
