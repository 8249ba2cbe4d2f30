"""`metamq topic schema`: the registered schemas of topics."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any, BinaryIO, TypeVar, get_args

import click

from metamq.cli.command import Group
from metamq.cli.context import current
from metamq.cli.show import units
from metamq.cli.show.output import TABLE_OR_JSON, TEXT_OR_JSON, print_json, print_line, print_table, say
from metamq.errors import ConfigError
from metamq.zk.cluster.schemas import SCHEMAS_BYTES_MAX, Compatibility, Schema

F = TypeVar("F", bound=Callable[..., Any])


@click.group("schema", cls=Group)
def schema() -> None:
    """List, show, register and check the schemas of a topic.

    \b
    metamq topic schema list orders
    """


def _definition(function: F) -> F:
    options = (
        click.argument("file", type=click.File("rb")),
        click.option(
            "--format",
            "kind",
            type=click.Choice(["json", "avro", "arrow"]),
            help="Format; else the file decides.",
        ),
        click.option("--message", metavar="NAME", help="The file is a Protobuf descriptor set; this is the message."),
    )
    for option in reversed(options):
        function = option(function)
    return function


def _read(file: BinaryIO, kind: str | None, message: str | None) -> Schema:
    """Returns the schema in a file. Raises ConfigError."""
    data = file.read(SCHEMAS_BYTES_MAX + 1)
    if len(data) > SCHEMAS_BYTES_MAX:
        hint = "Remove descriptions from the schema."
        raise ConfigError(f"{file.name} has more than {SCHEMAS_BYTES_MAX:,} bytes, the limit of schemas", hint=hint)
    if message is not None:
        return Schema("protobuf", f"{message} {base64.b64encode(data).decode()}")
    if kind == "arrow":
        return Schema("arrow", base64.b64encode(data).decode())
    try:
        text = data.decode()
    except UnicodeDecodeError:
        hint = "Give an .avsc file or a JSON Schema; for a Protobuf descriptor set, also --message."
        raise ConfigError(f"{file.name} is not UTF-8", hint=hint) from None
    return Schema(kind or ("avro" if '"fields"' in text and '"record"' in text else "json"), text)


@schema.command("list")
@click.argument("topic", type=units.EXISTING_TOPIC)
@TABLE_OR_JSON
def list_schemas(topic: str, output: str) -> None:
    """List the versions of a topic's schema.

    \b
    metamq topic schema list orders
    """
    with current().admin() as admin:
        schemas = admin.load_schemas(topic)
    if output == "json":
        print_json({"topic": topic, **schemas.to_document()})
        return
    rows = [(number, one.format, len(one.definition)) for number, one in enumerate(schemas.versions, 1)]
    print_table(["VERSION", "FORMAT", "CHARACTERS"], rows)
    say(f"Topic {topic} accepts {schemas.compatibility} compatible schemas.")


@schema.command()
@click.argument("topic", type=units.EXISTING_TOPIC)
@click.option("--version", "number", type=click.IntRange(min=1), help="Version; the newest without it.")
@TEXT_OR_JSON
def show(topic: str, number: int | None, output: str) -> None:
    """Show the definition of a topic's schema.

    \b
    metamq topic schema show orders
    metamq topic schema show orders --version 1 > order.avsc
    """
    with current().admin() as admin:
        versions = admin.load_schemas(topic).versions
    number = len(versions) if number is None else number
    if not 1 <= number <= len(versions):
        hint = f"Register one: metamq topic schema register {topic} FILE"
        raise ConfigError(f"topic {topic!r} does not have version {number} of a schema", hint=hint)
    one = versions[number - 1]
    if output == "json":
        print_json({"topic": topic, "version": number, "format": one.format, "definition": one.definition})
    else:
        print_line(one.definition)


@schema.command()
@click.argument("topic", type=units.EXISTING_TOPIC)
@_definition
@click.option("--compatibility", type=click.Choice(get_args(Compatibility)), help="Change the topic's rule.")
@TEXT_OR_JSON
def register(
    topic: str,
    file: BinaryIO,
    kind: str | None,
    message: str | None,
    compatibility: Compatibility | None,
    output: str,
) -> None:
    """Register a schema as the next version, if it is compatible.

    \b
    metamq topic schema register orders order.avsc
    metamq topic schema register orders order.json --compatibility full
    metamq topic schema register orders shop.desc --message shop.Order
    """
    with current().admin() as admin:
        number = admin.register_schema(topic, _read(file, kind, message), compatibility=compatibility)
    if output == "json":
        print_json({"topic": topic, "version": number})
    else:
        say(f"It is version {number} of the schema of topic {topic}.")


@schema.command()
@click.argument("topic", type=units.EXISTING_TOPIC)
@_definition
@TEXT_OR_JSON
def check(topic: str, file: BinaryIO, kind: str | None, message: str | None, output: str) -> None:
    """Check a schema without registering it; the exit status is 1 if it is refused.

    \b
    metamq topic schema check orders order.avsc
    """
    with current().admin() as admin:
        admin.check_schema(topic, _read(file, kind, message))
    if output == "json":
        print_json({"topic": topic, "compatible": True})
    else:
        say(f"Topic {topic} accepts the schema.")
