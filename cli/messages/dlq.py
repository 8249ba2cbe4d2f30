"""`metamq dlq`: list, show, resend, export, purge the dead letters of groups."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click

from metamq.cli.command import Group
from metamq.cli.context import current
from metamq.cli.show.message_format import as_json, document_of
from metamq.cli.show.output import (
    TABLE_OR_JSON,
    TEXT_OR_JSON,
    YES,
    confirm,
    count,
    output_option,
    print_json,
    print_line,
    print_table,
    say,
)
from metamq.cli.show.progress import progress_bar
from metamq.cli.show.units import EXISTING_GROUP, TOPIC, Parsed, parse_time
from metamq.client.handling.dead_letters import dead_letter_topic
from metamq.client.model import Message
from metamq.errors import TopicNotFound
from metamq.tx.app.aio_dead_letters import DeadLetter, LetterFilter

if TYPE_CHECKING:
    from metamq import DeadLetterQueue
    from metamq.tx.app.aio_dead_letters import LetterSummary

F = TypeVar("F", bound=Callable[..., Any])

ERRORS_SHOWN = 3
NONE_SELECTED = "No dead letter of {} is selected."
ERROR_CHARS = 200
"""Characters of an error in a table."""
TIME = Parsed("time", parse_time)


def parse_id(text: str) -> str:
    """Returns the id of a letter. Raises ValueError."""
    if not re.fullmatch(r"\d+-\d+:\d+", text):
        raise ValueError(f"{text!r} is not the id of a letter: write it like 0-0:17")
    return text


ID = Parsed("id", parse_id)


def _filters(command: F) -> F:
    """Adds the options that select letters."""
    for option in reversed((
        click.option("--id", "ids", multiple=True, type=ID, metavar="ID", help="Only this letter, as `show` names it."),
        click.option("--error", default="", metavar="TEXT", help="Only letters whose error has this text."),
        click.option("--key", metavar="KEY", help="Only letters with this key."),
        click.option("--topic", default="", metavar="TOPIC", help="Only letters from this topic."),
        click.option("--since", type=TIME, metavar="TIME", help="Only letters given up since then, as -1h."),
        click.option("--until", type=TIME, metavar="TIME", help="Only letters given up before then."),
    )):  # fmt: skip
        command = option(command)
    return command


def _selected(options: dict[str, Any]) -> LetterFilter:
    key = options.pop("key")
    ids = options.pop("ids") or None
    return LetterFilter(ids, key=None if key is None else key.encode(errors="surrogateescape"), **options)


@click.group(cls=Group)
def dlq() -> None:
    """Show, resend, export and purge the messages that groups gave up.

    \b
    metamq dlq list
    metamq dlq resend etl --error ConnectionError
    """


@dlq.command("list")
@click.argument("groups", type=EXISTING_GROUP, nargs=-1)
@TABLE_OR_JSON
def list_groups(groups: tuple[str, ...], output: str) -> None:
    """Count the dead letters of GROUPS, or of all groups. Letters that were sent again or purged do not count.

    \b
    metamq dlq list
    metamq dlq list etl -o json | jq '.[0].letters'
    """
    if not groups:
        suffix = dead_letter_topic("")
        with current().admin() as admin:
            groups = tuple(name.removesuffix(suffix) for name in sorted(admin.topics()) if name.endswith(suffix))
    found = []
    for group in groups:
        with _queue(group) as queue:
            found.append(queue.summary())
        if not found[-1].letters:
            _check_exists(group)
    if output == "json":
        print_json([_summary_json(one) for one in found])
        return
    print_table(
        ["GROUP", "LETTERS", "OLDEST", "NEWEST", "ERRORS"],
        [[one.group, one.letters, _shown(one.oldest), _shown(one.newest), _errors(one)] for one in found],
    )


@dlq.command()
@click.argument("group", type=EXISTING_GROUP)
@_filters
@click.option("-n", "--count", "most", type=click.IntRange(min=1), help="Show this number of letters at most.")
@TABLE_OR_JSON
def show(group: str, most: int | None, output: str, **options: Any) -> None:
    """Show the dead letters of GROUP: where each comes from, its error, and how often it was tried and sent again.

    With --id it shows all of a letter, also its value, headers, whole error and traceback.

    \b
    metamq dlq show etl --since -1h
    metamq dlq show etl --id 0-0:17
    metamq dlq show etl --error Timeout -o json | jq '.[].value'
    """
    selected = _selected(options)
    with _queue(group) as queue:
        found = list(itertools.islice(queue.letters(selected), most))
    if not found:
        _check_exists(group)
    if output == "json":
        print_json([_letter_json(one) for one in found])
        return
    if not found:
        say(NONE_SELECTED.format(group))
        return
    if selected.ids is not None:
        for one in found:
            _print_letter(one)
        return
    print_table(
        ["ID", "GIVEN UP", "FROM", "KEY", "ATTEMPTS", "RESENT", "ERROR"],
        [
            [
                one.id,
                _shown(one.given_up),
                f"{one.topic}/{one.partition} at {one.offset}",
                None if one.key is None else " ".join(one.key.decode(errors="replace").split()),
                one.attempts,
                one.resent,
                " ".join(one.error.split())[:ERROR_CHARS],
            ]
            for one in found
        ],
    )


def _print_letter(one: DeadLetter) -> None:
    """Prints all of a letter, its value last."""
    lines = {
        "Letter": one.id,
        "Given up": _shown(one.given_up),
        "From": f"{one.topic}/{one.partition} at {one.offset}",
        "Attempts": one.attempts,
        "Resent": one.resent,
        "Key": "-" if one.key is None else one.key.decode(errors="backslashreplace"),
        **{f"Header {name}": value.decode(errors="backslashreplace") for name, value in one.headers.items()},
        "Error": one.error,
    }
    for name, value in lines.items():
        print_line(f"{name}: {value}")
    if one.traceback:
        print_line(f"Traceback:\n{one.traceback.rstrip()}")
    print_line(f"Value:\n{one.value.decode(errors='backslashreplace')}")


@dlq.command()
@click.argument("group", type=EXISTING_GROUP)
@_filters
@click.option("--to", type=TOPIC, metavar="TOPIC", help="Send them to this topic, not to those that they came from.")
@YES
@TEXT_OR_JSON
def resend(group: str, to: str | None, yes: bool, output: str, **options: Any) -> None:
    """Send dead letters of GROUP again, each exactly once, to the topics that they came from.

    All groups of these topics receive them. An interrupted resend continues when you repeat it: no letter is lost or
    doubled.

    \b
    metamq dlq resend etl
    metamq dlq resend etl --error ConnectionError --since 2026-11-01 --yes
    """
    selected = _selected(options)
    with _queue(group) as queue:
        found = {letter.id: to or letter.topic for letter in queue.letters(selected)}
        topics = Counter(found.values())
        if not topics:
            _report("resent", 0, group, output)
            return
        where = ", ".join(f"{topic} ({number:,})" for topic, number in topics.most_common())
        confirm([f"Dead letters of {group} to send again: {where}."], yes=yes)
        done = 0
        with progress_bar("Sending", topics.total()) as advance:

            def progress(number: int) -> None:
                nonlocal done
                done += number
                advance(number)

            try:
                sent = queue.resend(LetterFilter(ids=found.keys()), to=to, progress=progress)
            except TopicNotFound as error:
                error.hint = f"Create the topic {error.topic}, or send its letters to another one with --to TOPIC."
                raise
            except KeyboardInterrupt:
                say(
                    f"Stopped: {done:,} of {count(topics.total(), 'dead letter')} of {group} are resent. "
                    "Repeat the command for the others."
                )
                raise
    _report("resent", sent, group, output)


@dlq.command()
@click.argument("group", type=EXISTING_GROUP)
@click.argument("file", type=click.File("wb", lazy=False))
@_filters
@output_option("json")
def export(group: str, file: IO[bytes], output: str, **options: Any) -> None:
    """Write dead letters of GROUP to FILE (-: standard output), as `metamq consume -o json` prints their messages.

    `metamq dlq show -o json` also has their errors.

    \b
    metamq dlq export etl letters.jsonl
    metamq dlq export etl - --key customer-7 | jq .value
    """
    written = 0
    with _queue(group) as queue:
        for letter in queue.letters(_selected(options)):
            file.write(as_json(_message(letter)))
            written += 1
    if not written:
        _check_exists(group)
    say(f"{count(written, 'dead letter')} of {group} {'is' if written == 1 else 'are'} in {_name(file)}.")


@dlq.command()
@click.argument("group", type=EXISTING_GROUP)
@_filters
@YES
@TEXT_OR_JSON
def purge(group: str, yes: bool, output: str, **options: Any) -> None:
    """Remove dead letters of GROUP from the list without sending them.

    Their data stays in the dead-letter topic until its retention deletes it.

    \b
    metamq dlq purge etl --until -30d
    metamq dlq purge etl --id 0-0:17 --yes
    """
    selected = _selected(options)
    with _queue(group) as queue:
        found = {letter.id for letter in queue.letters(selected)}
        if not found:
            _report("purged", 0, group, output)
            return
        confirm([f"Dead letters of {group} to purge: {len(found):,}."], yes=yes)
        try:
            purged = queue.purge(LetterFilter(ids=found))
        except KeyboardInterrupt:
            say(f"Stopped: all of these dead letters are purged, or none. `metamq dlq show {group}` shows it.")
            raise
    _report("purged", purged, group, output)


def _report(done: str, number: int, group: str, output: str) -> None:
    if not number:
        _check_exists(group)
    if output == "json":
        print_json({"group": group, done: number})
    elif number:
        say(f"{count(number, 'dead letter')} of {group} {'is' if number == 1 else 'are'} {done}.")
    else:
        say(NONE_SELECTED.format(group))


def _check_exists(group: str) -> None:
    """Raises ConfigError, with similar names, for a group that neither exists nor has left dead letters."""
    with current().admin() as admin:
        if dead_letter_topic(group) not in admin.topics():
            admin.describe_group(group)


@contextlib.contextmanager
def _queue(group: str) -> Iterator[DeadLetterQueue]:
    from metamq import DeadLetterQueue

    with DeadLetterQueue(group, **current().client()) as queue:
        yield queue


def _message(letter: DeadLetter) -> Message[bytes]:
    sent_us = int(letter.sent.timestamp() * 1e6)
    return Message(letter.topic, letter.partition, letter.offset, letter.key, letter.value, letter.headers, sent_us)


def _shown(time: datetime | None) -> str | None:
    return None if time is None else time.astimezone().isoformat(" ", "seconds")


def _errors(one: LetterSummary) -> str:
    shown = dict(itertools.islice(one.errors.items(), ERRORS_SHOWN))
    others = one.letters - sum(shown.values())
    texts = [f"{error} ({number:,})" for error, number in shown.items()]
    return ", ".join([*texts, f"others ({others:,})"] if others else texts)


def _summary_json(one: LetterSummary) -> dict[str, Any]:
    return {
        "group": one.group,
        "letters": one.letters,
        "oldest": _shown(one.oldest),
        "newest": _shown(one.newest),
        "errors": one.errors,
    }


def _letter_json(one: DeadLetter) -> dict[str, Any]:
    return {
        "id": one.id,
        "given_up": _shown(one.given_up),
        "attempts": one.attempts,
        "resent": one.resent,
        "error": one.error,
        "traceback": one.traceback,
        **document_of(_message(one)),
    }


def _name(file: IO[bytes]) -> str:
    return "standard output" if file.name == "<stdout>" else str(file.name)
