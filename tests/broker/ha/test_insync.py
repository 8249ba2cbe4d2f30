"""Whose acknowledgement counts, by value. Against a ZooKeeper that loses answers: test_insync_model.py.

Numbers like 2.10-5 and 9.2-1 are those of the faults in RocketMQ's in-sync sets that a test shows not to be here.
"""

from __future__ import annotations

from metamq.broker.ha.insync import Change, Member, Membership, Stage

MASTER: Member = (0, 1)
ONE: Member = (1, 1)
TWO: Member = (2, 1)
LAG_S = 5.0


def a_membership(*insync: Member) -> Membership:
    return Membership(MASTER, [MASTER, *insync], 0, lag_s=LAG_S)


def joined(membership: Membership, member: Member) -> None:
    membership.live(member)
    membership.caught_up(member)


def test_a_set_that_grows_counts_from_before_the_request() -> None:
    membership = a_membership()
    membership.live(ONE)
    assert membership.required == {ONE}
    assert membership.ask() is None
    membership.caught_up(ONE)
    assert membership.ask() == Change(frozenset({MASTER, ONE}), 0)
    assert membership.required == {ONE}
    assert membership.insync == {MASTER}
    membership.confirmed(1)
    assert membership.insync == {MASTER, ONE}
    assert membership.ask() is None


def test_a_set_that_shrinks_counts_until_after_the_answer() -> None:
    membership = a_membership(ONE, TWO)
    membership.behind(ONE, 10.0, 10.0 + LAG_S)
    assert membership.ask() is None
    membership.behind(ONE, 10.0, 10.1 + LAG_S)
    assert membership.ask() == Change(frozenset({MASTER, TWO}), 0)
    assert membership.required == {ONE, TWO}
    membership.confirmed(1)
    assert membership.required == {TWO}


def test_a_lost_answer_counts_both_ways_until_nothing_can_come_of_it() -> None:
    membership = a_membership(ONE)
    joined(membership, TWO)
    membership.ask()
    membership.lost()
    membership.gone(TWO)
    membership.read([MASTER, ONE], 0)
    assert membership.required == {ONE, TWO}, "the request may be carried out yet"
    assert membership.ask() == Change(frozenset({MASTER, ONE}), 0)
    membership.confirmed(1)
    assert membership.required == {ONE}


def test_a_lost_answer_that_was_yes_is_found_by_reading() -> None:
    membership = a_membership()
    joined(membership, ONE)
    membership.ask()
    membership.lost()
    membership.read([MASTER, ONE], 1)
    assert membership.insync == {MASTER, ONE}
    assert membership.ask() is None


def test_who_is_back_in_time_is_not_taken_out() -> None:
    membership = a_membership(ONE)
    membership.behind(ONE, 0.0, 100.0)
    membership.behind(ONE, None, 100.0)
    assert membership.ask() is None


def test_who_was_being_taken_out_may_join_again() -> None:
    membership = a_membership(ONE)
    membership.behind(ONE, 0.0, 100.0)
    membership.ask()
    membership.confirmed(1)
    assert membership.stage(ONE) is None
    membership.behind(ONE, 99.0, 100.0)
    joined(membership, ONE)
    assert membership.ask() == Change(frozenset({MASTER, ONE}), 1)


def test_another_incarnation_is_somebody_else() -> None:
    membership = a_membership(ONE)
    again: Member = (1, 2)
    joined(membership, again)
    membership.behind(ONE, 0.0, 100.0)
    assert membership.required == {ONE, again}
    assert membership.ask() == Change(frozenset({MASTER, again}), 0)
    membership.confirmed(1)
    assert membership.required == {again}


def test_a_slave_that_goes_while_it_joins_does_not_count() -> None:
    membership = a_membership()
    joined(membership, ONE)
    membership.gone(ONE)
    assert membership.required == frozenset()
    assert membership.ask() is None


def test_an_answer_that_was_lost_while_the_set_grew_loses_no_message() -> None:
    """9.2-1: the set had grown, its master did not know it, and acknowledged without the new member."""
    membership = a_membership()
    joined(membership, ONE)
    assert membership.ask() is not None
    membership.lost()
    assert membership.required == {ONE}
    membership.gone(ONE)
    assert membership.required == {ONE}, "it may have been let in, and be promoted"
    assert membership.stage(ONE) is Stage.DROPPING


def test_a_member_without_a_link_still_counts() -> None:
    """9.2-3: the mark was that of the members that happened to be connected."""
    membership = a_membership(ONE, TWO)
    membership.gone(ONE)
    assert membership.required == {ONE, TWO}
    membership.behind(ONE, 10.0, 11.0)
    assert membership.ask() is None
    assert membership.required == {ONE, TWO}


