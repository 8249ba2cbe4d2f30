"""Errors: each class pickles, and crosses the wire with its fields and its sentence."""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metamq import errors
from metamq.errors import MetamqError
from metamq.wire import status
from metamq.wire.limits import ERROR_TEXT_CHARS_MAX
from metamq.wire.status import decode_error, encode_error
from tests.examples import examples

SAMPLES: list[MetamqError] = [
    MetamqError("it broke", hint="Mend it.", outcome="unknown"),
    errors.ConnectError("broker:1", "refused", hint="Start it.", outcome="unknown"),
    errors.UnsupportedVersion("broker:1", (1, 2), (3, 4)),
    errors.AuthenticationFailed("broker:1", "the password is wrong"),
    errors.NotAuthorized("etl", "read", "topic:flights"),
    errors.ServerBusy("changes of topics"),
    errors.ProtocolError("junk"),
    errors.ConfigError("`x` is 1", hint="Make it 2."),
    errors.WrongType("`x` is '1', not a number"),
    errors.ForkedError("Producer"),
    errors.TopicNotFound("flights"),
    errors.PartitionNotFound("flights", "0-9", ("0-0", "0-1")),
    errors.TopicExists("flights"),
    errors.MessageTooLarge("a message", 10, 5),
    errors.BufferFull(100),
    errors.DeliveryTimeout("a batch", 1.5, "lost"),
    errors.Timeout("a wait", 2.0),
    errors.NotEnoughReplicas("flights/0-0", 1, 2, outcome="unknown"),
    errors.Fenced("broker 0", "epoch 4 is over"),
    errors.SequenceGap("flights/0-0", 4, 6),
    errors.OffsetOutOfRange("flights/0-0", 5, 10, 20, "retention"),
    errors.OffsetDiverged("flights/0-0", 15, 10, 20, 12, 3),
    errors.CorruptData("flights/0-0", "checksum", position=77, hint="Restore it."),
    errors.StorageError("fsync failed"),
    errors.DiskFull("data", 1, 2),
    errors.TooManyOpenFiles("flights/0-0: writing", 1024),
    errors.TooManyThreads("metamq"),
    errors.OwnershipLost("flights", "0-0", "claimed by c2"),
    errors.TransactionError("1_Zw==_", -3, "no such branch"),
    errors.RolledBack("1_Zw==_", 106, "its time is over"),
    errors.OutcomeUnknown("1_Zw==_", -7, "no answer"),
    errors.BranchNotKnown("1_Zw==_", -4, "nobody knows it"),
    errors.HeuristicOutcome("1_Zw==_", 7, "an operator has committed it"),
    errors.BranchMisuse("1_Zw==_", -6, "it is prepared"),
    errors.TryLater("1_Zw==_", 4, "not now"),
    errors.ClosedError("producer", "forked"),
]

NOT_ENCODED = [
    errors.HandlerTimeout("orders", "0-1", 7, 2.5),
    errors.UndecodableBatch("flights", "0-0", 5, 9, "its columns end too early"),
    errors.SchemaIncompatible("flights", 1, "day", "string", "integer", "why", "backward", "next"),
    errors.DecodeError("flights", "0-0", 5, b"key", b"value", ValueError("no JSON")),
]
"""Errors of a consumer: in what it has received, and in its handlers."""

NOT_ON_THE_WIRE = {
    errors.ConnectError,
    errors.TopicExists,
    errors.BufferFull,
    errors.DeliveryTimeout,
    errors.OwnershipLost,
    errors.TooManyThreads,
    MetamqError,
}
"""Classes that only a client raises: a broker that raised one would be answering with its root."""


def classes() -> Iterator[type[MetamqError]]:
    for _name, cls in inspect.getmembers(errors, inspect.isclass):
        if issubclass(cls, MetamqError):
            yield cls


def over_the_wire(error: MetamqError) -> MetamqError:
    number, fields = encode_error(error)
    return decode_error(number, msgpack.unpackb(msgpack.packb(fields)))


def state(error: MetamqError) -> dict[str, Any]:
    return {**error.__dict__, "text": str(error), "retriable": error.retriable, "outcome": error.outcome}


def test_every_class_has_a_sample() -> None:
    assert {type(sample) for sample in SAMPLES + NOT_ENCODED} == set(classes())


@pytest.mark.parametrize("error", SAMPLES + NOT_ENCODED, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickling(error: MetamqError, protocol: int) -> None:
    error.args  # noqa: B018  # as raised
    copy = pickle.loads(pickle.dumps(error, protocol))
    assert type(copy) is type(error)
    assert copy.args == error.args
    assert state(copy) == state(error)
    assert [isinstance(copy, kind) for kind in (TimeoutError, BufferError)] == [
        isinstance(error, kind) for kind in (TimeoutError, BufferError)
    ]


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: type(error).__name__)
def test_round_trip(error: MetamqError) -> None:
    got = over_the_wire(error)
    if type(error) in NOT_ON_THE_WIRE:
        assert type(got) is MetamqError
    elif isinstance(error, errors.ForkedError | errors.WrongType):
        assert type(got) is errors.ConfigError  # the nearest that has a number
    else:
        assert type(got) is type(error)
    hint = {"hint": error.hint}
    assert {**hint, **state(error), "retriable": error.retriable} == {**hint, **state(got)}
    assert type(pickle.loads(pickle.dumps(got))) is type(got)


