"""Errors over the wire: a status number for the class, a map for its fields.

The numbers are part of the protocol and never reused. A status this release does not know becomes a MetamqError
with the peer's own words.
"""

from __future__ import annotations

from typing import Any

from metamq import errors
from metamq.errors import MetamqError

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
}
_BY_CLASS = {cls: number for number, cls in _NUMBERS.items()}
_PLAIN = (str, int, float, bool, type(None))


def encode_error(error: MetamqError) -> tuple[int, dict[str, Any]]:
    """(status, fields) of an error; fields that msgpack has no type for stay behind."""
    fields = {name: value for name, value in error.__dict__.items() if isinstance(value, _PLAIN)}
    fields["retriable"] = error.retriable
    fields["outcome"] = error.outcome
    fields["hint"] = error.hint
    return _BY_CLASS.get(type(error), UNKNOWN), fields


def decode_error(status: int, fields: Any) -> MetamqError:
    """The error that the peer raised. Never raises: strange fields give an error that shows them."""
    cls = _NUMBERS.get(status, MetamqError)
    if not isinstance(fields, dict) or not isinstance(fields.get("problem"), str):
        return MetamqError(f"the broker answered with status {status}: {fields!r}")
    error = cls.__new__(cls)
    error.args = (fields["problem"],)
    error.__dict__.update({name: value for name, value in fields.items() if isinstance(name, str)})
    return error
