"""`metamq consume`: prints messages until the end, until a count, or until its reader closes the output.

A message of a group is committed only after it has been written: the buffer is written first. So after a kill, lines
are repeated, but none is lost.
"""

from __future__ import annotations

import contextlib
import logging
import select
import sys
import time
from typing import IO, TYPE_CHECKING, Any

import click

from metamq.cli.command import CliCommand
from metamq.cli.context import current
from metamq.cli.messages.decoding import decode_option, with_decoding
from metamq.cli.messages.filters import Matches, all_of, filter_options, partition_option
from metamq.cli.messages.ranges import (
    Ends,
    Place,
    PollingConsumer,
    check_range,
    describe_partitions,
    ends_of,
    matching_topics,
    seek,
)
from metamq.cli.processes import StopSignals
from metamq.cli.show.message_format import LETTERS, Render, as_json, as_raw, compile_format
from metamq.cli.show.output import output_option, silence_stdout
from metamq.cli.show.units import GROUP, PLACE, TOPIC_PATTERN, Parsed
from metamq.client.fetch.consumer_options import ConsumerOptions
from metamq.client.settings import load
from metamq.errors import OwnershipLost
from metamq.zk.partitions import TopicPartition

if TYPE_CHECKING:
    from metamq.client.model import Message

log = logging.getLogger("metamq.cli")

LOOK_S = 0.05
COMMIT_S = 1.0
BUFFER_BYTES = 64 * 1024


@click.command(cls=CliCommand, epilog=f"FORMAT: {LETTERS}.")
@click.argument("topics", type=TOPIC_PATTERN, nargs=-1, required=True)
@click.option("-g", "--group", type=GROUP, help="Read as a member of this group, and commit printed messages.")
@partition_option
@click.option(
    "--from",
    "place",
    type=PLACE,
    default="earliest",
    show_default=True,
    metavar="PLACE",
    help="First message: earliest, latest, an OFFSET, -N for the last N of each partition, @TIME. The command waits "
    "for an OFFSET that does not exist yet. A group begins at its committed offsets; PLACE is for partitions without "
    "one.",
)
@click.option(
    "--until",
    type=PLACE,
    metavar="PLACE",
    help="Stop before this place in each partition. @TIME stops before the first message at or after TIME, or at the "
    "present end. The command waits for an OFFSET that does not exist yet.",
)
@click.option("-n", "--count", type=click.IntRange(min=1), help="Stop after this number of messages.")
@click.option(
    "-e",
    "--exit",
    "exit_at_end",
    is_flag=True,
    help="Stop at the present end: after the last message that exists at the start.",
)
@filter_options
@decode_option
@click.option(
    "--format",
    "template",
    type=Parsed("format", compile_format),
    default=r"%v\n",
    show_default=True,
    metavar="FORMAT",
    help="Format of a message, as below.",
)
@output_option(
    "text",
    "json",
    "raw",
    text="text: as --format says. json: one JSON object per line, for `metamq produce --json`. "
    "raw: only the bytes of values.",
)
def consume(
    topics: tuple[str, ...],
    group: str | None,
    chosen: tuple[str, ...],
    place: Place,
    until: Place | None,
    count: int | None,
    exit_at_end: bool,
    key: Matches | None,
    headers: tuple[Matches, ...],
    conditions: tuple[Matches, ...],
    decode: str | None,
    template: Render,
    output: str,
) -> int:
    """Print the messages of topics, and wait for more. Ctrl-C ends the command, with status 0.

    A topic may be a pattern in quotes: it stands for the topics that exist at the start. TIME is local, unless it
    names a zone: 2026-11-01, 2026-11-01T13:30Z, -1h for an hour ago, or microseconds since 1970.

    \b
    metamq consume flights -e
    metamq consume flights --from -10 -e
    metamq consume flights --partition 0-3 --from 1200 --until 1300

    \b
    metamq consume flights --from @2026-11-01T09:00 --until @2026-11-01T10:00
    metamq consume 'flights-*' --key 'UA*' --where '.delay >= 15'
    metamq consume flights --from latest --format '%T %p %o %k %v\\n'
    metamq consume flights clicks --from @-1h -o json | jq .value
    metamq consume trips -e --decode schema --where '.place == Oslo'
    metamq consume flights --group etl
    """  # fmt: skip
    if group is not None and (isinstance(place, int) or chosen or until is not None):
        raise click.UsageError(
            "a group begins at its committed offsets, and reads all partitions without an end: set the offsets with "
            "`metamq group reset`, or omit --group"
        )
    if group is not None and (key is not None or headers or conditions):
        raise click.UsageError("a group would commit the messages that the filters leave out: omit --group")
    if decode is not None and output == "raw":
        raise click.UsageError("-o raw prints the bytes of values: omit --decode")
    check_range(place, until)
    matches, render = all_of(key, headers, conditions), {"text": template, "json": as_json, "raw": as_raw}[output]
    with contextlib.suppress(KeyboardInterrupt):
        if decode is not None:
            topics = matching_topics(topics)
            matches, render = with_decoding(topics, matches, render, says_problems=output == "text")
        print_messages(topics, group, chosen, place, until, exit_at_end, count, matches, render)
    return 0


