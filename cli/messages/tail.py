"""`metamq topic tail`: the newest messages of topics for people, one line each, and those that follow."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click

from metamq.cli.command import CliCommand
from metamq.cli.messages.decoding import decode_option, with_decoding
from metamq.cli.messages.filters import Matches, all_of, filter_options, partition_option
from metamq.cli.show.message_format import DecodedMessage, Render, as_json
from metamq.cli.show.output import output_option
from metamq.cli.show.terminal import escaped_bytes
from metamq.cli.show.units import TOPIC_PATTERN
from metamq.zk.names import is_pattern

if TYPE_CHECKING:
    from metamq.cli.messages.ranges import Place
    from metamq.client.model import Message


@click.command(cls=CliCommand)
@click.argument("topics", type=TOPIC_PATTERN, nargs=-1, required=True)
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(0),
    default=10,
    show_default=True,
    metavar="N",
    help="Begin with the last N messages of each partition.",
)
@partition_option
@filter_options
@decode_option
@click.option("--count", type=click.IntRange(1), metavar="N", help="Stop after N printed messages.")
@click.option(
    "--width",
    type=click.IntRange(1),
    default=200,
    show_default=True,
    metavar="N",
    help="Cut values to N characters in text.",
)
@output_option("text", "json", text="One line per message: text, or JSON with the whole message.")
def tail(
    topics: tuple[str, ...],
    lines: int,
    chosen: tuple[str, ...],
    key: Matches | None,
    headers: tuple[Matches, ...],
    conditions: tuple[Matches, ...],
    decode: str | None,
    count: int | None,
    width: int,
    output: str,
) -> int:
    """Show the last messages of topics, and new ones as they come. Ctrl-C ends the command, with status 0.

    A line has the local time, the place as PARTITION@OFFSET, the key ("-": none) and the value, on one line. A topic
    may be a pattern in quotes. Filters also select among the last N messages. No group is used, and nothing is
    committed.

    \b
    metamq topic tail flights
    metamq topic tail 'flights-*' -n 0 --key 'UA*'
    metamq topic tail flights --where '.delay >= 15' --where '.carrier == UA'
    metamq topic tail flights --header source=radar -o json | jq .value
    metamq topic tail trips --decode schema --where '.place == Oslo'
    """  # fmt: skip
    from metamq.cli.messages.consume import print_messages
    from metamq.cli.messages.ranges import matching_topics

    place: Place = -lines if lines else "latest"
    names_topic = len(topics) > 1 or any(map(is_pattern, topics))

    def line(message: Message[bytes]) -> bytes:
        where = f"{message.topic}/" if names_topic else ""
        time = message.time.astimezone().isoformat(" ", "milliseconds")
        name = b"-" if message.key is None else _cut(message.key, width)
        begin = f"{time} {where}{message.partition}@{message.offset} ".encode()
        value = _cut(message.value, width)
        if isinstance(message, DecodedMessage) and message.problem:
            value += b" (not decoded: %b)" % _cut(message.problem.encode("utf-8", "backslashreplace"), width)
        return b"%b%b %b\n" % (begin, name, value)

    render: Render = as_json if output == "json" else line
    matches = all_of(key, headers, conditions)
    with contextlib.suppress(KeyboardInterrupt):
        if decode is not None:
            topics = matching_topics(topics)
            matches, render = with_decoding(topics, matches, render, says_problems=False)
        print_messages(topics, None, chosen, place, None, False, count, matches, render)
    return 0


def _cut(data: bytes, width: int) -> bytes:
    """Returns the bytes as text of one line, and at most `width` characters of them."""
    text = escaped_bytes(data[: 4 * width]).decode().replace("\n", "\\n")
    return (
        text if len(text) <= width and len(data) <= 4 * width else f"{text[:width]}… ({len(data):,} bytes)"
    ).encode()
