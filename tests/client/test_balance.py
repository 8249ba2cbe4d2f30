"""Masters over hosts: no other choice has a smaller maximum, and nothing moves without need."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metamq.client.admin.balance import balanced

Hosts = dict[int, dict[int, str]]


def most(chosen: dict[int, int], hosts: Hosts) -> int:
    return max(Counter(hosts[broker_id][replica] for broker_id, replica in chosen.items()).values(), default=0)


@st.composite
def groups(draw: st.DrawFn) -> tuple[dict[int, int], Hosts]:
    hosts: Hosts = {}
    for broker_id in range(draw(st.integers(0, 5))):
        names = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=3))
        hosts[broker_id] = dict(enumerate(names))
    return {one: draw(st.sampled_from(sorted(replicas))) for one, replicas in hosts.items()}, hosts


@given(groups())
def test_no_other_choice_has_a_smaller_maximum(given_: tuple[dict[int, int], Hosts]) -> None:
    masters, hosts = given_
    chosen = balanced(masters, hosts)
    assert chosen.keys() == masters.keys()
    assert all(replica in hosts[broker_id] for broker_id, replica in chosen.items())
    every = (dict(zip(hosts, one, strict=True)) for one in itertools.product(*hosts.values()))
    assert most(chosen, hosts) == min(most(one, hosts) for one in every)


@pytest.mark.parametrize(
    ("hosts", "moved"),
    [
        ("ab ab", 1),  # two masters on one host
        ("ab ba", 0),
        ("ab ab ba", 0),  # 2 and 1: as well as three can be
        ("ab ab bc", 2),  # c takes one from b, and b one from a
        ("aa aa", 0),  # all replicas on one machine
        ("a a b", 0),  # no slaves
    ],
)
def test_how_many_masters_move(hosts: str, moved: int) -> None:
    places = {broker_id: dict(enumerate(names)) for broker_id, names in enumerate(hosts.split())}
    masters = dict.fromkeys(places, 0)
    chosen = balanced(masters, places)
    assert sum(chosen[one] != masters[one] for one in masters) == moved
