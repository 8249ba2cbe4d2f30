"""Unpacks headers into their named tuples, and checks each field as it is declared.

A header is a msgpack array, in the order of the fields of its named tuple: those of requests and responses are in
metamq.wire.commands, those of replication in metamq.wire.sync. The length of a list is checked before its entries.
"""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Callable
from itertools import chain
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from metamq.errors import ProtocolError
from metamq.wire.limits import ENTRIES_MAX, REQUEST_ENTRIES_MAX, AtMost

T = TypeVar("T")
Check = Callable[[Any], bool]


def _is(kind: Any) -> Check:
    if kind is int:
        return lambda value: type(value) is int
    return lambda value: isinstance(value, kind)


_CHECKS: dict[Any, Check] = {
    int: _is(int),
    str: _is(str),
    bool: _is(bool),
    bytes: _is(bytes),
    Any: lambda value: True,
    list[str]: lambda value: isinstance(value, list) and {*map(type, value)} <= {str},
    list[int]: lambda value: isinstance(value, list) and {*map(type, value)} <= {int},
    list[tuple[int, int]]: lambda value: (
        isinstance(value, list)
        and all(isinstance(v, list) and len(v) == 2 and type(v[0]) is int and type(v[1]) is int for v in value)
    ),
}


def _check_of(kind: Any) -> Check:
    return _CHECKS.get(kind) or _is(get_origin(kind))  # entries of other lists are unpacked one by one


def fields_of(cls: type[Any]) -> list[tuple[str, Any]]:
    """The fields of a header and their declared types, in order."""
    return list(get_type_hints(cls).items())


def entries_max_of(cls: type[Any]) -> dict[str, int]:
    """The maximum length of each list of a header. Raises TypeError if a list does not declare it."""
    found: dict[str, int] = {}
    for name, kind in get_type_hints(cls, include_extras=True).items():
        (limit,) = [extra for extra in getattr(kind, "__metadata__", ()) if isinstance(extra, AtMost)] or (None,)
        if limit is not None:
            found[name] = limit.entries
        elif (get_origin(kind) or kind) is list:
            raise TypeError(f"{cls.__name__}.{name} does not declare its maximum length")
    return found


@functools.cache
def _fields(cls: type[Any]) -> tuple[tuple[str, Any, Check, int | None], ...]:
    """The name, type and check of each field, and the maximum length if it is a list."""
    limits = entries_max_of(cls)
    return tuple((name, kind, _check_of(kind), limits.get(name)) for name, kind in fields_of(cls))


class _Anything:
    """Equals every type."""

    def __eq__(self, other: object) -> bool:
        return True


_ANYTHING = _Anything()
_made: Callable[..., Any] = tuple.__new__
"""Makes a named tuple of as many values as it has fields."""


@functools.cache
def _types(cls: type[Any]) -> tuple[list[Any], tuple[tuple[int, Check, int], ...]]:
    """The types of a header that has exactly the declared fields, and its lists with their places."""
    kinds = [kind for _name, kind in fields_of(cls)]
    fields = _fields(cls)  # type: ignore[arg-type]  # classes are hashable
    lists = tuple((at, check, limit) for at, (*_, check, limit) in enumerate(fields) if limit is not None)
    return [_ANYTHING if kind is Any else get_origin(kind) or kind for kind in kinds], lists


def unpack(cls: type[T], header: Any) -> T:
    """Unpacks a header, or one entry of a list, into its named tuple. Raises ProtocolError."""
    types, lists = _types(cls)  # type: ignore[arg-type]  # classes are hashable
    as_declared = type(header) is list and list(map(type, header)) == types
    if as_declared and not [at for at, check, limit in lists if len(header[at]) > limit or not check(header[at])]:
        made: T = _made(cls, header)  # most headers are as declared, and this takes a third of the time
        return made
    fields = _fields(cls)  # type: ignore[arg-type]
    added: dict[str, Any] = cls._field_defaults  # type: ignore[attr-defined]
    if not isinstance(header, list) or len(header) < len(fields) - len(added):
        raise ProtocolError(f"{cls.__name__} has {len(fields)} fields, got {reprlib.repr(header)}")
    for value, (name, kind, check, limit) in zip(header, fields, strict=False):
        if limit is not None and isinstance(value, list) and len(value) > limit:
            raise ProtocolError(f"{cls.__name__}.{name} has {len(value):,} entries, the limit is {limit:,}")
        if not check(value):
            raise ProtocolError(f"{cls.__name__}.{name} must be {kind}, got {reprlib.repr(value)}")
    return cls(*header[: len(fields)])


