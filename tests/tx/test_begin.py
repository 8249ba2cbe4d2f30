"""`begin` is START, SEND and END one after the other, or None where one of them is refused; over any history."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from metamq.tx.store.fold import Entry
from metamq.tx.store.records import Add, BodyPlace, Commit
from metamq.tx.store.verbs import JournalTransactionStore, TransactionLimits, VerbRequest, VerbStep
from metamq.wire.xa import Verb, Xid

TERM = 3
XIDS = [Xid(1, b"a"), Xid(1, b"b")]
PLACES = st.lists(
    st.builds(BodyPlace, st.just("t"), st.just("0" * 16), st.integers(0, 1), st.integers(1, 4)), max_size=3
)
ASKED = st.builds(
    VerbRequest,
    verb=st.just(Verb.START),
    xid=st.sampled_from(XIDS),
    epoch=st.sampled_from([0, 0, 0, TERM << 32 | 1, (TERM + 1) << 32]),
    session=st.sampled_from(["s", "t"]),
    timeout_s=st.sampled_from([0.0, 7.0]),
    first=st.sampled_from([0, 0, 0, 1]),
    places=PLACES.map(tuple),
    owner=st.just("o"),
)


def write(store: JournalTransactionStore, step: VerbStep, lsn: int) -> None:
    """What the processor does with a step that has a record."""
    if step.record is not None:
        record = step.record._replace(first_batch_id=lsn) if isinstance(step.record, Commit) else step.record
        sizes = [10] * len(record.places) if isinstance(record, Add) else []
        store.written(Entry(lsn, 100 * lsn, [record], sizes))


def one_by_one(store: JournalTransactionStore, asked: VerbRequest) -> list[VerbStep]:
    """Up to the first that is refused."""
    steps = []
    for verb in (Verb.START, Verb.SEND, Verb.END):
        step = store.ask(replace(asked, verb=verb), 10.0, 10)
        steps.append(step)
        if step.answer is None:
            break
        asked = replace(asked, epoch=step.answer.epoch)
        if verb is Verb.SEND:
            write(store, step, 1000)
    return steps


@given(
    history=st.lists(st.tuples(st.sampled_from(list(Verb)), ASKED), max_size=12),
    asked=ASKED,
    # Not st.builds: it makes up every other field, too, and a time-out that is no number equals nothing.
    limits=st.tuples(st.sampled_from([1, 9]), st.sampled_from([6, 100])).map(lambda some: TransactionLimits(*some)),
)
def test_the_same_comes_of_both(
    history: list[tuple[Verb, VerbRequest]], asked: VerbRequest, limits: TransactionLimits
) -> None:
    store = JournalTransactionStore(TERM, limits)
    for lsn, (verb, earlier) in enumerate(history):
        write(store, store.ask(replace(earlier, verb=verb), 1.0, 1), lsn)
    other, untouched = deepcopy(store), deepcopy(store)

    steps = one_by_one(store, asked)
    at_once = other.begin(asked, 10.0)

    if at_once is None:
        refused = steps[-1].answer is None
        assert refused or asked.epoch or not asked.places
        assert other.branches == untouched.branches
        return
    assert [step.answer for step in steps] == [at_once.answer] * 3
    assert at_once.record == steps[1].record
    write(other, at_once, 1000)
    assert other.branches == store.branches
    again = [each.ask(replace(asked, verb=Verb.START, xid=Xid(1, b"z")), 10.0, 10) for each in (store, other)]
    assert again[0].answer == again[1].answer
