"""The data folder of each worker: no data is mixed up, and none is left out without an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metamq.broker.data.data_folder import DataFolder
from metamq.broker.workers.places import find_places, places
from metamq.errors import ConfigError

DATA = Path("d")


def test_a_new_folder_gets_one_for_each_id() -> None:
    assert places(DATA, range(2, 4), None, []) == [DATA / "broker-2", DATA / "broker-3"]


def test_the_folder_of_a_single_broker_is_used_in_its_place() -> None:
    assert places(DATA, range(3), 1, [0]) == [DATA / "broker-0", DATA, DATA / "broker-2"]


@pytest.mark.parametrize(
    ("owner", "below", "problem", "step"),
    [
        (5, [], "belongs to broker 5, but --id 0 --processes 2 runs the brokers 0 to 1", "Give --id 5"),
        (1, [0, 1], "both d and d/broker-1 are data folders of broker 1", "move the other one"),
        (None, [0, 1, 2, 3], "there is data of others: d/broker-2, d/broker-3", "Give --processes 4"),
        (0, [7], "there is data of others: d/broker-7", "Give --processes 8"),
    ],
)
def test_data_of_other_brokers_is_refused(owner: int | None, below: list[int], problem: str, step: str) -> None:
    with pytest.raises(ConfigError, match=problem) as raised:
        places(DATA, range(2), owner, below)
    assert step in raised.value.hint


def test_ids_before_the_first_are_refused() -> None:
    with pytest.raises(ConfigError, match="there is data of others: d/broker-1") as raised:
        places(DATA, range(2, 4), None, [1, 2])
    assert raised.value.hint.startswith("Give --id 1")


@given(st.integers(0, 9), st.integers(2, 9), st.none() | st.integers(0, 19), st.sets(st.integers(0, 19)))
def test_each_id_with_data_gets_exactly_this_data(first: int, many: int, owner: int | None, below: set[int]) -> None:
    ids = range(first, first + many)
    try:
        found = dict(zip(ids, places(DATA, ids, owner, below), strict=True))
    except ConfigError:
        return
    assert below | {owner} - {None} <= set(ids), "no data is left out"
    assert len(set(found.values())) == many
    assert all(found[one] == DATA / f"broker-{one}" for one in below)
    assert owner is None or found[owner] == DATA


def test_the_folders_of_workers_are_found_and_refused_to_a_single_broker(tmp_path: Path) -> None:
    for broker_id in (0, 10):
        DataFolder.open(tmp_path / f"broker-{broker_id}", broker_id).close(clean=True)
    (tmp_path / "broker-01").mkdir()
    assert len(find_places(tmp_path, range(11))) == 11
    with pytest.raises(ConfigError, match="was made by `metamq broker --processes`: it has broker-0, broker-10") as it:
        DataFolder.open(tmp_path, 0)
    assert f"--data {tmp_path}/broker-0" in it.value.hint
    assert not (tmp_path / "meta.json").exists()


def test_a_single_broker_may_come_back_to_its_folder(tmp_path: Path) -> None:
    DataFolder.open(tmp_path, 0).close(clean=True)
    DataFolder.open(tmp_path / "broker-1", 1).close(clean=True)
    DataFolder.open(tmp_path, 0).close(clean=True)
    assert find_places(tmp_path, range(2)) == [tmp_path, tmp_path / "broker-1"]
