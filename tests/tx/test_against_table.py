"""A real broker against a model of XA's state table: any verbs, by three sessions, in any order.

Answers get lost, requests come twice, or late, behind a restart and for another use of the id; operators decide. After
each request the code is that of the model, and in the end the messages of what was committed are there once each.

The model is written from the specification, not from the broker's table.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from metamq.client.net.branches import Branch
from metamq.testing import Cluster
from metamq.tx import XAResource
from metamq.tx.store.table import BranchPhase
from metamq.wire.columns import encode
from metamq.wire.commands import PutEntry, Tx, TxReply, TxResult
from metamq.wire.frames import Buffer
from metamq.wire.xa import Verb, XACode, Xid
from tests.one_zookeeper import cluster
from tests.parts import SLOW_S, read_to_end, until_answered
from tests.tx.test_table import EXPECTED

pytestmark = pytest.mark.timeout(400)  # brokers are restarted in it

TOPIC = "orders"
SESSIONS = ["a", "b", "c"]
OK, NOTA, PROTO, DUPID = XACode.OK, XACode.NOTA, XACode.PROTO, XACode.DUPID
WORK = (Verb.SEND, Verb.END, Verb.FAIL, Verb.SUSPEND)
ENDS = (Verb.PREPARE, Verb.COMMIT_ONE_PHASE, Verb.DECIDE)
REPEATED = (Verb.COMMIT, Verb.COMMIT_ONE_PHASE, Verb.DECIDE, Verb.RESOLVE)


@dataclass
class Known:
    """A branch, as the specification has it."""

    epoch: int
    began: str
    state: BranchPhase = BranchPhase.ACTIVE
    suspended: dict[str, bool] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    values: list[bytes] = field(default_factory=list)
    heuristic: XACode = OK
    reason: XACode = XACode.RBROLLBACK

    def is_of(self, session: str) -> bool:
        return session == self.began or session in self.suspended or session in self.sent


class Model:
    """What a broker is to answer."""

    def __init__(self) -> None:
        self.known: dict[Xid, Known] = {}
        self.committed: dict[Xid, int] = {}
        self.never: set[Xid] = set()
        self.visible: list[bytes] = []

    def state(self, xid: Xid) -> BranchPhase:
        return self.known[xid].state if xid in self.known else BranchPhase.NONE

    def restart(self) -> None:
        lasting = (BranchPhase.PREPARED, BranchPhase.HEURISTIC, BranchPhase.DECIDED)
        self.known = {xid: one for xid, one in self.known.items() if one.state in lasting}
        for one in self.known.values():  # only who began it stands in the journal
            one.suspended.clear()
            one.sent.clear()
        self.never.clear()

    def ask(self, verb: Verb, xid: Xid, epoch: int, session: str, first: int, value: bytes) -> XACode:
        one = self.known.get(xid)
        if one is None:
            return self._unknown(verb, xid, epoch)
        if epoch and epoch != one.epoch:
            return NOTA if verb is Verb.RESOLVE and epoch < one.epoch else PROTO
        if verb is Verb.RESOLVE and not epoch and not one.is_of(session):  # somebody else's, by whatever accident
            return PROTO
        code, follows = EXPECTED[one.state].get(verb, (PROTO, one.state))
        if one.state is BranchPhase.HEURISTIC and code == XACode.HEURCOM:
            return one.heuristic
        if one.state is BranchPhase.ROLLBACK_ONLY and code == XACode.RBROLLBACK:
            if verb in (Verb.END, Verb.FAIL, Verb.SUSPEND):
                one.suspended.pop(session, None)
            if follows is BranchPhase.NONE:
                del self.known[xid]
            return one.reason
        if code != OK or one.state in (BranchPhase.HEURISTIC, BranchPhase.DECIDED, BranchPhase.ROLLBACK_ONLY):
            return self._done(xid, verb, code, follows)
        if verb in (Verb.JOIN, Verb.RESUME, *WORK):
            return self._work(one, verb, session, first, value)
        if verb in ENDS:
            if any(one.suspended.values()):
                return PROTO
            if not one.values:
                if verb is not Verb.DECIDE:
                    del self.known[xid]
                return {Verb.PREPARE: XACode.RDONLY, Verb.DECIDE: PROTO}.get(verb, OK)
        return self._done(xid, verb, code, follows)

    def _unknown(self, verb: Verb, xid: Xid, epoch: int) -> XACode:
        if verb is Verb.START:
            return DUPID if xid in self.committed or xid in self.never else OK
        known = self.committed.get(xid)
        if known is not None and epoch in (0, known):
            return OK if verb in REPEATED else NOTA
        if known is not None and not (verb is Verb.RESOLVE and epoch < known):
            return PROTO
        if verb is Verb.RESOLVE:
            self.never.add(xid)
        return NOTA

    def _work(self, one: Known, verb: Verb, session: str, first: int, value: bytes) -> XACode:
        mine = one.suspended.get(session)
        if verb is Verb.JOIN:
            if mine is not None:
                return PROTO
            one.suspended[session] = False
            one.state = BranchPhase.ACTIVE
        elif verb is Verb.RESUME:
            if mine is not True:
                return PROTO
            one.suspended[session] = False
            one.state = BranchPhase.ACTIVE
        elif mine is None or (mine and verb in (Verb.SEND, Verb.SUSPEND)):
            return PROTO
        elif verb is Verb.SEND:
            sent = one.sent.get(session, 0)
            if first < sent:
                return OK
            if first > sent:
                return PROTO
            one.sent[session] = sent + 1
            one.values.append(value)
        elif verb is Verb.SUSPEND:
            one.suspended[session] = True
        else:
            del one.suspended[session]
        if verb is Verb.FAIL:
            one.state, one.reason = BranchPhase.ROLLBACK_ONLY, XACode.RBROLLBACK
        elif verb in (Verb.END, Verb.SUSPEND) and not any(not each for each in one.suspended.values()):
            one.state = BranchPhase.IDLE
        return OK

    def _done(self, xid: Xid, verb: Verb, code: XACode, follows: BranchPhase) -> XACode:
        one = self.known[xid]
        if verb is Verb.RESOLVE and code == NOTA:
            self.never.add(xid)
        if verb in (Verb.COMMIT, Verb.COMMIT_ONE_PHASE, Verb.DECIDE, Verb.HEURISTIC_COMMIT) and code == OK:
            if one.state in (BranchPhase.IDLE, BranchPhase.PREPARED):
                self.visible += one.values
            if one.state in (BranchPhase.IDLE, BranchPhase.PREPARED) and verb is not Verb.HEURISTIC_COMMIT:
                self.committed[xid] = one.epoch
        if verb in (Verb.HEURISTIC_COMMIT, Verb.HEURISTIC_ROLLBACK) and code == OK:
            one.heuristic = XACode.HEURCOM if verb is Verb.HEURISTIC_COMMIT else XACode.HEURRB
        if follows is BranchPhase.NONE and one.state is not BranchPhase.NONE:
            del self.known[xid]
        else:
            one.state = follows
            if follows in (BranchPhase.PREPARED, BranchPhase.DECIDED):
                one.suspended.clear()
        return code


class Broker:
    """The real one, and a client that sends what it is told to."""

    def __init__(self, running: Cluster) -> None:
        self.cluster = running
        running.create_topic(TOPIC, partitions=1)
        self._client = XAResource(0, running.zookeeper)
        self.run = self._client._background.run
        assert self._client._core._cluster is not None
        self.topic_id = self.run(self._client._core._cluster.topic(TOPIC)).id

    def ask(self, header: Tx, body: bytes) -> TxResult:
        """The outcome of the one verb in it."""
        client = self._client._core._client
        xid = Xid(header.xid[0], header.xid[1], header.xid[2])
        bodies: list[Buffer] = [bytearray(body)] if body else []
        reply: TxReply = self.run(
            client._once(Branch(xid, 0, header.session), header, bodies, time.monotonic() + SLOW_S)
        )
        (result,) = reply.results
        return TxResult(*result[: len(TxResult._fields)])

    def states(self) -> dict[Xid, str]:
        client = self._client._core._client
        return {one.xid: one.state for one in until_answered(lambda: self.run(client.branches(0, all_of_them=True)))}

    def restart(self) -> None:
        self.cluster.broker.kill()
        self.cluster.broker.start()

    def values(self) -> list[bytes]:
        with self.cluster.consumer(topics=[TOPIC], idle_timeout_s=0.2) as consumer:
            return [message.value for message in read_to_end(consumer)]

    def close(self) -> None:
        self._client.close()


_stack = ExitStack()
_broker: Broker | None = None
_examples = itertools.count()


def broker() -> Broker:
    """One for all examples: to start it takes longer than any."""
    global _broker
    if _broker is None:
        running = _stack.enter_context(cluster())
        _broker = Broker(running)
        _stack.callback(_broker.close)
    return _broker


def teardown_module() -> None:
    _stack.close()


VERBS = st.sampled_from(list(Verb))
LIKELY = st.sampled_from([Verb.START, Verb.SEND, Verb.END, Verb.PREPARE, Verb.COMMIT, Verb.COMMIT_ONE_PHASE])


class Table(RuleBasedStateMachine):
    """One example: two ids of its own."""

    @initialize()
    def begin(self) -> None:
        self.broker = broker()
        self.number = next(_examples)
        self.model = Model()
        self.xids = [Xid(1, b"%d-%d" % (self.number, which)) for which in range(2)]
        self.late: list[tuple[Tx, bytes, bytes]] = []
        self.values: Iterator[int] = itertools.count()
        self.restarts = 0

    def _request(self, verb: Verb, which: int, session: str, exact: bool) -> tuple[Tx, bytes, bytes]:
        xid = self.xids[which]
        one = self.model.known.get(xid)
        value = b"%d:%d" % (self.number, next(self.values))
        entries, body, first = [], b"", 0
        if verb is Verb.SEND:
            body = bytes(encode([value], base_timestamp_us=1_700_000_000_000_000))
            entries = [PutEntry(TOPIC, self.broker.topic_id, 0, len(body))]
            first = one.sent.get(session, 0) if one is not None else 0
        epoch = one.epoch if one is not None and exact else 0
        session = f"{session}-{self.number}"
        return Tx([*xid], epoch, session, [int(verb)], 3_600_000, -1, first, entries), body, value

    def _send(self, request: tuple[Tx, bytes, bytes]) -> None:
        header, body, value = request
        verb, xid = Verb(header.verbs[0]), Xid(header.xid[0], header.xid[1], header.xid[2])
        session = header.session.partition("-")[0]
        expected = self.model.ask(verb, xid, header.epoch, session, header.first, value)
        result = self.broker.ask(header, body)
        assert XACode(result.code) == expected, (verb.name, xid, session)
        if verb is Verb.START and expected == OK:
            self.model.known[xid] = Known(result.epoch, session, suspended={session: False})

    @rule(verb=LIKELY | VERBS, which=st.integers(0, 1), session=st.sampled_from(SESSIONS), exact=st.booleans())
    def ask(self, verb: Verb, which: int, session: str, exact: bool) -> None:
        self._send(self._request(verb, which, session, exact))

    @rule(verb=VERBS, which=st.integers(0, 1), session=st.sampled_from(SESSIONS), exact=st.booleans())
    def ask_twice(self, verb: Verb, which: int, session: str, exact: bool) -> None:
        """The first answer was lost, or the network doubled it."""
        request = self._request(verb, which, session, exact)
        self._send(request)
        self._send(request)

    @rule(verb=VERBS, which=st.integers(0, 1), session=st.sampled_from(SESSIONS), exact=st.booleans())
    def delay(self, verb: Verb, which: int, session: str, exact: bool) -> None:
        self.late.append(self._request(verb, which, session, exact))

    @precondition(lambda self: bool(getattr(self, "late", None)))
    @rule(again=st.booleans())
    def arrive(self, again: bool) -> None:
        """What was delayed; perhaps it comes once more later."""
        request = self.late.pop(0)
        self._send(request)
        if again:
            self.late.append(request)

    @rule(which=st.integers(0, 1), ends=st.sampled_from([Verb.PREPARE, Verb.COMMIT_ONE_PHASE, Verb.DECIDE]))
    def work(self, which: int, ends: Verb) -> None:
        """As an application does: what is drawn at random gets there too seldom."""
        for verb in (Verb.START, Verb.SEND, Verb.END, ends):
            self.ask(verb, which, "a", True)

    @precondition(lambda self: getattr(self, "restarts", 9) < 1)
    @rule()
    def restart(self) -> None:
        self.restarts += 1
        self.broker.restart()
        self.model.restart()

    @invariant()
    def states_are_those_of_the_model(self) -> None:
        if not hasattr(self, "model"):
            return
        states = self.broker.states()
        for xid in self.xids:
            assert states.get(xid, BranchPhase.NONE.value) == self.model.state(xid).value, xid

    def teardown(self) -> None:
        if not hasattr(self, "model"):
            return
        prefix = b"%d:" % self.number
        assert [value for value in self.broker.values() if value.startswith(prefix)] == self.model.visible


SETTINGS = settings(
    max_examples=12, stateful_step_count=25, deadline=None, phases=[Phase.generate],  # to shrink takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)  # fmt: skip


@pytest.mark.slow
def test_any_verbs_in_any_order() -> None:
    run_state_machine_as_test(Table, settings=SETTINGS)
