"""What stands in znodes, as JSON: read here and nowhere else, within limits, by fields of known types.

Anybody who reaches ZooKeeper can write a node, and one that makes no sense is to harm nobody but what it is about. So
nothing but CorruptData comes out of here, whatever the bytes are: no UTF-8, no JSON, nested a hundred thousand deep,
numbers of a thousand digits, lists where texts are due. Who reads a node decides what is passed over then.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, TypeVar

from metamq.errors import CorruptData

log = logging.getLogger("metamq.zk")

T = TypeVar("T")

DOCUMENT_BYTES_MAX = 1 << 20
"""More than ZooKeeper gives to a node by itself; it can be told to give more."""
DEPTH_MAX = 16
NUMBER_MAX = (1 << 63) - 1
TEXT_CHARS_MAX = 4096
_BROKER_ID = re.compile(r"0|[1-9][0-9]{0,8}")
_TEXTS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_PAIRS = re.compile(rb"\[\]|\{\}")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_WRONG = (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError, RecursionError)
_SHOWN_CHARS = 200
_noted: ContextVar[list[CorruptData] | None] = ContextVar("noted", default=None)


def read_document(
    what: str,
    data: bytes,
    read: Callable[[dict[str, Any]], T],
    *,
    hint: str | None = None,
    bytes_max: int = DOCUMENT_BYTES_MAX,
) -> T:
    """What `read` makes of the JSON object in `data`; `what` names the node in errors.

    Raises CorruptData where the bytes are none, or `read` stumbles over them, and any MetamqError of `read`.
    """
    try:
        return read(parse(data, bytes_max))
    except _WRONG as error:
        reason = f"{type(error).__name__}: {error}"
        raise CorruptData(what, reason[:_SHOWN_CHARS], hint=hint) from None


def parse(data: bytes, bytes_max: int = DOCUMENT_BYTES_MAX) -> dict[str, Any]:
    """The JSON object. Raises ValueError."""
    if len(data) > bytes_max:
        raise ValueError(f"it has {len(data):,} bytes, the limit is {bytes_max:,}")
    _check_depth(data)
    document = json.loads(data.decode(), parse_constant=_refuse)
    if not isinstance(document, dict):
        raise ValueError(f"it is a {type(document).__name__}, not an object")
    return document


def _check_depth(data: bytes) -> None:
    """Before it is parsed, which recurses. What is no JSON at all may pass: the parser finds that."""
    brackets = _TEXTS.sub(b"", data).translate(None, _NO_BRACKETS)
    for _ in range(DEPTH_MAX):
        if not brackets:
            return
        before, brackets = brackets, _PAIRS.sub(b"", brackets)
        if brackets == before:
            break
    if brackets:
        raise ValueError(f"its brackets are nested deeper than {DEPTH_MAX}, or do not match")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def number(value: Any, low: int = 0, high: int = NUMBER_MAX) -> int:
    """A whole number within the limits. Raises ValueError."""
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{shown(value)} is no whole number from {low:,} to {high:,}")
    return value


def text(value: Any, chars_max: int = TEXT_CHARS_MAX) -> str:
    """A text. Raises ValueError."""
    if not isinstance(value, str) or len(value) > chars_max:
        raise ValueError(f"{shown(value)} is no text of at most {chars_max:,} characters")
    return value


def texts(value: Any) -> tuple[str, ...]:
    """A list of texts. Raises ValueError."""
    return tuple(text(item) for item in items(value))


def items(value: Any) -> list[Any]:
    """A list. Raises ValueError."""
    if not isinstance(value, list):
        raise ValueError(f"{shown(value)} is no list")
    return value


def fields(value: Any) -> Mapping[str, Any]:
    """An object. Raises ValueError."""
    if not isinstance(value, dict):
        raise ValueError(f"{shown(value)} is no object")
    return value


@contextlib.contextmanager
def passing_over(what: str) -> Iterator[None]:
    """Goes on without what cannot be read, and says so: once for each reason."""
    try:
        yield
    except CorruptData as error:
        if (noted := _noted.get()) is not None:
            noted.append(error)
        else:
            say_once(f"{what}: {error}")


@contextlib.contextmanager
def noting() -> Iterator[list[CorruptData]]:
    """Collects what is passed over by this task, and by those it starts, instead of saying it."""
    found: list[CorruptData] = []
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


@lru_cache(maxsize=1000)
def say_once(words: str) -> None:
    """A warning, unless it was given before."""
    log.warning("%s", words)


def broker_numbers(names: Iterable[str]) -> list[int]:
    """The broker ids among the names of nodes, in order."""
    return sorted(int(name) for name in names if _BROKER_ID.fullmatch(name))


def broker_number(name: str) -> int:
    """A broker id as the name of a field or a node. Raises ValueError."""
    if not _BROKER_ID.fullmatch(name):
        raise ValueError(f"{shown(name)} is no broker id")
    return int(name)


def shown(value: Any) -> str:
    """A value of any kind, for an error."""
    try:
        return repr(value)[:60]
    except ValueError:  # a number too long to be written
        return "a number"
