"""Messages as JSON lines, for `metamq produce --json`: the documents of metamq.cli.show.message_format, read back.

The message that is sent has the bytes of the one that was printed: key, value, headers in their order, timestamp and
partition. The fields `topic` and `offset` are ignored: the command names the topic, and the broker gives an offset. So
are `decoded` and `decode_error`; with `--encode` the message has `decoded`, encoded again, and `value` is ignored.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import json
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from metamq.client.model import time_of, timestamp_us
from metamq.errors import ConfigError
from metamq.zk.names import parse_partition

if TYPE_CHECKING:
    from metamq.client.schemas.documents import Encode

T = TypeVar("T")

FIELDS = (
    "topic", "partition", "offset", "timestamp_us", "key", "key_base64", "value", "value_base64", "headers",
    "headers_base64", "decoded", "decode_error",
)  # fmt: skip
HINT = 'Write it like {"key": "UA", "value": "text", "headers": {"a": "1"}, "partition": "0-3"}.'


class Record(NamedTuple):
    """A message to send."""

    value: bytes
    key: bytes | None
    headers: dict[str, bytes] | None
    partition: str | None
    time: datetime | None


def parse_record(number: int, line: bytes, encode: Encode | None = None) -> Record:
    """Returns the message of a line. Raises ConfigError, which names the line and the wrong field."""
    return _parsed(number, line, lambda record: _message(record, encode))


def parse_document(number: int, line: bytes, encode: Encode) -> bytes:
    """Returns the value of a line that is its document. Raises ConfigError, which names the line and the field."""
    hint = "A line is the JSON of one value, as `metamq consume --decode schema` prints it."
    return _parsed(number, line, lambda document: encode(document, line), hint)


def _parsed(number: int, line: bytes, read: Callable[[Any], T], hint: str = HINT) -> T:
    try:
        return read(json.loads(line, object_pairs_hook=_without_repeats))
    except json.JSONDecodeError as error:
        problem = f"line {number:,} is not JSON: {error.msg}, at character {error.pos + 1}"
        raise ConfigError(problem, hint=hint) from None
    except ConfigError as error:
        raise ConfigError(f"line {number:,}: {error.problem}", hint=error.hint or hint) from None
    except (ValueError, RecursionError, OverflowError) as error:
        raise ConfigError(f"line {number:,}: {error}", hint=hint) from None


def _message(record: Any, encode: Encode | None) -> Record:
    if not isinstance(record, dict):
        raise ValueError(f"a record is an object, not {record!r:.40}")
    for name in record:
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, 1)
            raise ConfigError(f"unknown field {name!r}", hint=f"Did you mean {near[0]!r}?" if near else HINT)
    value = _bytes(record, "value") if encode is None else _encoded(record, encode)
    if value is None:
        hint = 'A message always has a value; it may be empty: "value": "".'
        raise ConfigError("the record has no value", hint=hint)
    partition = record.get("partition")
    if partition is not None and not isinstance(partition, str):
        raise ValueError(f'`partition` is a name such as "0-3", not {partition!r:.40}')
    if partition is not None:
        parse_partition(partition)
    time = record.get("timestamp_us")
    if time is not None and type(time) is not int:
        raise ValueError(f"`timestamp_us` is a whole number of microseconds since 1970, not {time!r:.40}")
    when = None if time is None else time_of(time)  # as a number, a time before 2001 is refused
    timestamp_us(when)
    return Record(value, _bytes(record, "key"), _headers(record), partition, when)


def _encoded(record: dict[str, Any], encode: Encode) -> bytes:
    if "decoded" not in record:
        hint = 'Write it like {"key": "UA", "decoded": {"number": 1}}, or omit --encode to send the raw values.'
        raise ConfigError("the record has no `decoded`, which --encode sends", hint=hint)
    return encode(record["decoded"])


def _headers(record: dict[str, Any]) -> dict[str, bytes] | None:
    texts, encoded = (_object(record, name) for name in ("headers", "headers_base64"))
    headers = {}
    for name in dict.fromkeys([*texts, *encoded]):
        header = _bytes({name: texts.get(name), f"{name}_base64": encoded.get(name)}, name)
        if header is None:
            raise ValueError(f"the header {name!r} has no value")
        headers[name] = header
    return headers or None


def _object(record: dict[str, Any], name: str) -> dict[str, Any]:
    given = record.get(name)
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise ValueError(f"`{name}` is an object, not {given!r:.40}")
    return given


def _bytes(record: dict[str, Any], name: str) -> bytes | None:
    """Returns the bytes of a field: of its text, or of the base64 code beside it."""
    text, code = record.get(name), record.get(f"{name}_base64")
    if text is not None and code is not None:
        raise ValueError(f"`{name}` and `{name}_base64` are both given")
    if code is not None:
        if not isinstance(code, str):
            raise ValueError(f"`{name}_base64` is a text, not {code!r:.40}")
        try:
            return base64.b64decode(code, validate=True)
        except binascii.Error as error:
            raise ValueError(f"`{name}_base64` is not base64: {error}") from None
    if text is not None and not isinstance(text, str):
        hint = f"Make it a text, for example with `jq -c '.{name} |= tojson'`."
        raise ConfigError(f"`{name}` is a text, not {text!r:.40}", hint=hint)
    return None if text is None else text.encode()


def _without_repeats(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} is given twice")
        found[name] = value
    return found
