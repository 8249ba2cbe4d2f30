"""A master and a slave with the real journal and logs, a link that a test moves step by step, and power cuts of either.

What the real link, in-sync set and handshake promise is taken for granted here, and tried in tests/broker/ha: a slave
in the set holds all that is stable; one that lost something, or was let go, is not promoted without an accepted loss;
a slave's logs are cut to where they are the master's.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from metamq.broker.data.partition import Partition
from metamq.broker.log.partition_log import PartitionLog
from metamq.broker.transactions.journal import TOPIC as JOURNAL
from metamq.broker.transactions.journal import TOPIC_ID as JOURNAL_ID
from metamq.broker.transactions.term import CommitsFirst
from metamq.errors import CorruptData
from metamq.wire.batch import walk
from metamq.wire.xa import Verb, XACode, Xid
from tests.tx.crash_history import Violation
from tests.tx.sim_broker import LOOP, PARTS, Key, Replica, flush, let_tasks_go_on, new_replica
from tests.tx.sim_disk import DiskOs, power_cuts

JOURNAL_KEY = JOURNAL, JOURNAL_ID, 0
WORK = (Verb.START, Verb.SEND, Verb.END)


@dataclass
class Branch:
    """A transaction, as its manager knows it."""

    xid: Xid
    sent: list[tuple[int, bytes]]
    promised: bool = False
    decision: Verb | None = None
    done: bool = False
    """Its commit was acknowledged."""
    is_lost: bool = False
    """Somebody has accepted that it may be."""
    asked: dict[Verb, int] = field(default_factory=dict)


class Plain(NamedTuple):
    """A message that was sent outside branches."""

    index: int
    value: bytes
    before: list[Branch]
    """The branches whose commits were answered before it was sent."""


class Pair:
    """Two replicas of a broker id."""

    def __init__(self, own: DiskOs, chance: random.Random) -> None:
        self.own = own
        self.chance = chance
        self.epoch = 0
        self.generation = 1
        self.followed = dict.fromkeys("ab", 1)
        """The generation that each has followed last."""
        self.replicas = {name: new_replica(own, name) for name in "ab"}
        self.master = "a"
        self.in_sync = False
        self.attached = False
        self.link: deque[tuple[Key, int, bytes]] = deque()
        self.held: dict[Key, tuple[int, int]] = {}
        self.branches: list[Branch] = []
        self.plain: list[Plain] = []
        self.what: list[str] = []
        self.begin("a")
        self.attach()

    @property
    def at_master(self) -> Replica:
        return self.replicas[self.master]

    @property
    def slave(self) -> str:
        return "b" if self.master == "a" else "a"

    @property
    def at_slave(self) -> Replica:
        return self.replicas[self.slave]

    # -- the link ------------------------------------------------------------------------------------------------------

    def begin(self, name: str) -> None:
        """A term of this replica begins. The other one counts only once it is attached, or still if it is in sync."""
        self.master, self.attached = name, False
        self.epoch += 1
        self.followed[name] = self.generation
        self.link.clear()
        replica = self.at_master
        replica.appended = lambda partition, batch, position: None
        if not self.in_sync:
            for partition in replica.logs.partitions():
                partition.unbound()
        replica.begin_term(self.epoch, self.generation, alone=False)
        for branch in self.branches:
            branch.asked.clear()
        self.check_promises()

    def attach(self) -> None:
        """The slave is cut to where it is the same, gets what it lacks, and counts."""
        for key, partition in self.at_slave.logs.open.items():
            self._catch_up(partition, self.at_master.logs.open[key])
            flush(partition)
        self.followed[self.slave] = self.generation
        self.link.clear()
        self.at_master.appended = self._appended
        self.attached = self.in_sync = True
        self.acknowledge()

    def _catch_up(self, partition: Partition, source: Partition) -> None:
        is_masters = self.followed[self.slave] == self.generation
        position = _agreement(partition, source, is_masters)
        if position is None or partition.log.start_offset > source.needed_offset:
            for path in partition.reset_to(source.log.start_offset, source.log.start_position):
                self.own.unlink(path)
        elif position < partition.log.end_position:
            partition.cut(position)
        partition.freeze()
        while partition.log.end_position < source.log.end_position:
            run = source.log.read_position(partition.log.end_position, 1 << 20)
            partition.append_replicated(memoryview(bytes(run.data)), run.position)

    def _appended(self, partition: Partition, batch: bytes, position: int) -> None:
        self.link.append(((partition.topic, partition.topic_id, partition.index), position, batch))

    def deliver(self, count: int, of: Key | None = None) -> None:
        """In any order but that of each log: a slave that was slow is sent copies. `of`: of this log alone."""
        for _ in range(min(count, len(self.link))):
            keys = {frame[0] for frame in self.link} if of is None else {of} & {frame[0] for frame in self.link}
            if not keys:
                return
            wanted = self.chance.choice(sorted(keys))
            frame = next(frame for frame in self.link if frame[0] == wanted)
            self.link.remove(frame)
            key, position, batch = frame
            self.at_slave.logs.open[key].append_replicated(memoryview(batch), position)

    def acknowledge(self) -> None:
        """The master learns what the slave holds, the slave how far readers may see, then or later."""
        is_told = self.chance.random() < 0.5
        for key, partition in self.at_slave.logs.open.items():
            log, source = partition.log, self.at_master.logs.open[key]
            own_flush = source.flushes_before_ack
            source.bound(
                log.flushed_offset if own_flush else log.end_offset,
                log.flushed_position if own_flush else log.end_position,
            )
            if is_told:
                partition.bound(source.log.stable_offset, source.log.stable_position)
        self.look_at_answers()

    def settle(self, of: Key | None = None) -> None:
        """Until everything is everywhere, or all of one log."""
        for _ in range(3):
            flush(self.at_master.journal)
            if self.attached:
                self.deliver(len(self.link), of)
                flush(self.at_slave.journal)
                self.acknowledge()
        self.look_at_answers()

    def let_go(self) -> None:
        """The slave is behind: it leaves the set."""
        self.in_sync = self.attached = False
        self.at_master.appended = lambda partition, batch, position: None
        for partition in self.at_master.logs.partitions():
            partition.unbound()
        self.look_at_answers()

    # -- faults --------------------------------------------------------------------------------------------------------

    def restart(self, name: str, *, power: bool) -> None:
        """The process dies, and with `power` what its disk had not made durable; a new one opens the logs."""
        for task in self.replicas[name].transactions._settling:
            task.cancel()
        if power:
            image = self.own.disks[name].image()
            self.own.disks[name] = self.chance.choice(list(power_cuts(image, self.chance, 12)))
        self.replicas[name] = Replica(self.own, name)
        if broken := self.replicas[name].logs.broken:
            raise Violation(f"{name} does not open: {broken}")

    def master_is_killed(self) -> None:
        """It comes back before anybody is promoted; clients ask it before its slave is attached, or dies by then."""
        self.restart(self.master, power=False)
        self.begin(self.master)
        for _ in range(self.chance.randrange(4)):
            self.go_on()
        self.put()
        flush(self.at_master.journal)
        self.look_at_answers()
        if self.in_sync and self.chance.random() < 0.3:
            self.fail_over()
        elif self.in_sync:
            self.attach()

    def fail_over(self) -> None:
        """The master dies, with or without its disk's cache; the slave, which is in sync, takes over.

        Without, the former master may be back before it has left the set.
        """
        if not self.in_sync:
            return
        power = self.chance.random() < 0.7
        self.restart(self.master, power=power)
        self.in_sync = not power and self.chance.random() < 0.5
        self.begin(self.slave)

    def fail_over_with_loss(self) -> None:
        """The slave is not in sync, and is promoted all the same."""
        if self.in_sync:
            return
        for branch in self.branches:
            branch.is_lost = True
        self.generation += 1
        former = self.master
        self.restart(former, power=True)
        self.begin(self.slave)

    def slave_loses_power(self) -> None:
        """It comes back as another incarnation, and is let go."""
        self.restart(self.slave, power=True)
        self.let_go()

    # -- transactions --------------------------------------------------------------------------------------------------

    def new_branch(self) -> None:
        number = len(self.branches)
        sent = [(self.chance.randrange(PARTS), b"%d-%d" % (number, n)) for n in range(self.chance.randint(1, 3))]
        branch = Branch(Xid(1, b"x%d" % number), sent)
        self.branches.append(branch)
        self.at_master.ask(branch.xid, *WORK, sends=sent)

    def put(self) -> None:
        """A producer sends a message outside branches."""
        plain = Plain(
            self.chance.randrange(PARTS), b"plain-%d" % len(self.plain), [one for one in self.branches if one.done]
        )
        with contextlib.suppress(CommitsFirst):
            self.at_master.put(plain.index, plain.value)
            self.plain.append(plain)

    def go_on(self) -> None:
        """A manager does what comes next for one of its branches."""
        open_ones = [branch for branch in self.branches if not branch.done and branch.decision is not Verb.ROLLBACK]
        if not open_ones:
            return self.new_branch()
        branch = self.chance.choice(open_ones)
        if branch.asked:
            return None
        if branch.promised or branch.decision is not None:
            if branch.decision is None:
                branch.decision = self.chance.choice([Verb.COMMIT, Verb.COMMIT, Verb.ROLLBACK])
            verb = branch.decision
        else:
            verb = self.chance.choice([Verb.PREPARE, Verb.COMMIT_ONE_PHASE])
        branch.asked[verb] = self.at_master.ask(branch.xid, verb)
        self.look_at_answers()
        return None

    def look_at_answers(self) -> None:
        let_tasks_go_on()
        for branch in self.branches:
            for verb, opaque in list(branch.asked.items()):
                codes = self.at_master.connection.codes(opaque)
                if codes is None:
                    continue
                del branch.asked[verb]
                if codes != [XACode.OK]:
                    if branch.decision is Verb.COMMIT and not branch.is_lost:
                        raise Violation(f"a commit was refused: {branch}, {codes}")
                    branch.decision = branch.decision or Verb.ROLLBACK  # it is over, one way or the other
                elif verb is Verb.PREPARE:
                    branch.promised = True
                elif verb is not Verb.ROLLBACK:
                    branch.done = True
                    branch.decision = Verb.COMMIT

    def upkeep(self) -> None:
        if not self.attached and self.in_sync:
            return
        work = self.chance.choice([self.at_master.transactions.upkeep.mark, self.at_master.transactions.upkeep.shorten])
        LOOP.run_until_complete(self._upkeep(work(self.at_master.term)))

    def upkeep_broken_off(self) -> None:
        """The process is killed before what it wrote last is everywhere."""
        if not self.at_master.term.is_settled:
            return
        LOOP.run_until_complete(self._broken_off(self.at_master.transactions.upkeep.shorten(self.at_master.term)))
        if self.chance.random() < 0.5:
            self.restart(self.master, power=False)  # and is the master again, before its slave is linked
            self.begin(self.master)
            self.retain(self.master)
        self.fail_over()

    async def shorten_and_flush_here(self) -> None:
        """Nothing of it reaches the slave, before the process is killed."""
        task = asyncio.ensure_future(self.at_master.transactions.upkeep.shorten(self.at_master.term))
        for _ in range(20):
            await asyncio.sleep(0)
        flush(self.at_master.journal)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def mark_with_the_journal_alone(self) -> None:
        """Nothing but the journal reaches the slave; then the process is about to be killed."""
        task = asyncio.ensure_future(self.at_master.transactions.upkeep.mark(self.at_master.term))
        for _ in range(20):
            await asyncio.sleep(0)
            self.settle(JOURNAL_KEY)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _broken_off(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        for _ in range(self.chance.randrange(12)):
            await asyncio.sleep(0)
            if self.chance.random() < 0.3:
                self.settle()
        flush(self.at_master.journal)
        if self.attached:
            self.deliver(self.chance.randrange(4))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _upkeep(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        while not task.done():
            await asyncio.sleep(0)
            self.settle(self.chance.choice([None, JOURNAL_KEY]))
        task.result()

    def retain(self, name: str) -> None:
        self.replicas[name].retain(generation=self.generation)

    # -- what has to hold ----------------------------------------------------------------------------------------------

    def check_promises(self) -> None:
        """As a term begins."""
        there = self.at_master.states()
        for branch in self.branches:
            in_doubt = branch.promised and branch.decision is None and not branch.is_lost
            if in_doubt and there.get(branch.xid) != "prepared":
                raise Violation(f"a prepared branch is forgotten: {branch}")

    def finish(self) -> None:
        if self.in_sync and not self.attached:
            self.attach()
        self.settle()
        for branch in self.branches:
            if branch.decision is None and branch.promised:
                branch.decision = Verb.ROLLBACK
            if branch.is_lost:
                continue
            if branch.decision is Verb.COMMIT:
                if self._do(branch, Verb.COMMIT) != [XACode.OK]:
                    raise Violation(f"a commit cannot be repeated: {branch}")
                branch.done = True
            elif branch.decision is Verb.ROLLBACK:
                self._do(branch, Verb.ROLLBACK)
        parts = [self.at_master.stored(index) for index in range(PARTS)]
        counts = Counter(value for part in parts for value in part)
        for branch in self.branches:
            times = {counts[value] for _index, value in branch.sent}
            if max(times) > 1:
                raise Violation(f"twice: {branch}, {parts}")
            if branch.is_lost:
                continue
            if len(times) > 1:
                raise Violation(f"torn: {branch}, {parts}")
            if branch.done and times != {1}:
                raise Violation(f"what was committed is lost: {branch}, {parts}")
            if branch.promised and branch.decision is Verb.ROLLBACK and times != {0}:
                raise Violation(f"what was rolled back is seen: {branch}, {parts}")
        for plain in self.plain:
            part = parts[plain.index]
            rest = set(part[part.index(plain.value) :]) if plain.value in part else set()
            for branch in plain.before:
                if not branch.is_lost and rest & {value for _index, value in branch.sent}:
                    raise Violation(f"{plain.value!r} overtook a commit that was answered before: {branch}, {parts}")

    def _do(self, branch: Branch, verb: Verb) -> list[XACode]:
        opaque = self.at_master.ask(branch.xid, verb)
        self.settle()
        return self.at_master.connection.codes(opaque) or []


def _agreement(partition: Partition, source: Partition, is_masters: bool) -> int | None:
    """Up to which byte two logs are the same; None: nothing says that they are. `is_masters`: what the first one had
    removed was the other's, too."""
    log, other = partition.log, source.log
    begin = position = max(log.start_position, other.start_position)
    if position > min(log.end_position, other.end_position) or _offset_at(log, position) != _offset_at(other, position):
        return None
    while position < min(log.end_position, other.end_position):
        try:
            mine, theirs = log.read_position(position, 1), other.read_position(position, 1)
        except CorruptData:  # no batch begins there in one of the two: they parted before
            return None
        _at, header = next(iter(walk(mine.data)))
        if bytes(mine.data[: header.size]) != bytes(theirs.data[: header.size]):
            break
        position += header.size
    has_what_it_removed = is_masters and begin == log.start_position  # and not what the other one has removed
    return position if position > begin or not begin or has_what_it_removed else None


