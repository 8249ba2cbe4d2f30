"""`metamq consume`: messages on standard output, until there is an end, enough, or nobody reads any more.

A message of a group is committed only after it has been written: what is buffered here is written first. So a consumer
that is killed repeats lines, and loses none.
"""

from __future__ import annotations

import contextlib
import logging
import select
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from typing import IO, Any, Literal

import click

from metamq.cli.app import silence_stdout
from metamq.cli.command import CliCommand
from metamq.cli.context import current
from metamq.cli.processes import StopSignals
from metamq.cli.show.message_format import LETTERS, Render, as_json, as_raw, compile_format
from metamq.cli.show.output import output_option
from metamq.cli.show.units import GROUP, PLACE, TOPIC, Parsed
from metamq.client.admin.admin_model import PartitionDescription
from metamq.client.consumer.consumer import Consumer
from metamq.client.model import Message
from metamq.errors import ConnectError, OwnershipLost
from metamq.zk.partitions import TopicPartition

log = logging.getLogger("metamq.cli")

LOOK_S = 0.05
COMMIT_S = 1.0
BUFFER_BYTES = 64 * 1024

Place = Literal["earliest", "latest"] | datetime | int
Ends = dict[TopicPartition, int]


@click.command(cls=CliCommand, epilog=f"FORMAT: {LETTERS}.")
@click.argument("topics", type=TOPIC, nargs=-1, required=True)
@click.option("-g", "--group", type=GROUP, help="Read as a member of this group, and commit what has been printed.")
@click.option(
    "--from",
    "place",
    type=PLACE,
    default="earliest",
    show_default=True,
    metavar="PLACE",
    help="Where to begin: earliest, latest, an OFFSET, -N for the last N of each partition, @TIME. A group "
    "begins where it has committed; this is for partitions where it has not.",
)
@click.option("-n", "--count", type=click.IntRange(min=1), help="Stop after so many messages.")
@click.option("-e", "--exit", "exit_at_end", is_flag=True, help="Stop at the end, as it was when the command began.")
@click.option(
    "--format",
    "template",
    type=Parsed("format", compile_format),
    default=r"%v\n",
    show_default=True,
    metavar="FORMAT",
    help="How a message is printed.",
)
@output_option("text", "json", "raw", text="As --format says, a JSON object a line, or values with nothing between.")
def consume(
    topics: tuple[str, ...],
    group: str | None,
    place: Place,
    count: int | None,
    exit_at_end: bool,
    template: Render,
    output: str,
) -> int:
    """Print the messages of topics, and wait for more. Ctrl-C ends it, with status 0.

    \b
    metamq consume flights -e
    metamq consume flights --from latest --format '%T %p %o %k %v\\n'
    metamq consume flights --from -10 -e
    metamq consume flights clicks --from @2026-11-01T00:00 -o json | jq .value
    metamq consume flights --group etl
    """  # fmt: skip
    if group is not None and isinstance(place, int):
        raise click.UsageError(
            "a group begins where it has committed: set offsets with `metamq group reset`, or leave --group out"
        )
    current().log()
    render = {"text": template, "json": as_json, "raw": as_raw}[output]
    settings = current().client("consumer")
    with contextlib.suppress(KeyboardInterrupt):
        partitions = _partitions(topics) if exit_at_end or isinstance(place, int) else {}
        ends = {tp: _end(tp, found) for tp, found in partitions.items()} if exit_at_end else None
        start = "latest" if isinstance(place, int) else place
        consumer = Looking(
            **settings, topics=topics, group=group, start=start, auto_commit=False, idle_timeout_s=LOOK_S
        )
        with consumer, StopSignals() as signals:
            if isinstance(place, int):
                _seek(consumer, place, partitions)
            printing = Printing(consumer, render, signals, commits=group is not None, count=count, ends=ends)
            try:
                printing.run()
            except BrokenPipeError:
                silence_stdout()
    return 0


