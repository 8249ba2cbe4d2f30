"""The commands and the headers of their requests and responses.

Headers are msgpack arrays in the order of the fields here; a receiver takes more fields than it knows, so that a
field can be added at the end. One that was added has a default, for peers that do not send it. Each list declares how
long it may be, with the field, and `unpack` looks at that before anything else of it. It raises ProtocolError on all
that is not as declared. docs/wire-protocol.md has the tables and the bytes.
"""

from __future__ import annotations

import enum
import functools
import reprlib
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, TypeVar, get_origin, get_type_hints

from metamq.errors import ProtocolError
from metamq.wire.limits import REQUEST_ENTRIES_MAX, AtMost

T = TypeVar("T")


class Command(enum.IntEnum):
    """What a request asks for. The numbers from 11 on are kept for administration."""

    HELLO = 1
    AUTHENTICATE = 2  # the step after HELLO; no mechanism is defined yet, brokers of this release refuse it
    PUT = 3
    GET = 4
    SYNC = 5  # replication: metamq.wire.sync
    OFFSETS = 6
    STATS = 7
    PROMOTE = 8
    TX = 9  # metamq.wire.tx_commands, as the next
    BRANCHES = 10


Entries = AtMost(REQUEST_ENTRIES_MAX)

EARLIEST = -2
LATEST = -1


class Hello(NamedTuple):
    """The first request on a connection: what the client speaks, and who it is."""

    version_min: int
    version_max: int
    client: str


class HelloReply(NamedTuple):
    """What the broker chose and is. The limits are the ones it was configured with."""

    version: int
    broker_id: int
    epoch: int
    message_bytes_max: int
    batch_bytes_max: int
    frame_bytes_max: int
    server: str


class Promote(NamedTuple):
    """Asks a slave to become the master. With `accept_loss` also one that is not in sync. Answered by a Promoted."""

    accept_loss: bool


class Promoted(NamedTuple):
    """The slave is the master now."""

    epoch: int
    generation: int


class PutEntry(NamedTuple):
    """One batch of a PUT: its place, and its size in the body. The batches stand in the entries' order."""

    topic: str
    topic_id: str
    partition: int
    """The index in this broker: 3 for partition "0-3"."""
    size: int


class PutResult(NamedTuple):
    """What became of one entry: status OK, or the error's status and fields."""

    status: int
    base_offset: int
    append_time_us: int
    error: Any


class GetPartition(NamedTuple):
    """Names a partition in the fetch session; the handle is the client's choice and stands for it from then on."""

    handle: int
    topic: str
    topic_id: str
    partition: int
    epoch: int = -1
    """Of the message before the offset that it is armed with first; -1: not known. The broker looks whether its log has
    the same up to there (OffsetDiverged)."""
    in_place: bool = False
    """Whether the reader would rather read a file of the broker's itself, where it can: it may be on its machine."""


class Get(NamedTuple):
    """One long poll of the connection's fetch session; only changes are sent.

    A partition is *armed* with the offset to read from, is answered once, and is then idle until it is armed again.
    The request is answered as soon as `bytes_min` bytes have come for armed partitions, or one of them fails, or after
    `wait_ms`. Bytes count from a partition's last answer on; data that lay there before is enough by itself. A further
    GET on the connection answers a parked one at once, with nothing, and goes on with all that is armed: so a parked
    poll is amended. A GET that is refused changes nothing.
    """

    wait_ms: int
    bytes_min: int
    bytes_max: int
    partition_bytes_max: int
    opened: Annotated[list[GetPartition], Entries]
    armed: Annotated[list[tuple[int, int]], Entries]
    """(handle, offset)."""
    closed: Annotated[list[int], Entries]
    """Handles to forget; a handle is not used twice on a connection."""


class GetResult(NamedTuple):
    """What one armed partition had. The batches stand in the body in the order of the results.

    The first batch may begin before the offset asked for, and the last may be incomplete: the receiver drops both.
    """

    handle: int
    status: int
    size: int
    start_offset: int
    stable_offset: int
    """The end of what can be read now; the lag is the distance to it."""
    error: Any
    preferred_replica: int = -1
    """The replica that had better be asked next, -1: this one. Only a hint, to readers that take slaves."""
    file: Any = None
    """Where the batches lie, a FilePlace: there are `size` bytes of them there, and none in the body."""


class FilePlace(NamedTuple):
    """Bytes of a file on the broker's machine. Device and inode tell whether a file of that path is the one meant."""

    path: str
    device: int
    inode: int
    at: int
    epoch: int
    """Of the log's last batch. One of a later epoch has come since: in the place of others, if a loss was accepted."""


class OffsetsEntry(NamedTuple):
    """Asks one partition for an offset: EARLIEST, LATEST, or that of the first message at a time (microseconds)."""

    topic: str
    topic_id: str
    partition: int
    timestamp_us: int
    offset: int = -1
    """Where the asker has come to, -1: nowhere. What of the log is behind is told by epochs, by a master only."""
    epoch: int = -1
    """Of the message before that; -1: not known. The broker looks whether its log has the same up to there
    (OffsetDiverged)."""
    damaged: int = -1
    """An offset whose batch came damaged from here; -1: none. The broker verifies what it has; the answer does not wait
    for that."""