def unpack_list(cls: type[T], header: Any) -> list[T]:
    """Unpacks a list of entries. Raises ProtocolError."""
    if not isinstance(header, list):
        raise ProtocolError(f"a list of {cls.__name__} is expected, got {reprlib.repr(header)}")
    if len(header) > REQUEST_ENTRIES_MAX:
        raise ProtocolError(f"{len(header):,} entries of {cls.__name__} are over the limit of {REQUEST_ENTRIES_MAX:,}")
    types, lists = _types(cls)  # type: ignore[arg-type]  # classes are hashable
    if lists:
        return [unpack(cls, entry) for entry in header]
    return [
        _made(cls, entry) if type(entry) is list and [*map(type, entry)] == types else unpack(cls, entry)
        for entry in header
    ]


# Frames of replication are frequent, so unpack_frame() replaces unpack(). It checks the range of numbers as well.

F = TypeVar("F", bound=tuple[Any, ...])
_NUMBER_MAX = (1 << 63) - 1
_INT, _LIST = {int}, {list}


def unpack_frame(cls: type[F], header: Any) -> F:
    """Unpacks a frame of replication, or an entry of one, into its named tuple. Raises ProtocolError."""
    checks = _frame_checks(cls)
    if type(header) is not list or len(header) < len(checks):
        raise ProtocolError(f"{cls.__name__} has {len(checks)} fields, got {reprlib.repr(header)}")
    for value, (name, kind, check) in zip(header, checks, strict=False):
        if not check(value):
            what = f"{cls.__name__}.{name}"
            if isinstance(value, list) and len(value) > ENTRIES_MAX:
                raise ProtocolError(f"{what} has {len(value):,} entries, the limit is {ENTRIES_MAX:,}")
            raise ProtocolError(f"{what} must be {kind}, with numbers from 0 to 2^63-1, got {reprlib.repr(value)}")
    made: F = cls._make(header[: len(checks)])  # type: ignore[attr-defined]
    return made


@functools.cache
def _frame_checks(cls: type[Any]) -> tuple[tuple[str, Any, Check], ...]:
    return tuple((name, kind, _frame_check_of(kind)) for name, kind in fields_of(cls))


def _frame_check_of(kind: Any) -> Check:
    if kind is int:
        return lambda value: type(value) is int and 0 <= value <= _NUMBER_MAX
    if kind is str or kind is bool:
        return lambda value: type(value) is kind
    (inner,) = get_args(kind)
    if inner is int:
        return lambda value: _is_short_list(value) and (not value or _are_numbers(value))
    if get_origin(inner) is tuple:
        return _is_list_of_rows(len(get_args(inner)))
    return _is_short_list  # of named tuples, which are checked one by one


def _is_short_list(value: Any) -> bool:
    return type(value) is list and len(value) <= ENTRIES_MAX


def _are_numbers(values: list[Any]) -> bool:
    return set(map(type, values)) == _INT and min(values) >= 0 and max(values) <= _NUMBER_MAX


def _is_list_of_rows(count: int) -> Check:
    lengths = {count}

    def check(value: Any) -> bool:
        if not value or not _is_short_list(value):
            return type(value) is list and not value
        if set(map(type, value)) != _LIST or set(map(len, value)) != lengths:
            return False
        return _are_numbers(list(chain.from_iterable(value)))

    return check
