"""Filters of messages: `--key PATTERN`, `--header NAME=PATTERN`, `--where 'PATH OP VALUE'`. All of them must match.

A PATTERN is compared with the whole key or header: `*` is any text, `?` any character, `[ab]` one of these. A condition
of `--where` looks into a value that is JSON:

    .customer.id == 7          the field `id` of the field `customer`; the first dot may be left out
    .lines[0].sku != "A1"      the first element of a list; text with or without quotes
    .note ~ urgent             text that contains `urgent`
    .amount >= 10.5            numbers with numbers, texts with texts

A message without the field, or with a value that is not JSON, does not match, whatever the operator is.
"""

from __future__ import annotations

import json
import operator
import os
import re
from collections.abc import Callable
from fnmatch import translate
from typing import Any, TypeVar

import click

from metamq.cli.show.units import PARTITION, Parsed
from metamq.client.model import Message

F = TypeVar("F", bound=Callable[..., Any])
Matches = Callable[[Message[bytes]], bool]

_MISSING = object()
_STEP = r"(?:\.?[^\s.\[\]=!<>~]+|\[\d+\])"
_CONDITION = re.compile(rf"\s*({_STEP}(?:\.[^\s.\[\]=!<>~]+|\[\d+\])*)\s*(==|!=|<=|>=|<|>|~)\s*(.*?)\s*", re.DOTALL)
_STEPS = re.compile(r"\[(\d+)\]|([^.\[\]]+)")
_ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_WRITE_IT = "write it like '.customer.id == 7'; operators: == != < <= > >= ~"


def parse_pattern(text: str) -> Callable[[bytes], object]:
    """Returns a function that matches a pattern with all of some bytes."""
    matches = re.compile(translate(os.fsencode(text).decode("utf-8", "surrogateescape"))).match
    return lambda data: matches(data.decode("utf-8", "surrogateescape"))


def parse_header(text: str) -> Matches:
    """Returns the filter of "NAME=PATTERN", or of "NAME" for a header with any value. Raises ValueError."""
    name, equals, pattern = text.partition("=")
    if not name:
        raise ValueError(f"{text!r} is not NAME=PATTERN")
    matches = parse_pattern(pattern if equals else "*")

    def has(message: Message[bytes]) -> bool:
        value = message.headers.get(name)
        return value is not None and matches(value) is not None

    return has


def parse_key(text: str) -> Matches:
    """Returns the filter of a pattern for keys."""
    matches = parse_pattern(text)
    return lambda message: message.key is not None and matches(message.key) is not None


def parse_condition(text: str) -> Matches:
    """Returns the filter of "PATH OP VALUE". Raises ValueError."""
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a condition: {_WRITE_IT}")
    path, name, wanted = found[1], found[2], _literal(found[3])
    steps = [int(index) if index else field for index, field in _STEPS.findall(path)]
    compare = _comparison(name, wanted, text)

    def holds(message: Message[bytes]) -> bool:
        try:
            value = json.loads(message.value)
        except (ValueError, RecursionError):
            return False
        value = _at(value, steps)
        return value is not _MISSING and compare(value)

    return holds


def _literal(text: str) -> Any:
    """Returns the JSON value that the text is; else the text."""
    if not text:
        raise ValueError(f"the condition has no value: {_WRITE_IT}")
    try:
        return json.loads(text)
    except ValueError:
        return text


def _comparison(name: str, wanted: Any, text: str) -> Callable[[Any], bool]:
    if name == "~":
        part = wanted if isinstance(wanted, str) else json.dumps(wanted)
        return lambda value: isinstance(value, str) and part in value
    if name in _ORDERS:
        if not isinstance(wanted, str) and not _is_number(wanted):
            raise ValueError(f"{text!r} needs a number or text: {_WRITE_IT}")
        order = _ORDERS[name]
        return lambda value: _is_number(value) == _is_number(wanted) and _is_ordered(value) and order(value, wanted)
    equal = name == "=="
    return lambda value: _same(value, wanted) == equal


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_ordered(value: Any) -> bool:
    return isinstance(value, str) or _is_number(value)


def _same(value: Any, wanted: Any) -> bool:
    """Returns True if two JSON values are equal; in Python also True == 1."""
    return isinstance(value, bool) == isinstance(wanted, bool) and bool(value == wanted)


def _at(value: Any, steps: list[Any]) -> Any:
    for step in steps:
        kind = list if isinstance(step, int) else dict
        if not isinstance(value, kind):
            return _MISSING
        try:
            value = value[step]
        except LookupError:
            return _MISSING
    return value


partition_option = click.option(
    "-p",
    "--partition",
    "chosen",
    type=PARTITION,
    multiple=True,
    metavar="PARTITION",
    help="Only this partition, such as 0-3; repeatable.",
)


def filter_options(command: F) -> F:
    """Adds the options that select messages. They arrive as `key`, `headers` and `conditions`, for all_of()."""
    for option in reversed((
        click.option("--key", type=Parsed("pattern", parse_key), metavar="PATTERN", help="Only messages whose key "
                     "matches, as 'customer-*'."),
        click.option("--header", "headers", type=Parsed("header", parse_header), multiple=True,
                     metavar="NAME=PATTERN", help="Only messages with a header that matches; repeatable."),
        click.option("--where", "conditions", type=Parsed("condition", parse_condition), multiple=True,
                     metavar="CONDITION", help="Only messages whose value is JSON for which this holds, as "
                     "'.customer.id == 7'; repeatable. Operators: == != < <= > >=, and ~ for contained text."),
    )):  # fmt: skip
        command = option(command)
    return command


def all_of(key: Matches | None, headers: tuple[Matches, ...], conditions: tuple[Matches, ...]) -> Matches | None:
    """Returns one filter for the options; None if none is given."""
    filters = [*([key] if key else []), *headers, *conditions]
    return (lambda message: all(matches(message) for matches in filters)) if filters else None