def print_messages(
    topics: tuple[str, ...],
    group: str | None,
    chosen: tuple[str, ...],
    place: Place,
    until: Place | None,
    at_end: bool,
    count: int | None,
    matches: Matches | None,
    render: Render,
) -> None:
    """Prints messages until the end. Raises the errors of a consumer, and those of the places."""
    load(ConsumerOptions, "consumer", file=current().config_file, arguments={})
    settings = current().client()
    topics = matching_topics(topics)
    ends_somewhere = at_end or until is not None
    seeks = group is None and (bool(chosen) or isinstance(place, int) or ends_somewhere)
    partitions = describe_partitions(topics, chosen) if seeks or ends_somewhere else {}
    start = "latest" if seeks or isinstance(place, int) else place
    consumer = PollingConsumer(
        **settings, topics=topics, group=group, start=start, auto_commit=False, idle_timeout_s=LOOK_S
    )
    with consumer, StopSignals() as signals:
        ends = None
        awaited: Ends = {}
        if seeks or ends_somewhere:
            ends = ends_of(consumer, partitions, until, at_end=at_end)
        if seeks:
            awaited = seek(consumer, place, partitions)
            others = [tp for tp in consumer.assignment if tp not in partitions]
            if others:
                consumer.pause(*others)
        printer = Printer(
            consumer, render, signals, commits=group is not None, count=count, ends=ends, awaited=awaited,
            matches=matches,
        )  # fmt: skip
        try:
            printer.run()
        except BrokenPipeError:
            silence_stdout()


def _poll_reader(stream: IO[str]) -> select.poll | None:
    """Returns a poll that reports that the stream's reader has closed it; None without a file descriptor."""
    try:
        descriptor = stream.fileno()
    except OSError:
        return None
    watched = select.poll()
    watched.register(descriptor, 0)  # poll reports errors and hang-ups in any case
    return watched


