"""Errors over the wire: a status number for the class, a map for its fields.

The numbers are part of the protocol and never reused. A status that this release does not know becomes a MetamqError
with the peer's own text.
"""

from __future__ import annotations

import reprlib
from typing import Any

from metamq import errors
from metamq.errors import MetamqError
from metamq.wire.limits import ERROR_TEXT_CHARS_MAX

OK = 0
UNKNOWN = 1

_NUMBERS: dict[int, type[MetamqError]] = {
    2: errors.ProtocolError,
    3: errors.UnsupportedVersion,
    4: errors.ConfigError,
    5: errors.TopicNotFound,
    6: errors.PartitionNotFound,
    7: errors.MessageTooLarge,
    8: errors.NotEnoughReplicas,
    9: errors.Fenced,
    10: errors.SequenceGap,
    11: errors.OffsetOutOfRange,
    12: errors.CorruptData,
    13: errors.StorageError,
    14: errors.DiskFull,
    15: errors.TransactionError,
    16: errors.ClosedError,
    17: errors.Timeout,
    18: errors.OffsetDiverged,
    19: errors.RolledBack,
    20: errors.OutcomeUnknown,
    21: errors.BranchNotKnown,
    22: errors.HeuristicOutcome,
    23: errors.BranchMisuse,
    24: errors.TryLater,
    25: errors.TooManyOpenFiles,
    26: errors.AuthenticationFailed,
    27: errors.NotAuthorized,
    28: errors.ServerBusy,
}
_BY_CLASS = {cls: number for number, cls in _NUMBERS.items()}
_PLAIN = (str, int, float, bool, type(None))
_OUTCOMES = ("not_done", "unknown")


def encode_error(error: MetamqError) -> tuple[int, dict[str, Any]]:
    """(status, fields) of an error. Fields without a msgpack type are dropped; long texts are cut.

    A class without a number is sent as its nearest ancestor with one. Drops the error's traceback: a broker may raise
    the same error for many requests, for example on a full disk. The traceback would otherwise collect the frames, and
    with them the bodies, of all refused requests.
    """
    error.__traceback__ = None
    fields = {name: _plain(value) for name, value in error.__dict__.items() if _is_plain(value)}
    fields["retriable"] = error.retriable
    fields["outcome"] = error.outcome
    fields["hint"] = _plain(error.hint)
    number = next((_BY_CLASS[cls] for cls in type(error).__mro__ if cls in _BY_CLASS), UNKNOWN)
    return number, fields


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(item, _PLAIN) for item in value))


def _plain(value: Any) -> Any:
    if isinstance(value, str):  # a path may have characters that UTF-8 cannot encode
        return value[:ERROR_TEXT_CHARS_MAX].encode("utf-8", "backslashreplace").decode()
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def decode_error(status: int, fields: Any) -> MetamqError:
    """The error that the peer raised. Never raises: unexpected fields give an error that shows them."""
    cls = _NUMBERS.get(status, MetamqError)
    if not isinstance(fields, dict) or not isinstance(fields.get("problem"), str):
        return MetamqError(f"the broker answered with status {status}: {reprlib.repr(fields)}")
    known = {name: value for name, value in fields.items() if _is_sound(name, value)}
    error = cls.__new__(cls)
    error.args = (fields["problem"],)
    error.__dict__.update({name: tuple(value) if isinstance(value, list) else value for name, value in known.items()})
    return error


def _is_sound(name: Any, value: Any) -> bool:
    """True if a field may be set; else the class's own value stays."""
    if name == "retriable":
        return isinstance(value, bool)
    if name == "outcome":
        return value in _OUTCOMES
    if name == "hint":
        return isinstance(value, str)
    return isinstance(name, str) and not name.startswith("_") and not hasattr(Exception, name)
