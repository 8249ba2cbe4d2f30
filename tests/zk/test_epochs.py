"""Epoch numbers: no two replicas take the same one, none is taken twice, and who was taken back is told."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from metamq.broker.config import BrokerConfig
from metamq.errors import ConfigError
from metamq.zk.cluster.epochs import (
    CLASSES,
    REIGNS_KEPT,
    Known,
    KnownState,
    highest_epoch,
    next_epoch,
    taken_back,
    with_reign,
)


def test_the_next_number_is_above_all_that_are_known_and_no_further_than_it_must_be() -> None:
    for highest in range(100):
        for replica in range(CLASSES):
            assert highest < next_epoch(highest, replica) <= highest + CLASSES


def test_replicas_that_know_nothing_of_one_another_take_different_numbers() -> None:
    """From whatever each of them knows, and however often."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    taken: dict[int, set[int]] = {replica: set() for replica in range(CLASSES)}
    for replica, numbers in taken.items():
        epoch = 0
        for _ in range(1000):
            epoch = next_epoch(epoch + chance.randrange(3 * CLASSES), replica)
            assert epoch not in numbers
            numbers.add(epoch)
    for one, other in combinations(taken.values(), 2):
        assert not one & other


def test_a_replica_without_a_class_of_its_own_is_refused() -> None:
    """Replicas 0 and 16 would take the same numbers."""
    assert next_epoch(40, CLASSES) == next_epoch(40, 0)
    assert BrokerConfig(data="d", replica=CLASSES - 1).replica == 15
    with pytest.raises(ConfigError, match="the broker's `replica` must be a whole number from 0 to 15, not 16"):
        BrokerConfig(data="d", replica=CLASSES)


def test_the_first_master_begins_with_1() -> None:
    assert next_epoch(0, 0) == 1
    assert next_epoch(1, 1) == 2


def claim(replica: int, epoch: int, version: int = -1) -> KnownState:
    return KnownState(replica, epoch, version, 1)


@pytest.mark.parametrize(
    ("epoch", "version", "claims", "told"),
    [
        (0, -1, [], ""),
        (0, -1, [claim(0, 0)], ""),
        (3, 7, [claim(0, 3, 7), claim(1, 3), claim(2, 1, 99)], ""),
        (3, 7, [claim(0, 3, 8)], "it has version 7 of the state of epoch 3, and replica 0 has seen version 8"),
        (3, 7, [claim(0, 3, 8), claim(1, 4)], "it has epoch 3, and replica 1 has seen epoch 4"),
    ],
)
def test_a_state_that_is_older_than_what_a_replica_knows_was_taken_back(
    epoch: int, version: int, claims: list[KnownState], told: str
) -> None:
    assert taken_back(Known(epoch, version), claims) == (told and f"ZooKeeper was taken back: {told}")
    assert highest_epoch(epoch, claims) == max([epoch, *(one.epoch for one in claims)])


def test_where_no_state_is_the_broker_may_have_been_removed() -> None:
    told = taken_back(Known(), [claim(2, 1)])
    assert told.startswith(
        "ZooKeeper was taken back, or this broker was removed by `metamq cluster remove-broker`: "
        "ZooKeeper has no epoch of it, and replica 2 has seen epoch 1. If it was removed, do not start it"
    )


def test_an_epoch_of_another_history_is_told_however_far_this_one_went_on() -> None:
    """Replica 1 was promoted, ZooKeeper was taken back, and replica 0 has begun terms since."""
    known = Known(49, 3, [(1, 0)])
    assert taken_back(known, [claim(0, 49), claim(1, 17)]) == ""
    assert "epoch 2, which replica 1 has seen, is not one of those that led to its epoch 49" in taken_back(
        known, [claim(1, 2)]
    )
    assert taken_back(Known(49, 3, [(33, 0)]), [claim(1, 2)]) == "", "nothing is known of what was before"
    assert taken_back(Known(50, 3, [(1, 0), (2, 1), (17, 0)]), [claim(2, 2), claim(3, 18)]) != ""
    assert taken_back(Known(50, 3, [(1, 0), (2, 1), (33, 0)]), [claim(2, 2), claim(3, 18)]) == ""


def test_who_was_the_master_is_kept_for_so_many_changes() -> None:
    reigns: tuple[tuple[int, int], ...] = ()
    epoch = 0
    for number in range(3 * REIGNS_KEPT):
        replica = number // 3 % 2
        epoch = next_epoch(epoch, replica)
        reigns = with_reign(reigns, epoch, replica)
        assert taken_back(Known(epoch, 0, reigns), [claim(0, known) for known, _ in reigns]) == ""
    assert len(reigns) == REIGNS_KEPT
    assert [master for _, master in reigns] == [0, 1] * (REIGNS_KEPT // 2)