class Stats(NamedTuple):
    """Asks for figures of the partitions from this one on, in the order of topics and indexes."""

    topic: str
    partition: int


class OffsetsResult(NamedTuple):
    """The offset, and its message's timestamp where it was asked for by time (-1 where there is none).

    `epoch` is that of the message before the offset; -1 where there is none.
    """

    status: int
    offset: int
    timestamp_us: int
    start_offset: int
    stable_offset: int
    epoch: int
    error: Any
    epochs: Annotated[list[tuple[int, int]], Entries]
    """(epoch, where it ends) of what can be read from the asker's offset on: so many, in order."""


def _is(kind: type) -> Callable[[Any], bool]:
    if kind is int:
        return lambda value: type(value) is int
    return lambda value: isinstance(value, kind)


_CHECKS: dict[Any, Callable[[Any], bool]] = {
    int: _is(int),
    str: _is(str),
    bool: _is(bool),
    Any: lambda value: True,
    list[int]: lambda value: isinstance(value, list) and {*map(type, value)} <= {int},
    list[tuple[int, int]]: lambda value: (
        isinstance(value, list)
        and all(isinstance(v, list) and len(v) == 2 and type(v[0]) is int and type(v[1]) is int for v in value)
    ),
    list[GetPartition]: _is(list),
    list[Any]: _is(list),
}


def fields_of(cls: type[Any]) -> list[tuple[str, Any]]:
    """The fields of a header and their declared kinds, in order."""
    return list(get_type_hints(cls).items())


def entries_max_of(cls: type[Any]) -> dict[str, int]:
    """How many entries each list of a header has at most. Raises TypeError for a list that does not declare it."""
    found: dict[str, int] = {}
    for name, kind in get_type_hints(cls, include_extras=True).items():
        (limit,) = [extra for extra in getattr(kind, "__metadata__", ()) if isinstance(extra, AtMost)] or (None,)
        if limit is not None:
            found[name] = limit.entries
        elif (get_origin(kind) or kind) is list:
            raise TypeError(f"{cls.__name__}.{name} does not declare how long it may be")
    return found


Check = Callable[[Any], bool]


@functools.cache
def _fields(cls: type[Any]) -> tuple[tuple[str, Any, Check, int | None], ...]:
    """Of each field its name, its kind, a check of it, and how many entries it has at most where it is a list."""
    limits = entries_max_of(cls)
    return tuple((name, kind, _CHECKS[kind], limits.get(name)) for name, kind in fields_of(cls))


@functools.cache
def _types(cls: type[Any]) -> tuple[list[Any], tuple[tuple[int, Check, int], ...]]:
    """What a header consists of that has all fields, and nothing else; and by place, its lists."""
    kinds = [kind for _name, kind in fields_of(cls)]
    fields = _fields(cls)  # type: ignore[arg-type]  # classes are hashable
    lists = tuple((at, check, limit) for at, (*_, check, limit) in enumerate(fields) if limit is not None)
    return [get_origin(kind) or kind for kind in kinds], lists


def unpack(cls: type[T], header: Any) -> T:
    """A header, or one entry of a list of them, as its named tuple. Raises ProtocolError."""
    types, lists = _types(cls)  # type: ignore[arg-type]  # classes are hashable
    as_declared = type(header) is list and list(map(type, header)) == types
    if as_declared and not [at for at, check, limit in lists if len(header[at]) > limit or not check(header[at])]:
        return cls(*header)  # most are so, and it takes half the time
    fields = _fields(cls)  # type: ignore[arg-type]
    added: dict[str, Any] = cls._field_defaults  # type: ignore[attr-defined]
    if not isinstance(header, list) or len(header) < len(fields) - len(added):
        raise ProtocolError(f"{cls.__name__} has {len(fields)} fields, got {reprlib.repr(header)}")
    for value, (name, kind, check, limit) in zip(header, fields, strict=False):
        if limit is not None and isinstance(value, list) and len(value) > limit:
            raise ProtocolError(f"{cls.__name__}.{name} has {len(value):,} entries, the limit is {limit:,}")
        if not check(value):
            raise ProtocolError(f"{cls.__name__}.{name} is to be {kind}, got {reprlib.repr(value)}")
    return cls(*header[: len(fields)])


def unpack_list(cls: type[T], header: Any) -> list[T]:
    """A list of entries. Raises ProtocolError."""
    if not isinstance(header, list):
        raise ProtocolError(f"a list of {cls.__name__} is expected, got {reprlib.repr(header)}")
    if len(header) > REQUEST_ENTRIES_MAX:
        raise ProtocolError(f"{len(header):,} entries of {cls.__name__} are over the limit of {REQUEST_ENTRIES_MAX:,}")
    return [unpack(cls, entry) for entry in header]
