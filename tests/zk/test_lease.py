"""The lease: the rule by value, and against a server that is frozen, a loop that hangs, a session that ends."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metamq.zk.server.embedded import EmbeddedZooKeeper
from metamq.zk.session.lease import Lease, LeaseGrant, now_ns, remaining_ns, renewed
from metamq.zk.session.session import Session, SessionState

Expire = Callable[[Session], None]
Until = Callable[..., Awaitable[None]]

MS = 1_000_000
terms = st.builds(
    LeaseGrant,
    generation=st.integers(1, 3),
    sent_ns=st.integers(0, 10_000 * MS),
    timeout_ms=st.sampled_from([1_000, 1_001, 10_000]),
)


def test_it_lasts_two_thirds_of_the_time_out_from_sending() -> None:
    term = LeaseGrant(generation=1, sent_ns=5_000 * MS, timeout_ms=3_000)
    assert term.end_ns == 7_000 * MS
    assert remaining_ns(term, 1, False, 5_000 * MS) == 2_000 * MS
    assert remaining_ns(term, 1, False, 6_999 * MS) == 1 * MS
    assert remaining_ns(term, 1, False, 7_000 * MS) == 0
    assert remaining_ns(term, 1, False, 99_000 * MS) == 0


def test_it_is_worth_nothing_in_another_session_or_without_one() -> None:
    term = LeaseGrant(generation=1, sent_ns=0, timeout_ms=3_000)
    assert remaining_ns(term, 2, False, 0) == 0
    assert remaining_ns(term, 1, True, 0) == 0
    assert remaining_ns(None, 1, False, 0) == 0


@given(st.lists(terms, min_size=1), st.randoms(use_true_random=False))
def test_answers_count_alike_in_any_order(answers: list[LeaseGrant], shuffler: random.Random) -> None:
    last = max(answers, key=lambda term: (term.generation, term.end_ns))
    shuffler.shuffle(answers)
    term = None
    for answer in answers:
        term = renewed(term, answer)
    assert term is not None
    assert (term.generation, term.end_ns) == (last.generation, last.end_ns)


def test_the_clock_goes_on() -> None:
    assert now_ns() <= now_ns()


def test_it_holds_while_the_server_answers_and_ends_before_the_session_does(
    victim: EmbeddedZooKeeper, until: Until
) -> None:
    async def main() -> None:
        async with await Session.open(victim.address, timeout_ms=1_500) as session, Lease(session) as lease:
            await until(lease.valid)
            assert lease.remaining_ms() <= 1_000
            first = lease._grant
            await until(lambda: lease._grant is not first)
            await until(lease.valid)

            victim.freeze()
            frozen_ns, asked_ns = now_ns(), now_ns()
            while lease.valid():
                # No request that was answered was sent after the freeze.
                assert asked_ns - frozen_ns <= 1_000 * MS
                assert lease.remaining_ms() <= 1_000
                await asyncio.sleep(0.01)
                asked_ns = now_ns()
            last = lease._grant
            assert last is not None
            assert now_ns() >= last.end_ns or session.state is SessionState.LOST
            victim.thaw()
            await until(lease.valid)
        assert not lease.valid()
        assert lease.remaining_ms() == 0

    asyncio.run(main())


@pytest.mark.slow
def test_a_longer_one_outlives_its_session_and_ends_at_a_refutation(servers: str, until: Until, expire: Expire) -> None:
    holds, refuted = True, 0

    async def confirm() -> bool:
        return holds

    def count() -> None:
        nonlocal refuted
        refuted += 1

    async def main() -> None:
        nonlocal holds
        async with await Session.open(servers) as session, Lease(session, confirm, count) as lease:
            await until(lease.valid)
            lost: list[tuple[bool, bool]] = []
            session.on_state(
                lambda state: lost.append((lease.valid(), lease.valid(60))) if state is SessionState.LOST else None
            )
            await asyncio.to_thread(expire, session)
            await until(lambda: session.generation == 2)
            assert lost == [(False, True)]
            await until(lease.valid)
            assert refuted == 0
            holds = False
            await until(lambda: refuted and not lease.valid())
            assert not lease.valid(60)
            holds = True
            await until(lease.valid)
            lease.refute()
            assert lease.valid(), "the caller's own evidence ends the longer one only"
        assert not lease.valid(60)

    asyncio.run(main())


def test_a_longer_one_ends_with_its_time(victim: EmbeddedZooKeeper, until: Until) -> None:
    async def main() -> None:
        async with await Session.open(victim.address, timeout_ms=1_500) as session, Lease(session) as lease:
            await until(lease.valid)
            victim.freeze()
            await until(lambda: not lease.valid())
            last = lease._grant
            assert last is not None
            await until(lambda: not lease.valid(0.5))
            assert now_ns() >= last.end_ns + 500 * MS
            victim.thaw()

    asyncio.run(main())


def test_a_loop_that_hangs_loses_it_though_the_session_lives(servers: str, until: Until) -> None:
    async def main() -> None:
        async with await Session.open(servers, timeout_ms=1_000) as session, Lease(session) as lease:
            for _ in range(20):
                await until(lease.valid)
                generation = session.generation
                time.sleep(0.8)  # noqa: ASYNC251
                assert not lease.valid()
                await until(lease.valid)
                if session.generation == generation:
                    return
                # On a machine under load more than the loop hangs, and so short a session may end.
            raise AssertionError("the session does not live")

    asyncio.run(main())


def test_it_passes_to_the_next_session_only_by_an_answer_in_it(servers: str, until: Until, expire: Expire) -> None:
    async def main() -> None:
        async with await Session.open(servers) as session, Lease(session) as lease:
            validity: list[tuple[SessionState, bool]] = []
            session.on_state(lambda state: validity.append((state, lease.valid())))
            await asyncio.to_thread(expire, session)
            await until(lambda: session.generation == 2)
            await until(lease.valid)
            assert [valid for state, valid in validity if state is SessionState.LOST] == [False]
            assert lease._grant is not None
            assert lease._grant.generation == 2

    asyncio.run(main())


def test_it_is_renewed_only_while_what_it_is_for_is_confirmed(servers: str, until: Until) -> None:
    async def main() -> None:
        holds, asked = True, 0

        async def confirm() -> bool:
            nonlocal asked
            asked += 1
            return holds

        async with await Session.open(servers, timeout_ms=1_000) as session, Lease(session, confirm) as lease:
            await until(lease.valid)
            holds, asked = False, 0
            await until(lambda: not lease.valid())
            asked = 0
            # The session lives, or another one does, and is asked.
            await until(lambda: asked > 1 and session.state is SessionState.CONNECTED)
            assert not lease.valid()
            holds = True
            await until(lease.valid)

    asyncio.run(main())


def test_what_was_asked_before_it_begins_anew_does_not_count(servers: str, until: Until) -> None:
    async def scenario() -> None:
        asked, answers = 0, asyncio.Event()
        answers.set()

        async def confirm() -> bool:
            nonlocal asked
            asked += 1
            is_early = asked <= before
            await answers.wait()
            return is_early

        before = 1_000_000  # all of them, for now
        async with await Session.open(servers, timeout_ms=1_000) as session, Lease(session, confirm) as lease:
            for _ in range(20):
                answers.set()
                await until(lease.valid)
                answers.clear()
                asked_before = asked
                await until(lambda known=asked_before: asked > known)
                if lease.valid():  # else the machine was slow
                    break
            assert lease.valid()
            before = asked
            begun = asyncio.ensure_future(lease.begin_again())
            await until(lambda: asked > before)
            assert not lease.valid()
            answers.set()  # yes to what was asked before, no to what was asked since
            await begun
            assert not lease.valid()
            before = 1_000_000
            await until(lease.valid)

    asyncio.run(scenario())


def test_it_ends_with_the_session(servers: str) -> None:
    async def main() -> None:
        session = await Session.open(servers)
        lease = Lease(session)
        await lease.start()
        await lease.start()
        assert lease.valid()
        await session.close()
        assert not lease.valid()
        await lease.close()
        await lease.close()

    asyncio.run(main())
