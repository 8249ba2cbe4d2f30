"""The acceptance scenarios of XA that concern what a broker has on its disk, by their numbers and names.

Scenario 22 is in test_journal_rules.py, 23 in test_disk_faults.py, 25 in test_promotions.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from metamq.wire.xa import Verb, XACode, Xid
from tests.tx.sim_broker import Replica, new_replica
from tests.tx.sim_disk import Disk, DiskOs, Image, modelled_disk, power_cuts

A, B = Xid(1, b"A"), Xid(1, b"B")
WORK = (Verb.START, Verb.SEND, Verb.END)
OK = XACode.OK
PARTS = 4
OF_A = [(index, b"a%d" % index) for index in range(PARTS)]


@pytest.fixture
def own() -> Iterator[DiskOs]:
    with modelled_disk() as disk:
        yield disk


def recovered(own: DiskOs, disk: Disk, epoch: int = 2, parts: int = PARTS) -> Replica:
    own.disks["a"] = disk
    replica = Replica(own, "a", parts=parts)
    assert replica.logs.broken == {}
    replica.begin_term(epoch)
    return replica


def test_scenario_4_prepare_is_answered_only_after_its_record_was_fsynced(own: DiskOs) -> None:
    replica = new_replica(own, "a")
    replica.begin_term(1)
    assert replica.do(A, *WORK, sends=[(0, b"a0")]) == [OK] * 3
    opaque = replica.ask(A, Verb.PREPARE)
    own.disks["a"].changed = lambda what: answers.append((what, replica.connection.codes(opaque)))
    answers: list[tuple[str, list[XACode] | None]] = []
    replica.flush(replica.journal)
    assert replica.connection.codes(opaque) == [OK]
    first = next(number for number, (what, _) in enumerate(answers) if what.startswith("fsync"))
    assert all(codes is None for _, codes in answers[: first + 1])
    assert recovered(own, Disk(*own.disks["a"].image()[:2]), parts=2).states() == {A: "prepared"}, "if all else is lost"


@pytest.mark.slow
@pytest.mark.parametrize("two_phases", [True, False])
def test_scenario_20_a_crash_at_every_write_and_fsync_of_a_commit_over_four_partitions(
    own: DiskOs, two_phases: bool
) -> None:
    """All four or none, each once, after recovery and what the transaction manager repeats."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    replica = new_replica(own, "a", parts=PARTS)
    replica.begin_term(1)
    assert replica.do(A, *WORK, sends=OF_A) == [OK] * 3
    if two_phases:
        assert replica.do(A, Verb.PREPARE) == [OK]
    disk, images = own.disks["a"], list[tuple[Image, bool]]()
    opaque = replica.ask(A, Verb.COMMIT if two_phases else Verb.COMMIT_ONE_PHASE)

    def note(_what: str = "") -> None:
        images.append((disk.image(), replica.connection.codes(opaque) is not None))

    note()
    disk.changed = note
    replica.flush(replica.journal)
    note()
    for index in range(PARTS):
        replica.flush(replica.part(index))
    replica.mark()
    seen = set()
    for image, is_answered in images:
        for left in power_cuts(image, chance, 20):
            again = recovered(own, left)
            if two_phases:
                assert again.do(A, Verb.COMMIT) == [OK]
            found = [again.stored(index) for index in range(PARTS)]
            whole = [[value] for _index, value in OF_A]
            assert found == whole or (found == [[]] * PARTS and not two_phases and not is_answered), seed
            seen.add(bool(found[0]))
    assert seen == ({True} if two_phases else {True, False})


def steps_of(replica: Replica) -> list[Callable[[], object]]:
    """Two transactions that overlap, one of which is begun first and ended last."""
    return [
        lambda: replica.do(A, *WORK, sends=[(0, b"a0")]),
        lambda: replica.do(B, *WORK, sends=[(1, b"b0")]),
        lambda: replica.do(A, Verb.JOIN, Verb.SEND, Verb.END, sends=[(1, b"a1")]),
        lambda: replica.do(B, Verb.PREPARE),
        lambda: replica.do(B, Verb.COMMIT),
        lambda: replica.do(A, Verb.PREPARE),
    ]


@pytest.mark.parametrize("at", range(7))
@pytest.mark.parametrize("again_at", range(7))
def test_scenario_21_overlapping_transactions_and_a_checkpoint_between_any_two_of_their_records(
    own: DiskOs, at: int, again_at: int
) -> None:
    replica = new_replica(own, "a")
    replica.begin_term(1)
    for number, step in enumerate([*steps_of(replica), list]):
        if number in (at, again_at):
            replica.shorten()
            replica.retain()
        step()
    for left in power_cuts(own.disks["a"].image(), random.Random(at * 7 + again_at), 12):
        again = recovered(own, left, parts=2)
        assert again.states() == {A: "prepared"}
        assert (again.stored(0), again.stored(1)) == ([], [b"b0"])
        assert again.do(B, Verb.COMMIT) == [OK]
        assert again.do(A, Verb.COMMIT) == [OK]
        assert (again.stored(0), again.stored(1)) == ([b"a0"], [b"b0", b"a1"])
