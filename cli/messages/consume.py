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
from collections.abc import Mapping
from datetime import datetime
from typing import IO, TYPE_CHECKING, Any, Literal

import click

from metamq.cli.command import CliCommand
from metamq.cli.context import current
from metamq.cli.processes import StopSignals
from metamq.cli.show.message_format import LETTERS, Render, as_json, as_raw, compile_format
from metamq.cli.show.output import output_option, silence_stdout
from metamq.cli.show.units import GROUP, PLACE, TOPIC, Parsed
from metamq.client.consumer.consumer import Consumer
from metamq.client.fetch.consumer_options import ConsumerOptions
from metamq.client.settings import load
from metamq.errors import ConnectError, OwnershipLost
from metamq.zk.partitions import TopicPartition

if TYPE_CHECKING:
    from metamq.client.admin.admin_model import PartitionDescription
    from metamq.client.model import Message

log = logging.getLogger("metamq.cli")

LOOK_S = 0.05
COMMIT_S = 1.0
BUFFER_BYTES = 64 * 1024

Place = Literal["earliest", "latest"] | datetime | int
Ends = dict[TopicPartition, int]


@click.command(cls=CliCommand, epilog=f"FORMAT: {LETTERS}.")
@click.argument("topics", type=TOPIC, nargs=-1, required=True)
@click.option("-g", "--group", type=GROUP, help="Read as a member of this group, and commit printed messages.")
@click.option(
    "--from",
    "place",
    type=PLACE,
    default="earliest",
    show_default=True,
    metavar="PLACE",
    help="First message: earliest, latest, an OFFSET, -N for the last N of each partition, @TIME. A group begins at "
    "its committed offsets; PLACE is for partitions without one.",
)
@click.option("-n", "--count", type=click.IntRange(min=1), help="Stop after this number of messages.")
@click.option("-e", "--exit", "exit_at_end", is_flag=True, help="Stop after the last message that exists at the start.")
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
    "text", "json", "raw", text="text: as --format says. json: one JSON object per line. raw: only the bytes of values."
)
def consume(
    topics: tuple[str, ...],
    group: str | None,
    place: Place,
    count: int | None,
    exit_at_end: bool,
    template: Render,
    output: str,
) -> int:
    """Print the messages of topics, and wait for more. Ctrl-C ends the command, with status 0.

    \b
    metamq consume flights -e
    metamq consume flights --from latest --format '%T %p %o %k %v\\n'
    metamq consume flights --from -10 -e
    metamq consume flights clicks --from @2026-11-01T00:00 -o json | jq .value
    metamq consume flights --group etl
    """  # fmt: skip
    if group is not None and isinstance(place, int):
        raise click.UsageError(
            "a group begins at its committed offsets: set them with `metamq group reset`, or omit --group"
        )
    render = {"text": template, "json": as_json, "raw": as_raw}[output]
    load(ConsumerOptions, "consumer", file=current().config, arguments={})
    settings = current().client()
    with contextlib.suppress(KeyboardInterrupt):
        partitions = _partitions(topics) if exit_at_end or isinstance(place, int) else {}
        ends = {tp: _end(tp, found) for tp, found in partitions.items()} if exit_at_end else None
        start = "latest" if isinstance(place, int) else place
        consumer = PollingConsumer(
            **settings, topics=topics, group=group, start=start, auto_commit=False, idle_timeout_s=LOOK_S
        )
        with consumer, StopSignals() as signals:
            if isinstance(place, int):
                _seek(consumer, place, partitions)
            printer = Printer(consumer, render, signals, commits=group is not None, count=count, ends=ends)
            try:
                printer.run()
            except BrokenPipeError:
                silence_stdout()
    return 0


def _partitions(topics: tuple[str, ...]) -> dict[TopicPartition, PartitionDescription]:
    with current().admin() as admin:
        described = [admin.describe_topic(topic) for topic in topics]
    return {TopicPartition(one.topic, part.partition): part for one in described for part in one.partitions}


def _end(tp: TopicPartition, found: PartitionDescription) -> int:
    """Returns the end of the partition at the start of the command. Raises ConnectError if it is unknown."""
    if found.stable_offset is None:
        reason = "it is not registered in ZooKeeper" if found.address is None else f"{tp}: {found.problem}"
        raise ConnectError(f"broker {found.broker_id}", reason, hint="`metamq doctor` checks every part.")
    return found.stable_offset


def _seek(consumer: Consumer[bytes], place: int, partitions: Mapping[TopicPartition, PartitionDescription]) -> None:
    """Seeks to an offset in each partition, or to a number of messages before its end; stays within the log."""
    for tp in consumer.assignment:
        found = partitions.get(tp)
        if found is None:
            continue
        end = _end(tp, found)
        assert found.start_offset is not None
        wanted = end + place if place < 0 else place
        consumer.seek(tp, min(max(wanted, found.start_offset), end))


def _poll_reader(stream: IO[str]) -> select.poll | None:
    """Returns a poll that reports that the stream's reader has closed it; None without a file descriptor."""
    try:
        descriptor = stream.fileno()
    except OSError:
        return None
    watched = select.poll()
    watched.register(descriptor, 0)  # poll reports errors and hang-ups in any case
    return watched


class PollingConsumer(Consumer[bytes]):
    """A consumer whose loops end often: the command then checks for signals and a closed output."""

    _asks_for_the_end = False

    def has_all_partitions(self) -> bool:
        """Returns True if this consumer has all partitions of its plan, and the owners of the others run."""
        return self._background.run(self._core.end.has_all_partitions())


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
    ) -> None:
        """Prepares the output. `ends`: stop after all partitions of ours are read up to these offsets; None: never."""
        self._consumer = consumer
        self._render = render
        self._signals = signals
        self._commits = commits
        self._left = count
        self._ends = ends
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

    def _passes_end(self, message: Message[Any]) -> bool:
        """Records our position. Returns True if this was the last partition with messages to read."""
        assert self._ends is not None
        tp = TopicPartition(message.topic, message.partition)
        if message.offset + 1 >= self._ends.get(tp, 0):
            self._ends.pop(tp, None)
        return not self._ends

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
                self._ends.pop(tp, None)
        return not any(tp in self._ends for tp in partitions)

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