def test_a_class_of_another_module_travels_as_its_ancestor() -> None:
    class NotYetMaster(errors.Fenced):
        pass

    assert type(over_the_wire(NotYetMaster("broker 0", "starting"))) is errors.Fenced


def test_numbers_are_never_used_twice() -> None:
    assert {number: cls.__name__ for number, cls in status._NUMBERS.items()} == {
        2: "ProtocolError",
        3: "UnsupportedVersion",
        4: "ConfigError",
        5: "TopicNotFound",
        6: "PartitionNotFound",
        7: "MessageTooLarge",
        8: "NotEnoughReplicas",
        9: "Fenced",
        10: "SequenceGap",
        11: "OffsetOutOfRange",
        12: "CorruptData",
        13: "StorageError",
        14: "DiskFull",
        15: "TransactionError",
        16: "ClosedError",
        17: "Timeout",
        18: "OffsetDiverged",
        19: "RolledBack",
        20: "OutcomeUnknown",
        21: "BranchNotKnown",
        22: "HeuristicOutcome",
        23: "BranchMisuse",
        24: "TryLater",
        25: "TooManyOpenFiles",
        26: "AuthenticationFailed",
        27: "NotAuthorized",
        28: "ServerBusy",
    }
    assert (status.OK, status.UNKNOWN) == (0, 1)


def test_long_texts_are_cut() -> None:
    fields = encode_error(errors.TopicNotFound("t" * 1_000_000))[1]
    assert all(len(text) <= ERROR_TEXT_CHARS_MAX for text in fields.values() if isinstance(text, str))
    assert len(msgpack.packb(fields)) < 5 * ERROR_TEXT_CHARS_MAX


def test_texts_that_utf8_has_no_bytes_for() -> None:
    got = over_the_wire(errors.DiskFull("data/\udcff", 1, 2))
    assert isinstance(got, errors.DiskFull)
    assert got.path == "data/\\udcff"


def test_an_error_that_is_kept_keeps_no_request() -> None:
    """A full disk is one error for many requests; its traceback would grow with each, and hold their bodies."""
    kept = errors.DiskFull("data", 1, 2)
    for _ in range(3):
        try:
            raise kept
        except MetamqError as error:
            encode_error(error)
        assert kept.__traceback__ is None


@pytest.mark.parametrize(
    ("number", "fields"),
    [
        (5, None),
        (5, []),
        (5, {}),
        (5, {"problem": 1}),
        (5, "text"),
        (65_535, {"problem": "news"}),
        (5, {"problem": "p", 1: 2, b"b": 3, "args": (), "__class__": "x", "with_traceback": 1, "_x": 1}),
        (5, {"problem": "p", "retriable": "yes", "outcome": "maybe", "hint": None}),
        (5, {"problem": "p", "retriable": 1, "outcome": [], "hint": 7}),
    ],
)
def test_strange_fields(number: int, fields: Any) -> None:
    error = decode_error(number, fields)
    assert isinstance(error, MetamqError)
    assert isinstance(str(error), str)
    assert isinstance(error.retriable, bool)
    assert error.outcome in ("not_done", "unknown")
    assert isinstance(error.hint, str)
    assert error.with_traceback(None) is error
    assert type(pickle.loads(pickle.dumps(error))) is type(error)


def test_a_status_of_a_newer_release() -> None:
    error = decode_error(999, {"problem": "too warm", "hint": "Cool it.", "retriable": True, "outcome": "unknown"})
    assert type(error) is MetamqError
    assert (str(error), error.retriable, error.outcome) == ("too warm. Cool it.", True, "unknown")


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9) | st.binary(max_size=3), inner, max_size=4)
    ),
    max_leaves=10,
)


@settings(deadline=None, max_examples=examples(200))
@given(st.integers(0, 65_535), anything, st.booleans())
def test_decoding_never_raises(number: int, fields: Any, with_problem: bool) -> None:
    if with_problem and isinstance(fields, dict):
        fields["problem"] = "p"
    assert isinstance(str(decode_error(number, fields)), str)


COMMON = {"problem", "hint", "retriable", "outcome"}


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: type(error).__name__)
def test_the_document_names_the_fields(error: MetamqError) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "wire-protocol.md").read_text()
    number, fields = encode_error(error)
    row = re.search(rf"^\| {number} \| `\w+` \| (.*)\|$", text, re.MULTILINE)
    assert row is not None
    if number != status.UNKNOWN:  # which stands for classes with fields of their own, too
        assert set(re.findall(r"`(\w+)`", row[1])) == fields.keys() - COMMON
