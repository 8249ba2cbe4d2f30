"""Checks of arguments. An error names the argument, the required type, and the given value."""

from __future__ import annotations

import inspect
import reprlib
import threading
from collections.abc import Mapping
from typing import Any

from metamq.errors import ConfigError, WrongType
from metamq.words import measure, size
from metamq.zk.names import parse_partition
from metamq.zk.partitions import TopicPartition


def wrong_type(argument: str, wanted: str, value: object) -> WrongType:
    """Returns the error for an argument of a wrong type."""
    return WrongType(f"{argument} must be {wanted}, not {reprlib.repr(value)}")


def not_picklable(client: object) -> WrongType:
    """Returns the error for pickling a client: a client has connections and a loop of its process."""
    return WrongType(f"a {type(client).__name__} cannot be pickled", hint="Make it in the process that uses it.")


def check_timeout(name: str, value: object) -> None:
    """Raises ConfigError unless the value is a timeout in seconds or None. A negative timeout has expired already."""
    if value is not None and not is_number(value):
        raise wrong_type(f"`{name}`", "a number of seconds", value)
    if isinstance(value, int | float) and not value <= threading.TIMEOUT_MAX:
        raise ConfigError(f"`{name}` must be a number of seconds, or None to wait without limit, not {value!r}")


def check_seconds(name: str, value: object, *, optional: bool = True) -> None:
    """Raises ConfigError unless the value is a number of seconds, 0 or more. None is allowed if `optional`."""
    if not (value is None and optional) and not is_number(value):
        raise wrong_type(f"`{name}`", "a number of seconds", value)
    if isinstance(value, int | float) and not 0 <= value <= threading.TIMEOUT_MAX:
        raise ConfigError(f"`{name}` must be a number of seconds, 0 or more, not {value!r}")


def check_callables(**arguments: object) -> None:
    """Raises WrongType for the first argument that is neither None nor callable."""
    for name, value in arguments.items():
        if value is not None and not callable(value):
            raise wrong_type(f"`{name}`", "a callable", value)


def check_whole(name: str, value: object, low: int) -> None:
    """Raises ConfigError unless the value is a whole number, `low` or more."""
    if not is_whole(value) or value < low:  # type: ignore[operator]
        raise ConfigError(f"`{name}` must be a whole number, {low} or more, not {value!r}")


def check_ranges(owner: str, settings: object, limits: Mapping[str, tuple[Any, Any]], real: str = "") -> None:
    """Raises ConfigError for the first setting that is not a number within its limits.

    `real` lists the settings that may be fractions, separated by spaces.
    """
    for name, (low, high) in limits.items():
        value = getattr(settings, name)
        is_real = name in real.split()
        if not (is_number(value) if is_real else is_whole(value)) or not low <= value <= high:
            show = size if name.endswith("_bytes") and not is_real else "{:,}".format
            wanted = f"{measure(name, whole=not is_real)} from {show(low)} to {show(high)}"
            raise ConfigError(f"the {owner}'s `{name}` must be {wanted}, not {value!r}")


def is_number(value: object) -> bool:
    """Returns True for an int or a float, but not for a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: object) -> bool:
    """Returns True for an int, but not for a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def partition_of(value: Any) -> TopicPartition:
    """Returns the TopicPartition of a user's argument. Raises WrongType, or ConfigError for a wrong partition name.

    >>> partition_of(("orders", "0-3"))
    TopicPartition(topic='orders', partition='0-3')
    """
    is_pair = isinstance(value, tuple | list) and len(value) == 2
    if not is_pair or not all(isinstance(part, str) for part in value):
        raise wrong_type("a partition", "a TopicPartition or a pair like ('orders', '0-3')", value)
    parse_partition(value[1])
    return TopicPartition(*value)


def check_listener(value: object) -> None:
    """Raises WrongType unless run() can call the listener with a message. The body of a generator would not run."""
    if not callable(value):
        raise wrong_type("`listener`", "a callable that takes a message", value)
    kinds = inspect.isgeneratorfunction, inspect.isasyncgenfunction
    if any(is_one(one) for is_one in kinds for one in (value, type(value).__call__)):
        raise WrongType(
            f"`listener` must be a function without `yield`: no message would reach the code of {_name_of(value)}",
            hint="Write `return` for `yield`.",
        )


def check_plain_listener(value: object) -> None:
    """Checks like check_listener, and the listener must have finished its work when it returns."""
    check_listener(value)
    if any(map(inspect.iscoroutinefunction, (value, type(value).__call__))):
        raise awaitable_listener(value)


def awaitable_listener(value: object) -> WrongType:
    """Returns the error for a coroutine function as the listener of the blocking run()."""
    return WrongType(
        f"`listener` must be a plain function: the blocking run() does not await the result of {_name_of(value)}",
        hint="Use metamq.aio.Consumer, which awaits its listener, or make it a function without `async`.",
    )


def _name_of(function: object) -> str:
    return getattr(function, "__qualname__", None) or reprlib.repr(function)
