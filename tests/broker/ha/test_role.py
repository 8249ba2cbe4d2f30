"""The reasons to refuse writes: each belongs to its role, and ends with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from metamq.broker.roles.decide_role import RoleKind
from metamq.broker.roles.role import BetweenRoles, MasterRole, ReplicaStatus
from metamq.errors import DiskFull, Fenced, MetamqError


def a_master(epoch: int, deposed: Fenced | None = None) -> MasterRole:
    service = SimpleNamespace(writes_refused=deposed)
    return MasterRole(epoch, cast(Any, service), cast(Any, None), Fenced("broker 0", "no journal"))


def refusal_of(status: ReplicaStatus) -> MetamqError:
    with pytest.raises(MetamqError) as caught:
        status.writing_master()
    return caught.value


def test_a_master_takes_writes_until_it_is_deposed_and_the_next_epoch_takes_them_again() -> None:
    status = ReplicaStatus(0)
    assert "it is starting" in str(refusal_of(status))
    deposed = Fenced("broker 0", "epoch 17 has begun")
    status.exchange(a_master(1, deposed))
    assert refusal_of(status) is deposed
    next_one = a_master(33)
    status.exchange(next_one)
    assert status.writing_master() is next_one, "what a former epoch was refused for is over with it"


def test_the_reasons_of_others_outlast_the_role() -> None:
    status = ReplicaStatus(0)
    status.exchange(a_master(1))
    status.disk_full = DiskFull("/data", 0, 1)
    status.exchange(a_master(17))
    assert refusal_of(status) is status.disk_full
    status.stopping = Fenced("broker 0", "it is stopping")
    assert refusal_of(status) is status.stopping, "the reason that does not pass comes first"
    status.disk_full = status.stopping = None
    between = BetweenRoles(RoleKind.WAITING, 17, "", Fenced("broker 0", "a new epoch begins"))
    assert status.exchange(between).epoch == 17
    assert refusal_of(status) is between.refusal
