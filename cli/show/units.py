"""Values with units, parsed and formatted: 7d, 1GiB, 1000/500ms, @2026-11-01T00:00."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import click

from metamq.client.model import time_of, timestamp_us
from metamq.errors import ConfigError
from metamq.zk.cluster.topics import Flush, FlushEvery
from metamq.zk.names import check_group, check_node, check_topic, is_pattern, parse_partition

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    _ParamType = click.ParamType[Any]
else:  # not generic at run time in every click
    _ParamType = click.ParamType

MS = {"ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 7 * 86_400_000}
SIZES = {
    "": 1, "b": 1,
    "k": 1000, "kb": 1000, "m": 1000**2, "mb": 1000**2, "g": 1000**3, "gb": 1000**3, "t": 1000**4, "tb": 1000**4,
    "ki": 1024, "kib": 1024, "mi": 1024**2, "mib": 1024**2, "gi": 1024**3, "gib": 1024**3,
    "ti": 1024**4, "tib": 1024**4,
}  # fmt: skip
UNLIMITED_WORDS = {"forever", "for-ever", "never", "none", "unlimited"}
UNLIMITED = "unlimited"
"""The value of an option without a limit. None means that the option was not given."""

_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")


def parse_ms(text: str) -> int:
    """Returns the milliseconds of "7d", "90s", "500ms". Raises ValueError."""
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or match[2].lower() not in MS:
        raise ValueError(f"{text!r} is not a time: write it like 500ms, 90s, 10m, 12h, 7d or 2w")
    return round(float(match[1]) * MS[match[2].lower()])


def parse_bytes(text: str) -> int:
    """Returns the bytes of "1GiB", "64 MB", "1000". Raises ValueError."""
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or match[2].lower() not in SIZES:
        raise ValueError(f"{text!r} is not a size: write it like 1000, 64KiB, 10MB or 1GiB")
    return round(float(match[1]) * SIZES[match[2].lower()])


def parse_flush(text: str) -> Flush:
    """Parses "ack", "1000" messages, "500ms", "1000/500ms" (whichever comes first), "never". Raises ValueError."""
    lowered = text.strip().lower()
    if lowered == "ack":
        return "ack"
    if lowered in UNLIMITED_WORDS:
        return FlushEvery(messages=None, ms=None)
    messages, ms = None, None
    for part in lowered.split("/"):
        if part.strip().isdecimal():
            messages = int(part)
        else:
            try:
                ms = parse_ms(part)
            except ValueError:
                raise ValueError(
                    f"{text!r} is not a flush policy: write ack (before each acknowledgement), 1000 (messages), "
                    "500ms, 1000/500ms (whichever comes first) or never"
                ) from None
    return FlushEvery(messages=messages, ms=ms)


def parse_time(text: str) -> datetime:
    """Returns the aware datetime of "2026-11-01T00:00", "-1h" or microseconds since 1970. Raises ValueError.

    A time without a zone is local. `consume -o json` prints microseconds.
    """
    if text.startswith("-"):
        return datetime.fromtimestamp(datetime.now().timestamp() - parse_ms(text[1:]) / 1000).astimezone()
    try:
        if re.fullmatch(r"\d{15,}", text):
            return time_of(timestamp_us(int(text)) or 0)
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise ValueError(
            f"{text!r} is not a time: write it like 2026-11-01, 2026-11-01T13:30, 2026-11-01T13:30Z or -1h"
        ) from None


def parse_place(text: str) -> Literal["earliest", "latest"] | datetime | int:
    """Parses a place in a log: earliest, latest, @TIME, OFFSET, or -N for N before the end. Raises ValueError."""
    if text in ("earliest", "beginning", "start"):
        return "earliest"
    if text in ("latest", "end"):
        return "latest"
    if text.startswith("@"):
        return parse_time(text[1:])
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    forms = "earliest, latest, an offset, -10 for the last ten, or @2026-11-01T00:00"
    raise ValueError(f"{text!r} is not a place in a log: write {forms}")


def parse_broker(text: str) -> int:
    """Returns a broker id. Raises ValueError."""
    if not re.fullmatch(r"\d{1,5}", text):
        raise ValueError(f"{text!r} is not a broker id: write a whole number, such as 0")
    return int(text)


def parse_partition_name(text: str) -> str:
    """Returns the name of a partition, as "0-3". Raises ConfigError."""
    parse_partition(text)
    return text


_AS_WRITTEN = "metamq.as_written"


def as_written(parameter: click.Parameter) -> str | None:
    """Returns the text of a Parsed parameter in the command line; None if it was not given."""
    texts: dict[str | None, str] = click.get_current_context().meta.get(_AS_WRITTEN, {})
    return texts.get(parameter.name)


class Parsed(_ParamType):
    """A parameter type with a parser; ValueError and ConfigError of the parser are usage errors.

    A shell completes the values of a type that metamq.cli.completion knows by its name.
    """

    def __init__(self, name: str, parse: Any) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        if ctx is not None and param is not None:
            ctx.meta.setdefault(_AS_WRITTEN, {})[param.name] = value
        try:
            return self._parse(value)
        except (ConfigError, ValueError) as error:
            self.fail(str(error), param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Returns the names that begin with `incomplete`."""
        from metamq.cli.completion import complete

        return complete(self.name, ctx, incomplete)


