"""`metamq produce`: sends lines of standard input, lines of a file, or arguments as messages."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import stat
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Literal

import click

from metamq.cli.command import CliCommand
from metamq.cli.context import current
from metamq.cli.messages.decoding import encode_options, encoder_of
from metamq.cli.messages.json_records import Record, parse_document, parse_record
from metamq.cli.show.message_format import unescaped
from metamq.cli.show.output import count, output_option, print_json, say
from metamq.cli.show.progress import progress_bar
from metamq.cli.show.units import DURATION, PARTITION, TOPIC, Parsed
from metamq.client.delayed import delayed_topic
from metamq.client.model import Receipt, ReceiptRange, time_of
from metamq.client.settings import load
from metamq.errors import MessageTooLarge, MetamqError, Timeout
from metamq.wire.limits import MESSAGE_BYTES_MAX
from metamq.zk.names import parse_partition

if TYPE_CHECKING:
    from metamq import Producer
    from metamq.client.producer.outgoing import Delivery, ManyDelivery
    from metamq.client.schemas.documents import Encode

INTERRUPTED = 130
CHUNK_BYTES = 256 * 1024
RECORD_BYTES_MAX = 8 * MESSAGE_BYTES_MAX
"""A message as JSON is up to six times as large as its bytes: a control character is \\u0000."""
QUIET_S = 2.0
STORING = b"Storing the messages that were read. Ctrl-C again gives up.\n"

Lines = Iterator[list[bytes]]
BYTES = Parsed("text", unescaped)


def parse_header(text: str) -> tuple[str, bytes]:
    """Returns ("a", b"1") for "a=1". Raises ValueError."""
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise ValueError(f"{text!r} is not NAME=VALUE")
    return name, os.fsencode(value)


def _send(
    sender: InputSender, producer: Producer[bytes], values: Sequence[str], file: IO[bytes] | None, interrupt: Interrupt
) -> None:
    """Sends the values, or the input. Says what is stored if that ends with an error."""
    try:
        if values:
            sender.send([os.fsencode(value) for value in values])
        else:
            sender.send_all(file or sys.stdin.buffer, interrupt)
        sender.finish()
    except KeyboardInterrupt:
        with contextlib.suppress(MetamqError):
            producer.close(timeout=0)
        say(sender.given_up())
        raise
    except MetamqError:
        say(f"{count(sender.stored(), 'message')} of the input stored, then:")
        raise


def _check_options(
    values: Sequence[str],
    file: IO[bytes] | None,
    key: str | None,
    key_separator: bytes | None,
    delimiter: bytes,
    records: bool,
    headers: Sequence[tuple[str, bytes]],
    encodes: bool,
    encoding: Sequence[object],
) -> None:
    if key is not None and key_separator is not None:
        raise click.UsageError(
            "--key gives every message a key, --key-separator finds one in each line: give one of them"
        )
    if values and file is not None:
        raise click.UsageError("give VALUEs or --file, not both")
    if not delimiter or key_separator == b"":
        raise click.UsageError("an empty text separates nothing: give --delimiter and --key-separator a character")
    if records and (key is not None or key_separator is not None or headers):
        raise click.UsageError("--json has the key and the headers in each record: omit --key, -K and --header")
    if not encodes and any(one is not None for one in encoding):
        raise click.UsageError("--schema-version and --framing are for --encode schema")


@click.command(cls=CliCommand)
@click.argument("topic", type=TOPIC)
@click.argument("values", nargs=-1, metavar="[VALUE]...")
@click.option("-f", "--file", type=click.File("rb"), help="Read lines from this file instead of standard input.")
@click.option("-k", "--key", help="The key of every message.")
@click.option(
    "-K", "--key-separator", type=BYTES, metavar="TEXT", help="The text between key and value in a line: ':', '\\t'."
)
@click.option(
    "-D",
    "--delimiter",
    type=BYTES,
    metavar="TEXT",
    default="\\n",
    show_default=True,
    help="The text between two messages: '\\0', '\\r\\n', '\\x1e'.",
)
@click.option(
    "-j",
    "--json",
    "records",
    is_flag=True,
    help="Each line is a JSON object, as `metamq consume -o json` prints it: "
    "value, key, headers, partition, timestamp_us.",
)
@encode_options
@click.option(
    "-H",
    "--header",
    "headers",
    type=Parsed("header", parse_header),
    multiple=True,
    metavar="NAME=VALUE",
    help="A header of every message; repeatable.",
)
@click.option(
    "-p", "--partition", type=PARTITION, metavar="PARTITION", help="Send all messages to this partition, such as 0-3."
)
@click.option("-d", "--delay", "delay_ms", type=DURATION, help="The messages become readable after this time: 30s, 2h.")
@click.option("-z", "--compression", type=click.Choice(["lz4", "zstd"]), help="Compress batches.")
@output_option(
    "text",
    "json",
    text="Print the summary as text on standard error, or as JSON on standard output. JSON has the "
    "partitions and offsets of the stored messages.",
)
def produce(
    topic: str,
    values: tuple[str, ...],
    file: IO[bytes] | None,
    key: str | None,
    key_separator: bytes | None,
    delimiter: bytes,
    records: bool,
    encode: str | None,
    schema_version: int | None,
    framing: Literal["confluent"] | None,
    headers: tuple[tuple[str, bytes], ...],
    partition: str | None,
    delay_ms: int | None,
    compression: str | None,
    output: str,
) -> int:
    """Send each line of standard input to TOPIC, or each VALUE.

    Lines may have any bytes. The newline is not part of the message; the last line needs none. With -K, a line without
    the separator becomes a message without a key. With --json, a missing key is null, and key_base64 and value_base64
    have bytes that are no text. With --encode, each line is the JSON of a value; with --json, too, its field `decoded`
    is. --partition replaces the partitions of the records; topic and offset are ignored, and with --delay
    timestamp_us, too. Ctrl-C stores the messages that were read, and ends with status 130. A second Ctrl-C does not
    wait, and prints the number of messages that may not be stored.

    \b
    echo hello | metamq produce flights
    metamq produce flights --key UA --header source=test 'first' 'second'
    metamq produce flights --delay 30s 'later'
    metamq produce flights --file flights.jsonl -z zstd
    printf 'UA:one\\nAA:two\\n' | metamq produce flights -K :
    echo '{"number": 1, "place": "Oslo"}' | metamq produce trips --encode schema
    find . -print0 | metamq produce files -D '\\0'
    metamq consume flights -e -o json | metamq produce copy --json
    metamq produce flights hello -o json | jq '.stored[0].offset'

    With --delay, `stored` is empty: nothing is in TOPIC yet. `due` is when the last message becomes readable.
    """  # fmt: skip
    encoding = schema_version, framing
    _check_options(values, file, key, key_separator, delimiter, records, headers, encode is not None, encoding)
    # The error that ends the command says the same.
    logging.getLogger("metamq.client").setLevel(max(logging.ERROR, logging.getLogger("metamq").level))
    from metamq import Producer
    from metamq.client.producer.producer_core import ProducerOptions

    load(ProducerOptions, "producer", file=current().config_file, arguments={"compression": compression})
    encoder = None if encode is None else encoder_of(topic, *encoding)
    interrupt = Interrupt()
    producer: Producer[bytes] = Producer(**current().client(), compression=compression)
    with producer, interrupt:
        sender = InputSender(
            producer, topic, _bytes(key), key_separator, dict(headers) or None, partition, delimiter, records,
            encoder, notes_places=output == "json", delay_s=None if delay_ms is None else delay_ms / 1000,
        )  # fmt: skip
        _send(sender, producer, values, file, interrupt)
    sender.report(output)
    return INTERRUPTED if interrupt.asked else 0


class Interrupt:
    """Makes SIGINT and SIGTERM end the reading, not the sending. They raise during a read; otherwise they set a flag.

    A second signal also ends the sending.
    """

    def __init__(self) -> None:
        self.asked = False
        self.reading = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._interrupt)
        return self

    def __exit__(self, *_error: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _interrupt(self, _number: int, _frame: object) -> None:
        again, self.asked = self.asked, True
        if again:
            raise KeyboardInterrupt
        with contextlib.suppress(OSError):
            os.write(sys.stderr.fileno(), STORING)  # the signal may interrupt our own write to the stream
        if self.reading:
            raise KeyboardInterrupt

    def read(self, stream: Any) -> bytes:
        """Returns the bytes that are there, at most a chunk; no bytes at the end or after an interrupt."""
        if self.asked:
            return b""
        try:
            self.reading = True
            chunk: bytes = stream.read1(CHUNK_BYTES)
            return chunk
        except KeyboardInterrupt:
            return b""
        finally:
            self.reading = False


def split_lines(read: Callable[[], bytes], delimiter: bytes, bytes_max: int) -> Lines:
    """Yields the lines of each read together. Raises MessageTooLarge for a line without an end."""
    rest, number = b"", 1
    while chunk := read():
        lines = (rest + chunk).split(delimiter)
        rest = lines.pop()
        number += len(lines)
        if len(rest) > bytes_max:
            raise MessageTooLarge(f"line {number:,}", len(rest), bytes_max, hint="The input must have lines.")
        if lines:
            yield lines
    if rest:
        yield [rest]


def split_keys(lines: Sequence[bytes], separator: bytes) -> tuple[list[bytes | None], list[bytes]]:
    """Returns (keys, values) of lines; a line without the separator has no key."""
    keys: list[bytes | None] = []
    values = []
    for line in lines:
        key, found, value = line.partition(separator)
        keys.append(key if found else None)
        values.append(value if found else line)
    return keys, values


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else os.fsencode(text)


@dataclass
class InputSender:
    """Sends messages, counts the stored ones, and stops at the first one that is not stored."""

    producer: Producer[bytes]
    topic: str
    key: bytes | None
    separator: bytes | None
    """The bytes between key and value in a line."""
    headers: dict[str, bytes] | None
    partition: str | None
    delimiter: bytes = b"\n"
    records: bool = False
    """True: a line is a JSON record."""
    encode: Encode | None = None
    """The encoder of a line that is a JSON document, or of the documents in records."""
    notes_places: bool = False
    """True: the partitions and offsets of stored messages are kept for the report."""
    delay_s: float | None = None
    """Seconds after which the messages become readable."""

    def __post_init__(self) -> None:
        self._pending: deque[tuple[Delivery | ManyDelivery, int]] = deque()
        self._places: dict[str, list[list[int]]] = {}
        """Partition -> runs of stored messages: the first offset, and their number."""
        self._began = time.monotonic()
        self._took_s = self._due_s = 0.0
        self._lines = self._offered = self._stored = 0

    def send_all(self, stream: IO[bytes], interrupt: Interrupt) -> None:
        """Sends the lines of a stream as they come."""
        is_typed = stream.isatty()  # a bar would appear between the typed lines
        with progress_bar(f"Sending to {self.topic}", _size(stream), unit="bytes", wanted=not is_typed) as advance:

            def read() -> bytes:
                chunk = interrupt.read(stream)
                advance(len(chunk))
                return chunk

            for lines in split_lines(read, self.delimiter, RECORD_BYTES_MAX if self.records else MESSAGE_BYTES_MAX):
                self.send(lines)

    def send(self, lines: list[bytes]) -> None:
        """Sends messages. Raises MessageTooLarge with the line's number; the error of an earlier message."""
        keys: list[bytes | None] | None = None
        values = lines
        if self.records or self.encode is not None:
            self._send_records(lines)
            return
        self._offered += len(lines)  # counted before a Ctrl-C can end the send
        if self.separator is not None:
            keys, values = split_keys(lines, self.separator)
        elif self.key is not None:
            keys = [self.key for _ in lines]
        if self.headers is None and self.partition is None and self.delay_s is None:
            try:
                self._pending.append((self.producer.send_many(self.topic, values, keys), len(values)))
            except MessageTooLarge:
                self._send_each(keys, values)  # up to the one that is too large
        else:
            self._send_each(keys, values)
        self._lines += len(lines)
        self._settle()

    def _send_each(self, keys: list[bytes | None] | None, values: list[bytes]) -> None:
        for number, value in enumerate(values):
            key = keys[number] if keys is not None else None
            record = Record(value, key, self.headers, self.partition, None)
            self._send_one(f"message {self._lines + number + 1:,}", record)

    def _send_one(self, place: str, record: Record) -> None:
        value, key, headers, partition, at = record
        at = at if self.delay_s is None else None
        try:
            delivery = self.producer.send(
                self.topic, value, key, headers, partition=partition, timestamp=at, delay_s=self.delay_s
            )
        except MessageTooLarge as error:
            raise MessageTooLarge(place, error.size, error.limit) from None
        self._pending.append((delivery, 1))
        self._due_s = time.time() + (self.delay_s or 0.0)

    def _send_records(self, lines: list[bytes]) -> None:
        for line in lines:
            self._lines += 1
            if line.isspace() or not line:
                continue
            record = self._record(line)
            self._send_one(f"line {self._lines:,}", record._replace(partition=self.partition or record.partition))
            self._offered += 1
        self._settle()

    def _record(self, line: bytes) -> Record:
        if self.records:
            return parse_record(self._lines, line, self.encode)
        assert self.encode is not None
        (key,), (line,) = ([self.key], [line]) if self.separator is None else split_keys([line], self.separator)
        return Record(parse_document(self._lines, line, self.encode), key, self.headers, None, None)

    def _settle(self, *, wait: bool = False) -> None:
        while self._pending and (wait or self._pending[0][0].done()):
            delivery, number = self._pending.popleft()
            error = delivery.exception()
            if error is not None:
                raise error
            self._stored += number
            if self.notes_places and self.delay_s is None:  # a delayed message has no place in the topic yet
                self._note(delivery.result())

    def _note(self, stored: Receipt | list[ReceiptRange]) -> None:
        """Notes the partitions and offsets of stored messages."""
        for one in stored if isinstance(stored, list) else [stored]:
            number = one.count if isinstance(one, ReceiptRange) else 1
            runs = self._places.setdefault(one.partition, [])
            if runs and sum(runs[-1]) == one.offset:
                runs[-1][1] += number
            else:
                runs.append([one.offset, number])

    def stored(self) -> int:
        """Waits for the results of all accepted messages; returns the number of stored ones."""
        self._flush()
        return self._stored + sum(number for delivery, number in self._pending if delivery.exception() is None)

    def given_up(self) -> str:
        """Describes the result after the producer is closed."""
        pending = (number for delivery, number in self._pending if delivery.done() and delivery.exception() is None)
        stored = self._stored + sum(pending)
        return f"Given up: {count(stored, 'message')} stored, {self._offered - stored:,} may not be stored."

    def _flush(self) -> None:
        reported = False
        while True:
            waiting = self._waiting()
            try:
                self.producer.flush(timeout=QUIET_S)
                return
            except Timeout as error:
                if not reported and self._waiting() == waiting:
                    reported = True
                    _what, _, reason = error.what.partition(" (last error: ")
                    why = f": {reason.removesuffix(')')}" if reason else ""
                    hint = "" if "above its quota" in reason else " `metamq doctor` shows the problem."
                    say(f"Waiting for brokers to take {count(waiting, 'message')}{why}.{hint}")
            except MetamqError:  # the deliveries have the same errors, in order
                return

    def _waiting(self) -> int:
        return sum(number for delivery, number in self._pending if not delivery.done())

    def finish(self) -> None:
        """Waits until all messages are stored. Raises the first error."""
        self._flush()
        self._settle(wait=True)
        self._took_s = time.monotonic() - self._began

    def report(self, output: str) -> None:
        """Prints the summary."""
        rate = self._stored / self._took_s if self._took_s else 0.0
        if output == "json":
            stored = [
                {"partition": partition, "offset": offset, "messages": number}
                for partition, runs in sorted(self._places.items(), key=lambda item: parse_partition(item[0]))
                for offset, number in runs
            ]
            seconds = round(self._took_s, 6)
            document = {"topic": self.topic, "messages": self._stored, "seconds": seconds, "stored": stored}
            if self.delay_s is not None:
                due = time_of(round(self._due_s * 1e6)).isoformat()
                document |= {"waiting_in": delayed_topic(self.topic), "due": due if self._stored else None}
            print_json(document)
            return
        say(f"{count(self._stored, 'message')} to {self.topic} in {self._took_s:.2f} s, {rate:,.0f}/s")


def _size(stream: IO[bytes]) -> int | None:
    """Returns the size of the input in bytes; None if it is unknown."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None