class Printer:
    """Writes the messages of a consumer, and commits the written ones."""

    def __init__(
        self,
        consumer: PollingConsumer,
        render: Render,
        signals: StopSignals,
        *,
        commits: bool,
        count: int | None,
        ends: Ends | None,
        awaited: Ends | None = None,
        matches: Matches | None = None,
    ) -> None:
        """Prepares the output. `awaited`: the first offset to print. `ends`: stop after all partitions of ours are read
        up to these offsets; None: never.

        Without commits, nothing at or behind these offsets is printed, and nothing of other partitions.
        """
        self._consumer = consumer
        self._render = render
        self._signals = signals
        self._commits = commits
        self._left = count
        self._awaited = awaited or {}
        self._ends = ends
        self._unread = set(ends or ())
        self._matches = matches
        self._stdout: IO[bytes] = sys.stdout.buffer
        self._at_once = sys.stdout.isatty()
        self._buffer: list[bytes] = []
        self._buffered_bytes = 0
        self._written_s = self._looked_s = time.monotonic()
        self._last: Message[bytes] | None = None
        self._output = _poll_reader(sys.stdout)

    def run(self) -> None:
        """Prints until the end. Raises BrokenPipeError, and errors of the consumer."""
        try:
            while not (self._print_some() or self._signals.asked or self._is_at_end()):
                self._write()
                self._commit()
                self._check_reader()
        finally:
            self._write()
        self._commit(last=self._last)

    def _print_some(self) -> bool:
        """Prints until no message comes for a moment, or a commit is due; returns True at the end of the command."""
        self._looked_s = time.monotonic()
        for message in self._consumer:
            self._last = message
            is_wanted = self._is_awaited(message) and self._is_in_range(message)
            if is_wanted and (self._matches is None or self._matches(message)):
                self._add(self._render(message))
                if self._left is not None:
                    self._left -= 1
                    if self._left == 0:
                        return True
            if self._ends is not None and self._passes_end(message):
                return True
            if self._signals.asked:
                return True
            if self._looked_s + COMMIT_S < time.monotonic():
                return False
        return False

    def _add(self, text: bytes) -> None:
        self._buffer.append(text)
        self._buffered_bytes += len(text)
        if self._at_once or self._buffered_bytes >= BUFFER_BYTES or time.monotonic() - self._written_s > LOOK_S:
            self._write()

    def _write(self) -> None:
        text, self._buffer, self._buffered_bytes = b"".join(self._buffer), [], 0
        if text:
            self._stdout.write(text)
            self._stdout.flush()
        self._written_s = time.monotonic()

    def _check_reader(self) -> None:
        """Raises BrokenPipeError if the reader has closed our output: without a write, no call would fail."""
        if self._output is not None and self._output.poll(0):
            raise BrokenPipeError

    def _is_in_range(self, message: Message[Any]) -> bool:
        if self._ends is None or self._commits:  # what a member of a group skips would be lost to the group
            return True
        return message.offset < self._ends.get(TopicPartition(message.topic, message.partition), 0)

    def _is_awaited(self, message: Message[Any]) -> bool:
        """Returns True unless a later message was asked for."""
        tp = TopicPartition(message.topic, message.partition)
        return not self._awaited or message.offset >= self._awaited.get(tp, 0)

    def _passes_end(self, message: Message[Any]) -> bool:
        """Records our position. Returns True if this was the last partition with messages to read."""
        assert self._ends is not None
        tp = TopicPartition(message.topic, message.partition)
        if message.offset + 1 >= self._ends.get(tp, 0) and tp in self._unread:
            self._unread.remove(tp)
            if not self._commits:
                self._consumer.pause(tp)
        return not self._unread

    def _is_at_end(self) -> bool:
        """Returns True if all of our partitions have been read; called when no message comes."""
        if self._ends is None:
            return False
        # This member has no partition if others have all of them, or if the topics were deleted.
        return self._has_read_its_own() and self._consumer.has_all_partitions() and self._has_read_its_own()

    def _has_read_its_own(self) -> bool:
        assert self._ends is not None
        partitions = self._consumer.health().partitions
        for tp, partition in partitions.items():
            if partition.done_offset >= self._ends.get(tp, 0):
                self._unread.discard(tp)
        return self._unread.isdisjoint(partitions)

    def _commit(self, *, last: Message[bytes] | None = None) -> None:
        """Commits the messages that are done, and `last`, the last one that was written."""
        if not self._commits:
            return
        try:
            self._consumer.commit()
            if last is not None:
                self._consumer.commit(last)
        except OwnershipLost as error:
            log.info("%s", error)