def _or_unlimited(parse: Any) -> Any:
    def convert(text: str) -> Any:
        return UNLIMITED if text.strip().lower() in UNLIMITED_WORDS else parse(text)

    return convert


DURATION = Parsed("time", parse_ms)
SIZE = Parsed("size", parse_bytes)
DURATION_OR_UNLIMITED = Parsed("time", _or_unlimited(parse_ms))
SIZE_OR_UNLIMITED = Parsed("size", _or_unlimited(parse_bytes))
FLUSH = Parsed("policy", parse_flush)
PLACE = Parsed("place", parse_place)
TOPIC = Parsed("topic", check_topic)
TOPIC_PATTERN = Parsed("topic", lambda text: text if is_pattern(text) else check_topic(text))
NEW_TOPIC = Parsed("new topic", check_topic)
PARTITION = Parsed("partition", parse_partition_name)
BROKER = Parsed("broker", parse_broker)
GROUP = Parsed("group", check_group)
EXISTING_TOPIC = Parsed("topic", partial(check_node, "topic"))
EXISTING_GROUP = Parsed("group", partial(check_node, "group"))
"""Existing topics and groups may have names that are no longer allowed, and must be removable."""


def show_ms(ms: int | None) -> str:
    """Returns "7d" for 604800000: the largest unit that divides it. None is unlimited."""
    if ms is None:
        return UNLIMITED
    for unit in ("d", "h", "m", "s"):
        if ms and ms % MS[unit] == 0:
            return f"{ms // MS[unit]}{unit}"
    return f"{ms}ms"


def show_bytes(size: int | None) -> str:
    """Returns "1GiB" for 1073741824; rounded to one digit if it is not a whole number of units. None is unlimited."""
    if size is None:
        return UNLIMITED
    for number, unit in ((1024**4, "TiB"), (1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB")):
        if size >= number:
            return f"{size // number}{unit}" if size % number == 0 else f"{size / number:.1f}{unit}"
    return f"{size}B"


def show_retention(ms: int | None, size: int | None) -> str:
    """Returns "7d", "7d/10GiB" for whichever comes first, "unlimited"."""
    parts = [show_ms(ms)] if ms is not None else []
    parts += [show_bytes(size)] if size is not None else []
    return "/".join(parts) or UNLIMITED


def show_ids(numbers: Iterable[int]) -> str:
    """Returns "0-3,7" for 0, 1, 2, 3, 7."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    return ",".join(str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}" for found in ranges)


def show_flush(flush: Flush) -> str:
    """Returns the text that parse_flush reads."""
    if not isinstance(flush, FlushEvery):
        return flush
    parts = [str(flush.messages)] if flush.messages is not None else []
    parts += [show_ms(flush.ms)] if flush.ms is not None else []
    return "/".join(parts) or "never"


def show_age(ms: int) -> str:
    """Returns a rounded age: "3s", "12m", "5h", "9d"."""
    for unit in ("d", "h", "m", "s"):
        if ms >= MS[unit]:
            return f"{ms // MS[unit]}{unit}"
    return f"{ms}ms"
