"""Headers: what is declared is taken, with fields to spare, and nothing else."""

from __future__ import annotations

from typing import Any, NamedTuple, get_origin

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metamq.errors import ProtocolError
from metamq.wire import commands
from metamq.wire.commands import Command, Get, GetPartition, OffsetsEntry, PutEntry, PutResult
from metamq.wire.headers import entries_max_of, fields_of, unpack, unpack_list
from metamq.wire.limits import REQUEST_ENTRIES_MAX, AtMost
from tests.examples import examples

TUPLES = [
    commands.Hello(1, 1, "me", True),
    commands.HelloReply(1, 0, 5, 4, 16, 64, "metamq", ["SCRAM-SHA-256-PLUS"], 7),
    commands.Authenticate("SCRAM-SHA-256-PLUS", b"n,,"),
    commands.Authenticated(b"v=", True, 7, "etl:5f0c"),
    PutEntry("flights", "id", 3, 100),
    PutResult(0, 10, 20, None),
    GetPartition(1, "flights", "id", 3, 5),
    Get(100, 1, 2, 3, [GetPartition(1, "flights", "id", 3)], [(1, 10)], [2]),
    commands.GetResult(1, 0, 100, 0, 10, None),
    commands.FilePlace("/var/metamq/topics/flights@id/0/0.log", 2049, 17, 4096, 3),
    OffsetsEntry("flights", "id", 3, commands.LATEST),
    commands.OffsetsResult(0, 10, -1, 0, 10, 5, None, [(5, 10)]),
    commands.Promote(True),
    commands.Promoted(2, 1),
    commands.TopicChange("flights", b"{}", 3),
    commands.TopicChanged(True),
    commands.Delay(1500, "write_bytes_s", 1_000_000),
    commands.Delegate("0a1b", [commands.DelegatedRight("read", "flights")], 3600, b"salt", b"stored", b"server", 4096),
    commands.DelegatedRight("read", "flights"),
    commands.Delegated(1_357_038_000_000),
]


def received(header: Any) -> Any:
    return msgpack.unpackb(msgpack.packb(header))


@pytest.mark.parametrize("sent", TUPLES, ids=lambda sent: type(sent).__name__)
def test_round_trip(sent: Any) -> None:
    got = unpack(type(sent), received(sent))
    assert type(got) is type(sent)
    assert received(got) == received(sent)


@pytest.mark.parametrize("sent", TUPLES, ids=lambda sent: type(sent).__name__)
def test_fields_of_a_newer_release_are_left_out(sent: Any) -> None:
    assert unpack(type(sent), [*received(sent), "new", {"more": 1}]) == unpack(type(sent), received(sent))


@pytest.mark.parametrize("sent", TUPLES, ids=lambda sent: type(sent).__name__)
def test_a_wrong_field_is_named(sent: Any) -> None:
    good = received(sent)
    for number, name in enumerate(sent._fields):
        if name in ("error", "file"):  # looked into by whoever knows what it is
            continue
        for wrong in (None, 1.5, True, b"bytes", {}, [["x"]]):
            if name in ("opened", "rights") and isinstance(wrong, list):
                continue  # its entries are looked at one by one
            if name in ("accept_loss", "in_place", "master_stops", "is_done", "takes_delays") and wrong is True:
                continue
            if name in ("data", "document", "salt", "stored_key", "server_key") and isinstance(wrong, bytes):
                continue
            with pytest.raises(ProtocolError, match=rf"{type(sent).__name__}\.{name} must be .+, got"):
                unpack(type(sent), [*good[:number], wrong, *good[number + 1 :]])
    for short in range(len(good) - len(type(sent)._field_defaults)):
        with pytest.raises(ProtocolError, match=f"{type(sent).__name__} has {len(good)} fields, got"):
            unpack(type(sent), good[:short])


def test_a_peer_of_before_a_field_was_added_is_understood() -> None:
    good = [1, 0, 120, 0, 2, None]
    assert unpack(commands.GetResult, good) == commands.GetResult(1, 0, 120, 0, 2, None, preferred_replica=-1)
    assert unpack(commands.GetResult, [*good, 1, "of a later release"]).preferred_replica == 1


@pytest.mark.parametrize("armed", [[[1]], [[1, 2, 3]], [[1, "2"]], [1, 2], [[True, 1]]])
def test_what_is_armed_are_pairs(armed: Any) -> None:
    with pytest.raises(ProtocolError, match=r"Get\.armed"):
        unpack(Get, [0, 0, 0, 0, [], armed, []])


def test_lists() -> None:
    assert unpack_list(PutEntry, []) == []
    for wrong in (None, {}, "x", 1):
        with pytest.raises(ProtocolError, match="a list of PutEntry is expected, got"):
            unpack_list(PutEntry, wrong)
    entry = list(PutEntry("t", "id", 0, 1))
    assert len(unpack_list(PutEntry, [entry] * REQUEST_ENTRIES_MAX)) == REQUEST_ENTRIES_MAX
    with pytest.raises(ProtocolError, match="4,001 entries of PutEntry are over the limit of 4,000"):
        unpack_list(PutEntry, [entry] * (REQUEST_ENTRIES_MAX + 1))


def headers() -> list[type[Any]]:
    """Every header, and every entry of one."""
    return [
        kind
        for kind in vars(commands).values()
        if isinstance(kind, type) and hasattr(kind, "_fields") and kind is not AtMost
    ]


@pytest.mark.parametrize("cls", headers())
def test_every_list_declares_how_long_it_may_be_and_keeps_to_it(cls: Any) -> None:
    """And a header with a longer one is refused before anything else of the list is looked at."""
    limits = entries_max_of(cls)
    lists = [name for name, kind in fields_of(cls) if get_origin(kind) is list]
    assert limits.keys() == set(lists)
    samples = {int: 1, str: "x", bool: True, bytes: b"x", Any: None}
    good = [[] if name in limits else samples[kind] for name, kind in fields_of(cls)]
    assert unpack(cls, good)
    for name, limit in limits.items():
        at = cls._fields.index(name)
        with pytest.raises(ProtocolError, match=rf"{cls.__name__}\.{name} has {limit + 1:,} entries, the limit is"):
            unpack(cls, [*good[:at], [object()] * (limit + 1), *good[at + 1 :]])


class Careless(NamedTuple):
    numbers: list[int]


def test_a_list_without_a_limit_is_found_out() -> None:
    with pytest.raises(TypeError, match="numbers does not declare its maximum length"):
        unpack(Careless, [[1]])


def test_an_error_shows_little_of_a_large_header() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    for wrong in (["x" * 1_000_000], deep, list(range(100_000)), [deep] * 7):
        with pytest.raises(ProtocolError) as caught:
            unpack(Get, wrong)
        assert len(str(caught.value)) < 400


def test_numbers_are_never_used_twice() -> None:
    assert {command.name: command.value for command in Command} == {
        "HELLO": 1,
        "AUTHENTICATE": 2,
        "PUT": 3,
        "GET": 4,
        "SYNC": 5,
        "OFFSETS": 6,
        "STATS": 7,
        "PROMOTE": 8,
        "TX": 9,
        "BRANCHES": 10,
        "TOPIC": 11,
        "DELAY": 12,
        "DELEGATE": 13,
    }


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=20,
)


@settings(deadline=None, max_examples=examples(200))
@given(anything)
def test_anything_else_is_refused(header: Any) -> None:
    for sent in TUPLES:
        try:
            got = unpack(type(sent), header)
        except ProtocolError:
            continue
        assert type(got) is type(sent)
