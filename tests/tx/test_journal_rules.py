"""Rules of a broker's journal, one by one: what waits, what is cut, what damage holds up, and what it does not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from metamq.broker.data.partition import Done, Partition
from metamq.broker.process.housekeeping import Housekeeping
from metamq.broker.transactions import processor
from metamq.broker.transactions.journal import Follower, JournalStore, read_journal
from metamq.broker.transactions.processor import BODY_BYTES_MAX, WAITING_MAX
from metamq.broker.transactions.term import Figures
from metamq.errors import (
    CorruptData,
    Fenced,
    MessageTooLarge,
    MetamqError,
    NotEnoughReplicas,
    OutcomeUnknown,
    StorageError,
    TooManyOpenFiles,
    TopicNotFound,
    TryLater,
)
from metamq.tx.store.fold import Retained
from metamq.tx.store.memory import REMEMBERED_US, OutcomeMemory
from metamq.tx.store.records import Add, Remembered
from metamq.wire import status
from metamq.wire.commands import TxReply
from metamq.wire.xa import Verb, XACode, Xid
from tests.parts import SLOW_S
from tests.tx.sim_broker import (
    JOURNAL_LOG,
    LOOP,
    PRINCIPAL,
    TOPIC,
    TOPIC_ID,
    TOPIC_LOG,
    Connection,
    Replica,
    let_tasks_go_on,
    new_replica,
)
from tests.tx.sim_disk import DiskOs, modelled_disk

A, B = Xid(1, b"A"), Xid(1, b"B")
WORK = (Verb.START, Verb.SEND, Verb.END)
OK = XACode.OK
DAMAGE = CorruptData("t/0", "a test says so")


@pytest.fixture
def own() -> Iterator[DiskOs]:
    with modelled_disk() as disk:
        yield disk


@pytest.fixture
def replica(own: DiskOs) -> Replica:
    made = new_replica(own, "a")
    made.begin_term(1)
    return made


def prepared(replica: Replica, xid: Xid, *sends: tuple[int, bytes]) -> None:
    assert replica.do(xid, *WORK, Verb.PREPARE, sends=list(sends)) == [OK] * 4


def committed(replica: Replica, xid: Xid, *sends: tuple[int, bytes]) -> None:
    assert replica.do(xid, *WORK, Verb.COMMIT_ONE_PHASE, sends=list(sends)) == [OK] * 4


def killed(replica: Replica, epoch: int = 2) -> Replica:
    """As it comes up again; nothing of its disk is lost."""
    again = Replica(replica.own, replica.machine)
    again.begin_term(epoch)
    return again


def error_of(replica: Replica, opaque: int) -> Exception:
    answer = replica.connection.answers[opaque]
    if not isinstance(answer, TxReply):
        return answer
    result = answer.results[-1]
    return status.decode_error(result.status, result.error)


def retained(partition: Partition) -> Retained:
    return LOOP.run_until_complete(Follower().catch_up(partition))


def test_what_is_not_durable_is_not_brought_into_its_partitions(replica: Replica) -> None:
    """The fsync failed, or the term ended: whether it is committed, the journal tells whoever comes next."""
    prepared(replica, A, (0, b"a0"), (1, b"a1"))
    opaque = replica.ask(A, Verb.COMMIT)
    replica.journal.fail_waiting(StorageError("the fsync failed", outcome="unknown"))
    assert isinstance(error_of(replica, opaque), OutcomeUnknown)
    assert replica.stored(0) == replica.stored(1) == []
    again = killed(replica)
    assert again.do(A, Verb.COMMIT) == [OK]
    assert (again.stored(0), again.stored(1)) == ([b"a0"], [b"a1"])


def test_more_than_a_batch_may_have_is_sent_at_once(own: DiskOs) -> None:
    """A journal's entry is a batch."""
    replica = new_replica(own, "a", journal_log=replace(JOURNAL_LOG, segment_bytes=1 << 30))
    replica.begin_term(1)
    values = [bytes([number]) * (6 << 20) for number in range(4)]
    committed(replica, A, *((0, value) for value in values))
    assert replica.stored(0) == values
    opaque = replica.ask(B, *WORK, sends=[(0, bytes(BODY_BYTES_MAX))])
    assert isinstance(error_of(replica, opaque), MessageTooLarge)
    assert B not in replica.states()


