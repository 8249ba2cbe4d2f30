"""A history of transactions with a power cut at any moment of it, and what has to hold after whatever that leaves."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from metamq.errors import MetamqError
from metamq.wire.xa import Verb, XACode, Xid
from tests.tx.sim_broker import PARTS, Replica
from tests.tx.sim_disk import Disk, DiskOs, Image, power_cuts

A, B, C, D, E, F, G, H, K = (Xid(1, bytes([letter])) for letter in b"ABCDEFGHK")
SENT: dict[Xid, list[tuple[int, bytes]]] = {
    A: [(0, b"a0"), (1, b"a1"), (0, b"a2")],
    B: [(1, b"b0"), (0, b"b1")],
    C: [(0, b"c0"), (1, b"c1")],
    D: [(1, b"d0"), (0, b"d1")],
    E: [(0, b"e0"), (1, b"e1")],
    F: [(0, b"f0")],
    G: [(1, b"g0"), (0, b"g1")],
    H: [(0, b"h0"), (1, b"h1")],
    K: [(1, b"k0"), (0, b"k1")],
}
WORK = (Verb.START, Verb.SEND, Verb.END)


class Violation(AssertionError):
    """What must hold did not."""


@dataclass
class Known:
    """What clients were told, and what they have decided: it cannot be taken back."""

    promised: set[Xid] = field(default_factory=set)
    decided: dict[Xid, Verb] = field(default_factory=dict)
    committed: set[Xid] = field(default_factory=set)
    heuristic: set[Xid] = field(default_factory=set)
    flushed: set[bytes] = field(default_factory=set)

    def copy(self) -> Known:
        return Known(
            set(self.promised), dict(self.decided), set(self.committed), set(self.heuristic), set(self.flushed)
        )


class Ended(Exception):
    """The broker's disk failed, and it ended."""


class Moment(NamedTuple):
    """A disk, between two of its changes, and what was known by then."""

    what: str
    image: Image
    known: Known


class History:
    """Notes every moment of what is done to a replica."""

    def __init__(self, own: DiskOs, *, noting: bool = True) -> None:
        """Without `noting` the moments are let pass."""
        self.known = Known()
        self.may_refuse = False
        """Whether a disk without room is no fault of the broker: what it refuses then ends the history."""
        self.moments: list[Moment] = []
        disk = own.disks["a"] = Disk()

        def note(what: str) -> None:
            if noting:
                self.moments.append(Moment(what, disk.image(), self.known.copy()))

        disk.changed = note
        self._note = note
        self.replica = Replica(own, "a")
        self.replica.begin_term(1)

    def told(self, what: str) -> None:
        self._note(f"told of {what}")

    # -- what clients do -----------------------------------------------------------------------------------------------

    def put(self, index: int, value: bytes, *, flush: bool) -> None:
        self.replica.put(index, value)
        if flush:
            self.replica.flush(self.replica.part(index))
            self.end_if_dead()
            self.known.flushed.add(value)
            self.told("a flush")

    def work(self, *xids: Xid) -> None:
        for xid in xids:
            codes = self.replica.do(xid, *WORK, sends=SENT[xid])
            self.end_if_dead()
            self._is_ok(codes, 3)

    def together(self, *asked: tuple[Xid, Verb], whole: bool = False) -> None:
        """One fsync for all of them. `whole`: each request also has the work, from the branch's beginning on."""
        work = WORK if whole else ()
        opaques = [
            (xid, verb, self.replica.ask(xid, *work, verb, sends=SENT[xid] if whole else None)) for xid, verb in asked
        ]
        for xid, verb, opaque in opaques:
            self._answered(xid, verb, opaque)  # a fault that was planted may answer before the fsync
        self.replica.flush(self.replica.journal)
        for xid, verb, opaque in opaques:
            self._answered(xid, verb, opaque)
        self.end_if_dead()
        for _xid, _verb, opaque in opaques:
            self._is_ok(self.replica.connection.codes(opaque), len(work) + 1)

    def _is_ok(self, codes: list[XACode] | None, count: int) -> None:
        if self.may_refuse and codes != [XACode.OK] * count:
            raise Ended
        assert codes == [XACode.OK] * count, codes

    def end_if_dead(self) -> None:
        if self.replica.dead:
            raise Ended

    def _answered(self, xid: Xid, verb: Verb, opaque: int) -> None:
        codes = self.replica.connection.codes(opaque)
        if codes is None or (self.may_refuse and (not codes or codes[-1] is not XACode.OK)):
            return
        before = self.known.copy()
        if verb is Verb.PREPARE:
            self.known.promised.add(xid)
        elif verb in (Verb.COMMIT, Verb.COMMIT_ONE_PHASE):
            self.known.committed.add(xid)
        elif verb is Verb.HEURISTIC_COMMIT:
            self.known.heuristic.add(xid)
        if before != self.known:
            self.told(f"{verb.name} of {xid.gtrid.decode()}")

    def decide(self, xid: Xid, verb: Verb) -> None:
        self.known.decided[xid] = verb
        self.told(f"the decision to {verb.name} {xid.gtrid.decode()}")


