"""JSON documents in znodes: only this module reads them, within limits, by fields of known types.

Any client of ZooKeeper can write a node, and an unreadable node must affect only its own subject. So this module raises
only CorruptData, whatever the bytes are: no UTF-8, no JSON, nested a hundred thousand levels deep, numbers of a
thousand digits, lists instead of texts. The reader of a node then decides what to skip.
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
"""The limit on a document: above ZooKeeper's default limit on a node, which can be raised."""
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
    """Returns the result of `read` on the JSON object in `data`; `what` names the node in errors.

    Raises CorruptData if the bytes are not a JSON object, or if `read` fails on them, and any MetamqError of `read`.
    """
    try:
        return read(parse(data, bytes_max))
    except _WRONG as error:
        reason = f"{type(error).__name__}: {error}"
        raise CorruptData(what, reason[:_SHOWN_CHARS], hint=hint) from None


def parse(data: bytes, bytes_max: int = DOCUMENT_BYTES_MAX) -> dict[str, Any]:
    """Parses a JSON object. Raises ValueError."""
    if len(data) > bytes_max:
        raise ValueError(f"it has {len(data):,} bytes, the limit is {bytes_max:,}")
    _check_depth(data)
    document = _DECODER.decode(data.decode())
    if not isinstance(document, dict):
        raise ValueError(f"it is a {type(document).__name__}, not an object")
    return document


def _check_depth(data: bytes) -> None:
    """Checks the depth before parsing, which recurses. Text that is not JSON may pass: the parser refuses it."""
    if data.count(b"{") + data.count(b"[") <= DEPTH_MAX:
        return
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
    raise ValueError(f"{constant} is not a number")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def number(value: Any, low: int = 0, high: int = NUMBER_MAX) -> int:
    """Checks a whole number and its limits. Raises ValueError."""
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{shown(value)} is not a whole number from {low:,} to {high:,}")
    return value


def text(value: Any, chars_max: int = TEXT_CHARS_MAX) -> str:
    """Checks a text. Raises ValueError."""
    if not isinstance(value, str) or len(value) > chars_max:
        raise ValueError(f"{shown(value)} is not a text of at most {chars_max:,} characters")
    return value


def texts(value: Any) -> tuple[str, ...]:
    """Checks a list of texts. Raises ValueError."""
    return tuple(text(item) for item in items(value))


def items(value: Any) -> list[Any]:
    """Checks a list. Raises ValueError."""
    if not isinstance(value, list):
        raise ValueError(f"{shown(value)} is not a list")
    return value


def fields(value: Any) -> Mapping[str, Any]:
    """Checks an object. Raises ValueError."""
    if not isinstance(value, dict):
        raise ValueError(f"{shown(value)} is not an object")
    return value


@contextlib.contextmanager
def skip_unreadable(what: str) -> Iterator[None]:
    """Skips a document that cannot be read, and logs each reason once."""
    try:
        yield
    except CorruptData as error:
        if (noted := _noted.get()) is not None:
            noted.append(error)
        else:
            warn_once(f"{what}: {error}")


@contextlib.contextmanager
def collect_skipped() -> Iterator[list[CorruptData]]:
    """Collects the errors of skipped documents in this task, and in tasks that it starts, instead of logging them."""
    found: list[CorruptData] = []
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


@lru_cache(maxsize=1000)
def warn_once(words: str) -> None:
    """Logs a warning, unless it was logged before."""
    log.warning("%s", words)


def broker_numbers(names: Iterable[str]) -> list[int]:
    """The broker ids among names of nodes, in order."""
    return sorted(int(name) for name in names if _BROKER_ID.fullmatch(name))


def broker_number(name: str) -> int:
    """Parses a broker id, the name of a field or a node. Raises ValueError."""
    if not _BROKER_ID.fullmatch(name):
        raise ValueError(f"{shown(name)} is not a broker id")
    return int(name)


def shown(value: Any) -> str:
    """Formats a value of any type for an error."""
    try:
        return repr(value)[:60]
    except ValueError:  # a number too long to be written
        return "a number"