def test_a_branch_of_which_something_could_not_be_stored_cannot_be_committed(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert replica.do(A, Verb.START, Verb.SEND, sends=[(0, b"a0")]) == [OK] * 2
    with monkeypatch.context() as patch:
        patch.setattr(replica, "append", lambda *_: (_ for _ in ()).throw(DAMAGE))
        replica.do(A, Verb.SEND, sends=[(0, b"a1")])
    assert replica.do(A, Verb.END) == [XACode.RBOTHER]
    assert replica.do(A, Verb.PREPARE) == [XACode.RBOTHER]
    assert replica.stored(0) == []


@pytest.mark.parametrize("promise", [Verb.PREPARE, Verb.COMMIT_ONE_PHASE, Verb.DECIDE])
def test_what_is_sent_and_promised_in_one_request_is_one_entry(replica: Replica, promise: Verb) -> None:
    """So it takes one write and one fsync."""
    opaque = replica.ask(A, *WORK, promise, sends=[(0, b"a0"), (1, b"a1")])
    (entry,) = read_journal(replica.journal)
    add, promised = entry.records
    assert isinstance(add, Add)
    assert promised.branch == add.branch  # type: ignore[union-attr]
    assert replica.connection.codes(opaque) is None
    replica.flush(replica.journal)
    assert replica.connection.codes(opaque) == [OK] * 4
    known = replica.term.store.journal
    again = killed(replica)
    assert {xid: branch.bodies for xid, branch in again.term.store.branches.items()} == {
        xid: branch.bodies for xid, branch in known.branches.items()
    }
    assert again.term.store.journal.unmarked == known.unmarked
    assert again.stored(0) == ([] if promise is Verb.PREPARE else [b"a0"])


def test_what_was_sent_is_kept_where_the_promise_in_the_same_request_is_refused(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(replica, "admit", lambda *_: (_ for _ in ()).throw(NotEnoughReplicas("the journal", 1, 2)))
        opaque = replica.ask(A, *WORK, Verb.COMMIT_ONE_PHASE, sends=[(0, b"a0")])
    assert isinstance(error_of(replica, opaque), TryLater)
    assert replica.states() == {A: "idle"}
    committed(replica, B, (0, b"b0"))
    assert replica.do(A, Verb.COMMIT_ONE_PHASE) == [OK]
    assert replica.stored(0) == [b"b0", b"a0"]


@pytest.mark.parametrize("verbs", [(Verb.COMMIT_ONE_PHASE,), ()])
def test_a_request_that_ends_by_a_fault_of_ours_harms_no_other(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, verbs: tuple[Verb, ...]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(replica, "admit", lambda *_: 1 / 0)
        opaque = replica.ask(A, *WORK, Verb.COMMIT_ONE_PHASE, sends=[(0, b"a0")])
    assert isinstance(error_of(replica, opaque), OutcomeUnknown)
    assert replica.do(A, Verb.COMMIT_ONE_PHASE) == [XACode.RBOTHER], "the branch's next request is answered"
    assert not replica.term.queues
    assert replica.do(B, *WORK, *verbs, sends=[(0, b"b0")]) == [OK] * (3 + len(verbs))
    if not verbs:
        assert replica.do(B, Verb.COMMIT_ONE_PHASE) == [OK]
    assert replica.stored(0) == killed(replica).stored(0) == [b"b0"]


def test_what_could_not_be_stored_with_its_promise_cannot_be_committed(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(replica, "append", lambda *_: (_ for _ in ()).throw(DAMAGE))
        opaque = replica.ask(A, *WORK, Verb.COMMIT_ONE_PHASE, sends=[(0, b"a0")])
    assert isinstance(error_of(replica, opaque), CorruptData)
    committed(replica, B, (0, b"b0"))
    assert replica.do(A, Verb.COMMIT_ONE_PHASE) == [XACode.RBOTHER]
    assert replica.stored(0) == killed(replica).stored(0) == [b"b0"]


def test_a_decision_waits_for_a_damaged_partition(replica: Replica) -> None:
    prepared(replica, A, (0, b"a0"), (1, b"a1"))
    replica.logs.is_damaged(replica.part(0), DAMAGE)
    opaque = replica.ask(A, Verb.COMMIT)
    assert isinstance(error_of(replica, opaque), TryLater)
    assert replica.states() == {A: "prepared"}
    assert replica.stored(1) == []
    assert replica.do(A, Verb.ROLLBACK) == [OK]


@pytest.mark.parametrize("reason", [DAMAGE, TopicNotFound(TOPIC)], ids=["damaged", "configuration not readable"])
def test_a_partition_that_is_not_served_holds_up_no_other_and_gets_its_messages_later(
    own: DiskOs, reason: CorruptData | TopicNotFound
) -> None:
    replica = new_replica(own, "a")
    replica.begin_term(1)
    committed(replica, A, (0, b"a0"), (1, b"a1"))
    before = own.disks["a"].image()  # the journal is flushed, the partitions are not
    own.disks["a"] = type(own.disks["a"])(before.names, before.data)
    replica = Replica(own, "a")
    key = TOPIC, TOPIC_ID, 0
    partition = replica.logs.open.pop(key)
    if isinstance(reason, CorruptData):
        replica.logs.broken[key] = reason
    replica.begin_term(2)
    assert replica.stored(1) == [b"a1"]
    committed(replica, B, (1, b"b1"))
    replica.mark()
    mark = replica.term.store.journal.mark
    assert (mark.left_out, [end[:3] for end in mark.ends]) == ((key,), [(TOPIC, TOPIC_ID, 1)])
    replica.logs.broken.clear()
    replica.logs.open[key] = partition
    partition.unbound()
    list(replica.term.commits.retry(replica.term.store.journal))
    assert (replica.stored(0), replica.stored(1)) == ([b"a0"], [b"a1", b"b1"])
    replica.mark()
    assert not replica.term.store.journal.unmarked


def test_a_mark_waits_until_every_in_sync_replica_has_what_it_covers(replica: Replica) -> None:
    """Whoever of them is promoted will not look for it."""
    partition = replica.part(0)
    partition.bound(0, 0)  # a slave has nothing of it yet
    committed(replica, A, (0, b"a0"))

    async def run() -> None:
        marking = asyncio.ensure_future(replica._with_flushes(replica.transactions.upkeep.mark(replica.term)))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not marking.done()
        assert replica.term.store.journal.unmarked
        partition.bound(partition.log.end_offset, partition.log.end_position)
        await marking

    LOOP.run_until_complete(run())
    assert not replica.term.store.journal.unmarked


def test_retention_leaves_alone_what_no_mark_covers(own: DiskOs) -> None:
    topic_log = replace(TOPIC_LOG, segment_bytes=100, retention_bytes=1)
    replica = new_replica(own, "a", topic_log=topic_log)
    replica.begin_term(1)
    committed(replica, A, *((0, b"a%d" % number) for number in range(8)))
    replica.retain()
    assert replica.part(0).log.start_offset == 0
    again = Replica(own, "a", topic_log=topic_log)
    again.begin_term(2)
    assert again.part(0).log.end_offset == 8
    again.mark()
    again.retain()
    assert again.part(0).log.start_offset == 7
    assert killed(again, 3).part(0).log.end_offset == 8


def test_a_commit_in_the_middle_of_a_round_of_retention_is_left_alone(own: DiskOs) -> None:
    replica = new_replica(own, "a", topic_log=replace(TOPIC_LOG, segment_bytes=100, retention_bytes=1))
    replica.begin_term(1)
    folder = SimpleNamespace(generation=1, free_bytes=lambda: 1 << 50)
    status = SimpleNamespace(disk_full=None)
    config = SimpleNamespace(id=0, disk_reserve_bytes=0)
    flusher = replica.transactions.upkeep._flusher
    parts: list[Any] = [replica.logs, folder, status, replica.transactions, flusher, config, replica.failures.append]
    housekeeping = Housekeeping(*parts)
    look_after, seen = housekeeping._look_after, []

    async def slowly(partition: Partition) -> None:
        if not seen:
            committed(replica, A, *((1, b"a%d" % number) for number in range(8)))
        seen.append(partition)
        await look_after(partition)

    housekeeping._look_after = slowly  # type: ignore[method-assign]
    LOOP.run_until_complete(housekeeping._round(housekeeping._look_after))
    assert seen == replica.logs.partitions()
    assert replica.part(1).log.start_offset == 0
    replica.mark()
    LOOP.run_until_complete(housekeeping._round(housekeeping._look_after))
    assert replica.part(1).log.start_offset == 7
    housekeeping.close()


def test_what_was_given_up_does_not_keep_the_journal_from_being_cut(replica: Replica) -> None:
    """Nothing is written about the end of a branch that was not prepared; a slave learns of it all the same."""
    for number in range(20):
        replica.do(Xid(2, b"%d" % number), *WORK, Verb.ROLLBACK, sends=[(0, b"x" * 100)])
    replica.shorten()
    needed_lsn = replica.term.store.journal.mark.needed_lsn
    assert needed_lsn == retained(replica.journal).mark.needed_lsn > 20
    replica.retain()
    assert 0 < replica.journal.log.start_offset <= needed_lsn


@pytest.mark.slow
def test_scenario_22_a_branch_that_is_prepared_for_a_thousand_marks(replica: Replica) -> None:
    prepared(replica, A, (0, b"a0"), (1, b"a1" * 50))
    sizes = []
    for number in range(1000):
        committed(replica, Xid(2, b"%d" % number), (0, b"x"))
        replica.mark()
        if number % 10 == 9:
            replica.shorten()
            replica.retain()
            sizes.append(replica.journal.log.size_bytes)
    assert replica.journal.log.start_offset > 1000
    remembered = 25 * 1000
    assert max(sizes) < 4 * (remembered + 2000), "it does not grow with what is finished"
    again = killed(replica)
    assert again.states() == {A: "prepared"}
    assert again.do(A, Verb.COMMIT) == [OK]
    assert again.stored(1) == [b"a1" * 50]
    assert again.do(Xid(2, b"7"), Verb.COMMIT) == [OK], "what was committed is remembered"


def test_a_damaged_journal_ends_transactions_and_nothing_else(own: DiskOs) -> None:
    replica = new_replica(own, "a")
    replica.begin_term(1)
    committed(replica, A, (0, b"a0"))
    disk = own.disks["a"]
    (path,) = [path for path in disk.names if path.endswith(".log") and "transactions" in path]
    disk.data[disk.names[path]][60] ^= 1
    again = Replica(own, "a", topic_log=replace(TOPIC_LOG, segment_bytes=100, retention_bytes=1))
    again.begin_term(2)
    assert isinstance(error_of(again, again.ask(B, Verb.START)), CorruptData)
    for number in range(5):
        again.put(0, b"n%d" % number)
    again.retain()
    assert again.part(0).log.start_offset > 0, "it does not fill the disk"


def test_damage_that_is_found_while_the_journal_is_in_use(replica: Replica) -> None:
    committed(replica, A, (0, b"a0"))
    assert LOOP.run_until_complete(replica.transactions.kept(replica.part(0), 1)) == (0, None)
    replica.logs.is_damaged(replica.journal, DAMAGE)
    assert LOOP.run_until_complete(replica.transactions.kept(replica.part(0), 1)) == (None, None)
    assert replica.do(B, Verb.START) == [OK]
    replica.do(B, Verb.SEND, sends=[(0, b"b0")])
    assert replica.stored(0) == [b"a0"]


def not_settled(replica: Replica, monkeypatch: pytest.MonkeyPatch, *errors: MetamqError) -> asyncio.Event:
    """The next wait for the in-sync replicas lasts until the event is set, and meets these errors one after another."""
    settled, later = asyncio.Event(), list(errors)
    wait = replica.transactions.upkeep.found_is_durable

    async def found_is_durable(journal: JournalStore) -> None:
        await settled.wait()
        if later:
            raise later.pop(0)
        await wait(journal)

    monkeypatch.setattr(replica.transactions.upkeep, "found_is_durable", found_is_durable)
    monkeypatch.setattr(processor, "SETTLE_RETRY_S", 0)
    return settled


def test_a_shortage_after_a_promotion_delays_transactions_and_is_logged_once(
    own: DiskOs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replica = new_replica(own, "a")
    shortage = TooManyOpenFiles("the journal", 64)
    settled = not_settled(replica, monkeypatch, shortage, shortage)
    with caplog.at_level("INFO", "metamq.broker"):
        replica.begin_term(1)
        opaque = replica.ask(A, Verb.START)
        assert replica.connection.codes(opaque) is None
        settled.set()
        LOOP.run_until_complete(asyncio.wait_for(asyncio.gather(*replica.transactions._settling), SLOW_S))
    assert replica.connection.codes(opaque) == [OK]
    assert [record.message.count("transactions wait") for record in caplog.records].count(1) == 1


def test_damage_after_a_promotion_is_answered(own: DiskOs, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = new_replica(own, "a")
    settled = not_settled(replica, monkeypatch, DAMAGE)
    replica.begin_term(1)
    waiting = [replica.ask(A, Verb.START), replica.ask(A, Verb.COMMIT)]
    settled.set()
    LOOP.run_until_complete(asyncio.wait_for(asyncio.gather(*replica.transactions._settling), SLOW_S))
    for opaque in [*waiting, replica.ask(B, Verb.START)]:
        error = error_of(replica, opaque)
        assert isinstance(error, CorruptData)
        assert error.outcome == DAMAGE.outcome, "nothing was begun"
    assert replica.journal.closed_by is DAMAGE


def test_a_request_of_a_lost_session_is_not_begun_after_the_wait(own: DiskOs, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = new_replica(own, "a")
    settled = not_settled(replica, monkeypatch)
    replica.begin_term(1)
    connection, replica.connection = replica.connection, Connection()
    lost = [replica.ask(xid, Verb.START, session="lost") for xid in (A, B)]
    gone, replica.connection = replica.connection, connection
    other = replica.ask(B, Verb.START, session="other")
    replica.transactions._session_lost(replica.term, (PRINCIPAL, "lost"), gone)
    assert gone.answers.keys() == set(lost), "an answer gives the memory of the request back"
    settled.set()
    LOOP.run_until_complete(asyncio.wait_for(asyncio.gather(*replica.transactions._settling), SLOW_S))
    assert replica.connection.codes(other) == [OK]
    assert replica.states() == {B: "active"}


def test_an_epoch_that_ends_after_the_wait_was_refused_answers_once(
    own: DiskOs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replica = new_replica(own, "a")
    settled = not_settled(replica, monkeypatch)
    replica.begin_term(1)
    waiting = replica.ask(A, Verb.START)
    stops = Fenced("broker 0", "it is stopping")
    replica.transactions.give_up_wait(stops)
    assert replica.connection.answers.pop(waiting) is stops
    assert error_of(replica, replica.ask(B, Verb.START)) is stops
    settled.set()
    LOOP.run_until_complete(asyncio.wait_for(asyncio.gather(*replica.transactions._settling), SLOW_S))
    replica.end_term()
    assert waiting not in replica.connection.answers
    assert not [record for record in caplog.records if "transactions are not available" in record.message]


def test_a_fault_of_ours_in_the_wait_ends_the_broker(own: DiskOs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its requests wait, and its partitions take no messages, without end."""
    replica = new_replica(own, "a")
    settled = not_settled(replica, monkeypatch)
    replica.begin_term(1)
    monkeypatch.setattr(replica.term.commits, "redo", lambda *args: iter([1 / 0 for _ in args]))
    settled.set()
    LOOP.run_until_complete(asyncio.wait(replica.transactions._settling, timeout=SLOW_S))
    let_tasks_go_on()
    (failure,) = replica.failures
    assert "ZeroDivisionError" in str(failure)


def test_the_journal_is_found_without_min_insync(own: DiskOs, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = new_replica(own, "a")

    def too_few(partition: Partition, end_offset: int, done: Done) -> None:
        done(NotEnoughReplicas("the journal", 1, 2))

    monkeypatch.setattr(replica, "when_durable", too_few)
    replica.begin_term(1)
    assert replica.do(A, *WORK, sends=[(0, b"a0")]) == [OK] * 3


def test_too_few_replicas_change_nothing(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    assert replica.do(A, *WORK, sends=[(0, b"a0")]) == [OK] * 3
    prepared(replica, B, (0, b"b0"))

    def too_few(partition: Partition, promised_bytes: int) -> None:
        raise NotEnoughReplicas("the journal", 1, 2)

    with monkeypatch.context() as patch:
        patch.setattr(replica, "admit", too_few)
        for xid, verb in ((A, Verb.PREPARE), (A, Verb.COMMIT_ONE_PHASE), (B, Verb.COMMIT)):
            assert isinstance(error_of(replica, replica.ask(xid, verb)), TryLater)
        assert replica.states() == {A: "idle", B: "prepared"}
    assert replica.do(A, Verb.COMMIT_ONE_PHASE) == [OK]
    assert replica.do(B, Verb.COMMIT) == [OK]
    assert replica.stored(0) == [b"a0", b"b0"]


def test_a_journal_that_was_cut_at_its_end_is_read_anew(replica: Replica) -> None:
    """At a slave: what was read may have been taken back."""
    follower = Follower()
    committed(replica, A, (0, b"a0"))
    assert LOOP.run_until_complete(follower.catch_up(replica.journal)).unmarked == [0]
    replica.journal.cut(0)
    assert LOOP.run_until_complete(follower.catch_up(replica.journal)).unmarked == []


def test_how_many_branches_there_are_and_what_room_is_promised(replica: Replica) -> None:
    assert replica.do(A, *WORK, sends=[(0, b"a0")]) == [OK] * 3
    prepared(replica, B, (0, b"b0" * 500))
    replica.transactions.tick(0)
    figures = replica.transactions.figures
    assert (figures.open, figures.prepared, figures.heuristic) == (1, 1, 0)
    assert 1000 < figures.promised_bytes < 1200
    assert abs(time.time() * 1e6 - figures.oldest_prepared_us) < 60e6
    assert replica.do(B, Verb.HEURISTIC_COMMIT) == [OK]
    replica.transactions.tick(5)
    assert (replica.transactions.figures.prepared, replica.transactions.figures.heuristic) == (0, 1)
    assert replica.transactions.figures.promised_bytes == 0
    replica.ask(A, Verb.PREPARE)
    replica.transactions.tick(10)
    assert replica.transactions.figures.promised_bytes > 0, "also while its record is not durable yet"
    replica.end_term()
    replica.transactions.tick(0)
    assert replica.transactions.figures == Figures(), "a slave has none"


def test_a_commit_that_is_under_way_while_the_journal_is_shortened_is_remembered(replica: Replica) -> None:
    prepared(replica, A, (0, b"a0"))
    for number in range(20):
        committed(replica, Xid(2, b"%d" % number), (1, b"x"))
    opaque = replica.ask(A, Verb.COMMIT)
    replica.shorten()
    replica.mark()
    replica.retain()
    assert replica.connection.codes(opaque) == [OK]
    assert replica.journal.log.start_offset > 10
    assert killed(replica).do(A, Verb.COMMIT) == [OK]


def test_any_number_of_requests_of_one_branch_harms_no_other(replica: Replica) -> None:
    """They need no body, so nothing else holds back who sends them."""
    prepared(replica, A, (0, b"a0"))
    opaques = [replica.ask(A, Verb.COMMIT) for _ in range(1500)]
    replica.flush(replica.journal)
    codes = [replica.connection.codes(opaque) for opaque in opaques]
    assert codes == [[OK]] * WAITING_MAX + [[]] * (1500 - WAITING_MAX)
    assert isinstance(error_of(replica, opaques[-1]), TryLater)
    assert not replica.term.queues
    assert replica.do(A, Verb.COMMIT) == [OK], "there is room again"
    committed(replica, B, (0, b"b0"))
    assert replica.stored(0) == [b"a0", b"b0"]


@pytest.mark.parametrize("verb", [Verb.COMMIT, Verb.PREPARE])
def test_what_waits_behind_one_request_takes_no_room_on_the_stack(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, verb: Verb
) -> None:
    monkeypatch.setattr(processor, "WAITING_MAX", 2000)
    assert replica.do(A, *WORK, sends=[(0, b"a0")]) == [OK] * 3
    opaques = [replica.ask(A, Verb.PREPARE), *(replica.ask(A, verb) for _ in range(1999))]
    while replica.connection.codes(opaques[-1]) is None:
        replica.flush(replica.journal)
    assert all(replica.connection.codes(opaque) is not None for opaque in opaques)
    assert not replica.dead


def test_after_a_restart_the_oldest_outcomes_are_forgotten_first(own: DiskOs, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept of the journal begins with new COMMITs; older ones are only in what was written down once more."""
    monkeypatch.setattr(OutcomeMemory.__init__, "__defaults__", (20, REMEMBERED_US))
    config = replace(JOURNAL_LOG, segment_bytes=1500)
    replica = new_replica(own, "a", journal_log=config)
    replica.begin_term(1)
    xids = [Xid(1, b"%03d" % number) for number in range(33)]
    for xid in xids[:30]:
        committed(replica, xid, (0, bytes(20)))
    replica.shorten()
    replica.retain()
    first = next(read_journal(replica.journal)).records
    assert not isinstance(first[0], Remembered), "the case that is meant"
    again = Replica(own, "a", journal_log=config)
    again.begin_term(2)
    for xid in xids[30:]:
        committed(again, xid, (0, bytes(20)))
    remembered = [xid for xid in xids if again.do(xid, Verb.RESOLVE) == [OK]]
    assert remembered == xids[-20:]


def test_a_fault_of_ours_in_what_waits_behind_a_commit_harms_neither_it_nor_the_broker(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(replica, A, (0, b"a0"))
    first, *others = [replica.ask(A, verb) for verb in (Verb.COMMIT, Verb.RESOLVE, Verb.COMMIT)]
    with monkeypatch.context() as patch:
        ask = replica.term.store.ask
        patch.setattr(
            replica.term.store, "ask", lambda asked, *now: 1 / 0 if asked.verb is Verb.RESOLVE else ask(asked, *now)
        )
        replica.flush(replica.journal)
    assert replica.connection.codes(first) == replica.connection.codes(others[1]) == [OK]
    assert isinstance(error_of(replica, others[0]), OutcomeUnknown)
    assert not replica.dead
    assert replica.stored(0) == [b"a0"]


def test_what_was_answered_as_unknown_is_not_answered_again_when_the_term_ends(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client takes a second answer for a fault of the protocol."""
    answered: list[int] = []
    answer, answer_error = replica.connection.answer, replica.connection.answer_error
    monkeypatch.setattr(replica.connection, "answer", lambda r, h: (answered.append(r.opaque), answer(r, h)))
    refuse = lambda r, e: (answered.append(r.opaque), answer_error(r, e))  # noqa: E731
    monkeypatch.setattr(replica.connection, "answer_error", refuse)
    prepared(replica, A, (0, b"a0"))
    opaques = [replica.ask(A, Verb.COMMIT), replica.ask(A, Verb.RESOLVE)]
    replica.logs.is_damaged(replica.journal, DAMAGE)
    assert isinstance(error_of(replica, opaques[0]), OutcomeUnknown)
    answered.remove(opaques[0])
    replica.end_term()
    assert answered[-1:] == opaques[1:]
    assert opaques[0] not in answered