def unfold(history: History) -> None:
    """Everything that a journal has to say, with neighbours that are not flushed, and upkeep in between: of what is
    open (F), prepared and decided."""
    replica = history.replica
    history.put(0, b"n0", flush=True)
    history.put(0, b"n1", flush=False)
    history.work(A, B, E)
    history.together((A, Verb.PREPARE), (B, Verb.PREPARE))
    history.together((E, Verb.PREPARE))
    history.work(F)
    history.decide(A, Verb.COMMIT)
    history.together((A, Verb.COMMIT))
    history.put(1, b"n2", flush=False)
    history.together((E, Verb.HEURISTIC_COMMIT))
    replica.mark()
    history.work(C, D)
    history.together((C, Verb.COMMIT_ONE_PHASE), (D, Verb.COMMIT_ONE_PHASE))
    history.together((H, Verb.COMMIT_ONE_PHASE), (G, Verb.PREPARE), whole=True)
    replica.shorten()
    replica.retain()
    history.put(1, b"n3", flush=False)
    history.decide(B, Verb.ROLLBACK)
    replica.do(B, Verb.ROLLBACK)
    history.decide(G, Verb.COMMIT)
    history.together((G, Verb.COMMIT))
    history.together((F, Verb.COMMIT_ONE_PHASE))
    history.together((K, Verb.COMMIT_ONE_PHASE), whole=True)
    replica.shorten()
    replica.retain()


def check(own: DiskOs, disk: Disk, known: Known, epoch: int) -> None:
    """What a start from this disk has to find, and what then can be finished. Raises Violation."""
    own.disks["a"] = disk
    replica = recovered(own, epoch)
    finish(replica, known)
    judge(replica, known)
    replica.shorten()
    replica.retain()
    again = recovered(own, epoch + 1)  # the process was killed
    finish(again, known)
    judge(again, known)


def recovered(own: DiskOs, epoch: int, machine: str = "a") -> Replica:
    """A replica that begins a term. Raises Violation."""
    replica = Replica(own, machine)
    if replica.logs.broken:
        raise Violation(f"recovery fails: {replica.logs.broken}")
    try:
        replica.begin_term(epoch)
    except MetamqError as error:
        raise Violation(f"recovery fails: {error}") from error
    if replica.transactions._term is None:
        raise Violation("recovery fails: there are no transactions")
    return replica


def finish(replica: Replica, known: Known) -> None:
    """What a transaction manager does after a crash: it repeats what it has decided, and decides against the rest."""
    there = replica.states()
    counts = Counter(value for index in range(PARTS) for value in replica.stored(index))
    for xid in known.promised - known.committed - known.heuristic - set(known.decided):
        if there.get(xid) not in ("prepared", "heuristically completed"):
            raise Violation(f"a prepared branch is forgotten: {xid}")
        if there[xid] == "prepared" and any(counts[value] for _index, value in SENT[xid]):
            raise Violation(f"visible while in doubt: {xid}")
    for xid in SENT:
        decision = known.decided.get(xid, Verb.ROLLBACK)
        if decision is Verb.COMMIT or xid in known.committed:
            if replica.do(xid, Verb.COMMIT) != [XACode.OK]:
                raise Violation(f"a commit cannot be repeated: {xid}")
            known.committed.add(xid)
        elif xid in known.heuristic or there.get(xid) == "heuristically completed":
            if replica.do(xid, Verb.COMMIT) != [XACode.HEURCOM]:
                raise Violation(f"what an operator decided is forgotten: {xid}")
            known.heuristic.add(xid)
        else:
            if xid in known.promised:
                known.decided[xid] = Verb.ROLLBACK
            if replica.do(xid, Verb.ROLLBACK) == [XACode.OK]:
                known.decided[xid] = Verb.ROLLBACK