def test_a_slave_joins_under_constant_load() -> None:
    """2.10-5: whoever had to equal the log's end at the instant of its acknowledgement starved."""
    membership = a_membership()
    end = stable = held = 0
    for _step in range(100):
        end += 10
        acknowledged = max(end - 25, held)  # it is never less than two appends behind
        held = acknowledged
        membership.live(ONE)
        stable = max(stable, min(end, held) if membership.required else end)
        if held >= stable:
            membership.caught_up(ONE)
        if membership.ask() is not None:
            return
    raise AssertionError("it starves")


def test_a_slave_that_joins_and_stops_to_acknowledge_is_let_go_until_it_keeps_up() -> None:
    """Writes wait for it from the moment it joins."""
    membership = a_membership()
    membership.live(ONE)
    membership.behind(ONE, 10.0, 10.0 + LAG_S)
    assert membership.required == {ONE}
    membership.behind(ONE, 10.0, 10.1 + LAG_S)
    assert membership.required == frozenset()
    membership.live(ONE)
    assert membership.required == frozenset(), "its link lives, and so would the others wait again"
    membership.behind(ONE, None, 20.0)
    membership.live(ONE)
    assert membership.required == {ONE}


def test_a_slave_that_was_let_go_begins_anew_with_a_new_link_or_once_it_holds_everything() -> None:
    for happens in (Membership.gone, Membership.caught_up):
        membership = a_membership()
        membership.live(ONE)
        membership.behind(ONE, 0.0, 100.0)
        happens(membership, ONE)
        membership.live(ONE)
        assert membership.required == {ONE}


def test_a_set_that_shrinks_while_a_write_waits_is_small_before_the_write_is_answered() -> None:
    """2.10-7: the least number was looked at before the append alone, and a set of one acknowledged for two."""
    membership = a_membership(ONE)
    membership.behind(ONE, 0.0, 100.0)
    assert membership.ask() == Change(frozenset({MASTER}), 0)
    assert (membership.required, membership.insync) == ({ONE}, {MASTER, ONE}), "it waits"
    membership.confirmed(1)
    assert (membership.required, membership.insync) == (frozenset(), {MASTER}), "both at once"


def test_who_is_not_in_the_set_acknowledges_for_nobody() -> None:
    """2.10-8: any so and so many acknowledgements counted, and then a member without the message was elected."""
    membership = a_membership(ONE)
    membership.caught_up(TWO)  # a learner, or one that is being copied to, however much it holds
    membership.behind(TWO, None, 0.0)
    assert membership.required == {ONE}
    membership.live(TWO)
    assert membership.required == {ONE, TWO}, "one more that is waited for, none less"


def test_the_set_never_has_one_replica_twice() -> None:
    """The two would count as two copies."""
    membership = a_membership(ONE)
    again: Member = (1, 2)
    joined(membership, again)
    assert membership.ask() == Change(frozenset({MASTER, again}), 0)
    assert membership.required == {ONE, again}
    membership.lost()
    membership.read([MASTER, again], 1)
    assert membership.required == {again}
    joined(membership, ONE)  # a clean restart of an older copy of its folder, say
    assert membership.ask() == Change(frozenset({MASTER, ONE}), 1)


def test_a_refused_change_is_begun_anew_from_what_stands_there() -> None:
    membership = a_membership(ONE)
    joined(membership, TWO)
    membership.ask()
    membership.refused([MASTER], 5)
    assert (membership.version, membership.insync, membership.required) == (5, {MASTER}, {TWO})
    assert membership.ask() == Change(frozenset({MASTER, TWO}), 5)


def test_an_older_state_tells_nothing() -> None:
    membership = Membership(MASTER, [MASTER, ONE], 7, lag_s=LAG_S)
    for version in (6, 7):
        membership.read([MASTER], version)
        assert membership.insync == {MASTER, ONE}


def test_a_deposed_master_concludes_nothing() -> None:
    """The slave that was promoted goes on being waited for, so that nothing is acknowledged without it."""
    membership = a_membership(ONE)
    membership.behind(ONE, 0.0, 100.0)
    assert membership.ask() is not None
    membership.deposed()
    membership.read([ONE, TWO], 1)
    membership.gone(ONE)
    membership.live(TWO)
    assert (membership.required, membership.insync, membership.version) == ({ONE}, {MASTER, ONE}, 0)
    assert membership.ask() is None
