"""`--decode schema` and `--encode schema`: values of typed topics as JSON, by the topics' registered schemas."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from metamq.cli.context import current
from metamq.cli.show.message_format import DecodedMessage, Render
from metamq.cli.show.output import say
from metamq.client.schemas.documents import TopicDocuments
from metamq.errors import ConfigError, MetamqError

if TYPE_CHECKING:
    from metamq.cli.messages.filters import Matches
    from metamq.client.model import Message
    from metamq.client.schemas.documents import Encode

F = TypeVar("F", bound=Callable[..., Any])

READ_AGAIN_S = 1.0
"""The least time between two reads of a topic's schemas: any sender can name an unknown version."""

decode_option = click.option(
    "--decode",
    type=click.Choice(["schema"]),
    help="Show values as JSON by the topic's registered schemas, also to --where. A value that does not decode is "
    "shown as it is, with the reason. JSON output has it beside the value, as `decoded` or `decode_error`.",
)


def encode_options(command: F) -> F:
    """Adds the options for encoder_of(). They arrive as `encode`, `schema_version` and `framing`."""
    for option in reversed((
        click.option("--encode", type=click.Choice(["schema"]), help="Encode JSON by the topic's registered schema. "
                     "The first line that does not fit ends the command; the error names its field."),
        click.option("--schema-version", type=click.IntRange(min=1), metavar="N", help="Encode by this version, "
                     "not by the newest."),
        click.option("--framing", type=click.Choice(["confluent"]), help="Begin JSON and Protobuf values as "
                     "Confluent's serializers do; Avro values always begin so."),
    )):  # fmt: skip
        command = option(command)
    return command


def encoder_of(topic: str, version: int | None, framing: Literal["confluent"] | None) -> Encode:
    """Returns the encoder of a topic's values. Raises as TopicDocuments, and TopicNotFound."""
    with current().admin() as admin:
        return TopicDocuments(topic, admin.load_schemas(topic)).encoder(version, framing)


def decoded_message(message: Message[bytes], documents: TopicDocuments, **limits: int) -> DecodedMessage:
    """Returns the message with its value as JSON text; with the raw value and the reason if it does not decode."""
    try:
        return DecodedMessage.of(message, documents.decode(message.value, **limits))
    except (ValueError, ConfigError) as error:
        return DecodedMessage.of(message, None, str(error))


class TopicsDecoder:
    """Decodes messages of several topics. It reads the schemas of a topic again for a version that it does not know."""

    def __init__(self, topics: Sequence[str]) -> None:
        """Reads the schemas. Raises ConfigError if no topic has any, or if a library is missing, and TopicNotFound."""
        self._documents: dict[str, TopicDocuments] = {}
        self._read_s: dict[str, float] = {}
        self._last: tuple[Message[bytes], DecodedMessage] | None = None
        with current().admin() as admin:
            problems = []
            for topic in topics:
                try:
                    self._documents[topic] = TopicDocuments(topic, admin.load_schemas(topic))
                except ConfigError as error:
                    problems.append(error)
        if not self._documents:
            raise problems[0]

    def __call__(self, message: Message[bytes]) -> DecodedMessage:
        """Returns the decoded message; of the last message, the same one again."""
        if self._last is None or self._last[0] is not message:
            self._last = message, self._decoded(message)
        return self._last[1]

    def _decoded(self, message: Message[bytes]) -> DecodedMessage:
        documents = self._documents.get(message.topic)
        if documents is None or not documents.knows_version(message.value):
            documents = self._read_again(message.topic)
        if documents is None:
            return DecodedMessage.of(message, None, f"topic {message.topic!r} has no registered schema")
        return decoded_message(message, documents)

    def _read_again(self, topic: str) -> TopicDocuments | None:
        now = time.monotonic()
        if now - self._read_s.get(topic, -READ_AGAIN_S) >= READ_AGAIN_S:
            self._read_s[topic] = now
            with contextlib.suppress(MetamqError), current().admin() as admin:
                self._documents[topic] = TopicDocuments(topic, admin.load_schemas(topic))
        return self._documents.get(topic)


def with_decoding(
    topics: Sequence[str], matches: Matches | None, render: Render, *, says_problems: bool
) -> tuple[Matches | None, Render]:
    """Returns the filter and the format for decoded messages. `says_problems`: on standard error, beside raw values."""
    decoder = TopicsDecoder(topics)

    def rendered(message: Message[bytes]) -> bytes:
        decoded = decoder(message)
        if decoded.problem and says_problems:
            say(f"{message.topic} {message.partition}@{message.offset} is not decoded: {decoded.problem}")
        return render(decoded)

    return None if matches is None else (lambda message: matches(decoder(message))), rendered