def judge(replica: Replica, known: Known) -> None:
    """Raises Violation."""
    parts = [replica.stored(index) for index in range(PARTS)]
    counts = Counter(value for part in parts for value in part)
    for xid, sent in SENT.items():
        times = {counts[value] for _index, value in sent}
        if max(times) > 1:
            raise Violation(f"twice: {parts}")
        if len(times) > 1:
            raise Violation(f"a torn transaction: {parts}")
        if times == {0} and xid in known.committed | known.heuristic:
            raise Violation(f"what was committed is lost: {parts}")
        if times == {1} and xid in known.decided and known.decided[xid] is Verb.ROLLBACK:
            raise Violation(f"what was rolled back is seen: {parts}")
        for index in range(PARTS):
            mine = [value for where, value in sent if where == index]
            if times == {1} and not _in_a_row(parts[index], mine):
                raise Violation(f"out of order: {parts}")
    for value in known.flushed:
        if counts[value] != 1:
            raise Violation(f"what was flushed is there {counts[value]} times: {value!r}")


def _in_a_row(part: list[bytes], mine: list[bytes]) -> bool:
    if not mine:
        return True
    at = part.index(mine[0])
    return part[at : at + len(mine)] == mine


def states(moments: list[Moment], chance: random.Random, most: int) -> Iterator[tuple[str, Disk, Known]]:
    """What power cuts leave, each state once."""
    seen: set[int] = set()
    for what, image, known in moments:
        for disk in power_cuts(image, chance, most):
            content = tuple(sorted((path, bytes(disk.data[inode])) for path, inode in disk.names.items()))
            key = hash((content, repr(known)))
            if key not in seen:
                seen.add(key)
                yield what, disk, known


def copy_of(disk: Disk) -> Disk:
    """The same, with nothing asked of it yet."""
    return Disk(disk.names, {inode: bytes(content) for inode, content in disk.data.items()})


def enumerate_crashes(
    own: DiskOs, chance: random.Random, *, most: int, inside: int, states_max: int = 1_000_000
) -> int:
    """The moments of the history in any order, at most so many ways in which a power cut may leave the disk of each,
    and once more inside of the recovery from `inside` of a hundred of them. Returns how many states that were, and
    ends when they are enough. Raises Violation."""
    history = History(own)
    unfold(history)
    moments = history.moments
    own.disks["a"].changed = lambda what: None
    number = 0
    for what, disk, known in states(chance.sample(moments, len(moments)), chance, most):
        number += 1
        if number > states_max:
            break
        try:
            check(own, copy_of(disk), known.copy(), 2)
            if chance.random() * 100 < inside:
                number += _inside(own, disk, known, chance)
        except Violation as violation:
            raise Violation(f"{violation}; after: {what} (state {number})") from None
    return number


def _inside(own: DiskOs, disk: Disk, known: Known, chance: random.Random) -> int:
    """Power cuts while a recovery from this disk is at work, and while what was in doubt is finished after it."""
    moments: list[Moment] = []
    begun = copy_of(disk)
    then = known.copy()
    begun.changed = lambda what: moments.append(Moment(f"recovery: {what}", begun.image(), then.copy()))
    own.disks["a"] = begun
    replica = recovered(own, 2)
    finish(replica, then)
    begun.changed = lambda what: None
    count = 0
    for what, left, at_that_time in states(chance.sample(moments, min(len(moments), 8)), chance, 8):
        count += 1
        try:
            check(own, left, at_that_time.copy(), 3)
        except Violation as violation:
            raise Violation(f"{violation}; {what}") from None
    return count