def _offset_at(log: PartitionLog, position: int) -> int | None:
    """The offset that goes with a byte; None: no batch begins there."""
    if position == log.end_position:
        return log.end_offset
    try:
        _at, header = next(iter(walk(log.read_position(position, 1).data)))
    except CorruptData:
        return None
    return header.base_offset


def random_life(pair: Pair, steps: int) -> None:
    """Transactions, and whatever happens to replicas."""
    chance = pair.chance
    for _ in range(steps):
        step = chance.choices(
            ["branch", "go on", "put", "deliver", "flush", "acknowledge", "settle", "upkeep", "retain", "flush others",
             "kill", "fail over", "slave", "let go", "attach", "loss", "broken off"],
            [8, 16, 4, 10, 10, 8, 4, 4, 4, 2, 1, 2, 1, 1, 4, 0.3, 3],
        )[0]  # fmt: skip
        pair.what.append(step)
        if step == "branch":
            pair.new_branch()
        elif step == "go on":
            pair.go_on()
        elif step == "put":
            pair.put()
        elif step == "deliver" and pair.attached:
            pair.deliver(chance.randint(1, 3))
        elif step == "flush":
            flush(pair.at_master.journal)
            if pair.attached:
                flush(pair.at_slave.journal)
            pair.look_at_answers()
        elif step == "flush others":
            flush(chance.choice(list(pair.replicas.values())).part(chance.randrange(PARTS)))
        elif step == "acknowledge" and pair.attached:
            pair.acknowledge()
        elif step == "settle":
            pair.settle()
        elif step == "upkeep":
            pair.upkeep()
        elif step == "retain":
            pair.retain(chance.choice("ab"))
        elif step == "kill":
            pair.master_is_killed()
        elif step == "fail over":
            pair.fail_over()
        elif step == "slave" and pair.attached:
            pair.slave_loses_power()
        elif step == "let go" and pair.in_sync:
            pair.let_go()
        elif step == "attach" and not pair.attached:
            pair.attach()
        elif step == "broken off":
            pair.upkeep_broken_off()
        elif step == "loss":
            pair.fail_over_with_loss()
    pair.finish()