def _partitions(topics: tuple[str, ...]) -> dict[TopicPartition, PartitionDescription]:
    with current().admin() as admin:
        described = [admin.describe_topic(topic) for topic in topics]
    return {TopicPartition(one.topic, part.partition): part for one in described for part in one.partitions}


def _end(tp: TopicPartition, found: PartitionDescription) -> int:
    """Where the partition ended when the command began. Raises ConnectError when nobody can tell."""
    if found.stable_offset is None:
        reason = "it is not registered in ZooKeeper" if found.address is None else f"{tp}: {found.problem}"
        raise ConnectError(f"broker {found.broker_id}", reason, hint="`metamq doctor` looks at every part.")
    return found.stable_offset


def _seek(consumer: Consumer[bytes], place: int, partitions: Mapping[TopicPartition, PartitionDescription]) -> None:
    """To an offset in each partition, or so many before its end; as near to it as there are messages."""
    for tp in consumer.assignment:
        found = partitions.get(tp)
        if found is None:
            continue
        end = _end(tp, found)
        assert found.start_offset is not None
        wanted = end + place if place < 0 else place
        consumer.seek(tp, min(max(wanted, found.start_offset), end))


def _hang_ups(stream: IO[str]) -> select.poll | None:
    """Tells of the end of whoever reads the stream; None for one that is no file of the system's."""
    try:
        descriptor = stream.fileno()
    except OSError:
        return None
    watched = select.poll()
    watched.register(descriptor, 0)  # errors and hang-ups are told in any case
    return watched


class Looking(Consumer[bytes]):
    """Its loops end every now and then, so that signals and the reader of our output are looked at."""

    _asks_for_the_end = False

    def has_all_partitions(self) -> bool:
        """Whether it has every partition that is its own, and those that have the others live."""
        return self._background.run(self._core.end.has_all_partitions())


class Printing:
    """Writes what a consumer gives, and commits behind what is written."""

    def __init__(
        self,
        consumer: Looking,
        render: Render,
        signals: StopSignals,
        *,
        commits: bool,
        count: int | None,
        ends: Ends | None,
    ) -> None:
        """`ends`: stop once every partition of ours has been read up to here; None: never."""
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
        self._output = _hang_ups(sys.stdout)

    def run(self) -> None:
        """Until the end. Raises BrokenPipeError, and what the consumer fails with."""
        try:
            while not (self._print_some() or self._signals.asked or self._is_at_end()):
                self._write()
                self._commit()
                self._check_reader()
        finally:
            self._write()
        self._commit(last=self._last)

    def _print_some(self) -> bool:
        """Prints until nothing comes for a moment, or it is time to commit; True when nothing more is to be done."""
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
        """Raise BrokenPipeError when nobody reads our output any more: without a write, none would tell."""
        if self._output is not None and self._output.poll(0):
            raise BrokenPipeError

    def _passes_end(self, message: Message[Any]) -> bool:
        """Notes where we are; True when that was the last partition with something to read."""
        assert self._ends is not None
        tp = TopicPartition(message.topic, message.partition)
        if message.offset + 1 >= self._ends.get(tp, 0):
            self._ends.pop(tp, None)
        return not self._ends

    def _is_at_end(self) -> bool:
        """Whether everything that is ours has been read; asked when nothing comes."""
        if self._ends is None:
            return False
        # It has no partition where others have all there is, or the topics were deleted.
        return self._has_read_its_own() and self._consumer.has_all_partitions() and self._has_read_its_own()

    def _has_read_its_own(self) -> bool:
        assert self._ends is not None
        partitions = self._consumer.health().partitions
        for tp, partition in partitions.items():
            if partition.done_offset >= self._ends.get(tp, 0):
                self._ends.pop(tp, None)
        return not any(tp in self._ends for tp in partitions)

    def _commit(self, *, last: Message[bytes] | None = None) -> None:
        """Commits what is done, and `last`, which was the last to be written."""
        if not self._commits:
            return
        try:
            self._consumer.commit()
            if last is not None:
                self._consumer.commit(last)
        except OwnershipLost as error:
            log.info("%s", error)
