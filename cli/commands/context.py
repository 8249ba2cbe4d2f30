"""`metamq context`: list, use, add, remove, show."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path

import click

from metamq.cli.command import Group
from metamq.cli.context import current
from metamq.cli.contexts import NamedCluster, check_name, contexts_file, read_contexts, write_contexts
from metamq.cli.show.output import TABLE_OR_JSON, TEXT_OR_JSON, print_json, print_table, say
from metamq.cli.show.units import Parsed
from metamq.client.settings import read_file
from metamq.errors import ConfigError

CONTEXT = Parsed("context", check_name)


@click.group(cls=Group)
def context() -> None:
    """Name clusters, and choose the one that commands work on.

    \b
    metamq context add prod --zookeeper zk1:2181,zk2:2181 --config ./prod.toml
    metamq context use prod
    metamq topic list --context test

    The cluster comes from the first of these that names one: --zookeeper; --context; METAMQ_ZOOKEEPER, or `zookeeper`
    in a settings file; METAMQ_CONTEXT; `metamq context use`; the default. A context counts as a whole: its root and its
    settings file belong to it. `metamq broker` uses a context only with --context. Programs do not read contexts.
    """


@context.command("list")
@TABLE_OR_JSON
def list_contexts(output: str) -> None:
    """List the contexts. The one in use has a star.

    \b
    metamq context list
    """
    found = read_contexts()
    if output == "json":
        rows = [{"name": name, "in_use": name == found.current, **asdict(one)} for name, one in found.named.items()]
        print_json(rows)
        return
    print_table(
        ["", "NAME", "ZOOKEEPER", "ROOT", "SETTINGS FILE"],
        [
            ["*" if name == found.current else " ", name, one.zookeeper, one.root, one.config]
            for name, one in sorted(found.named.items())
        ],
    )


@context.command()
@click.argument("name", type=CONTEXT)
@TEXT_OR_JSON
def add(name: str, output: str) -> None:
    """Add the context NAME, or replace it, with the given --zookeeper, --root and --config.

    Secrets stay in their own files: the settings file names certificates, or the file with a password. Only you may
    read the file of the contexts. `metamq context show` prints its path.

    \b
    metamq context add local --zookeeper 127.0.0.1:2181
    metamq context add prod --zookeeper zk1:2181,zk2:2181 --config ./prod.toml
    """
    given = current()
    config = "" if given.config is None else os.path.abspath(given.config)
    if not given.zookeeper and not (config and read_file(config).get("zookeeper")):
        raise ConfigError("the context names no cluster", hint="Give --zookeeper, or --config with `zookeeper` in it.")
    if config:
        read_file(config)  # a wrong file is an error now, not at the next command
    contexts = read_contexts()
    done = "changed" if name in contexts.named else "added"
    contexts.named[name] = NamedCluster(given.zookeeper or "", given.root or "", config)
    write_contexts(contexts)
    if output == "json":
        print_json({"name": name, **asdict(contexts.named[name])})
    else:
        say(f"Context {name} is {done}. `metamq context use {name}` makes it the one in use.")


@context.command()
@click.argument("name", type=CONTEXT, required=False)
@click.option("--none", is_flag=True, help="Use no context from now on.")
@TEXT_OR_JSON
def use(name: str | None, none: bool, output: str) -> None:
    """Work on the context NAME from now on, in all shells.

    \b
    metamq context use prod
    metamq context use --none
    """
    if (name is None) != none:
        raise click.UsageError("give the name of a context, or --none")
    contexts = read_contexts()
    if name is not None:
        contexts.get(name, "metamq context use")
    write_contexts(replace(contexts, current=name or ""))
    if output == "json":
        print_json({"in_use": name})
    else:
        say("No context is in use." if name is None else f"Context {name} is in use.")
    choice = current().choice()
    if name is not None and choice.name != name:
        say(f"But commands in this shell work on {current().access().zookeeper}: {choice.source} wins.", fg="yellow")


@context.command()
@click.argument("name", type=CONTEXT)
@TEXT_OR_JSON
def remove(name: str, output: str) -> None:
    """Remove the context NAME. The cluster and the settings file stay as they are.

    \b
    metamq context remove prod
    """
    contexts = read_contexts()
    contexts.get(name, "metamq context remove")
    del contexts.named[name]
    write_contexts(replace(contexts, current="" if contexts.current == name else contexts.current))
    if output == "json":
        print_json({"removed": name})
    else:
        say(f"Context {name} is removed.")


@context.command()
@TABLE_OR_JSON
def show(output: str) -> None:
    """Show the cluster that a command would work on, and what chose it.

    \b
    metamq context show
    metamq context show --context prod -o json | jq -r .zookeeper
    """
    choice, access, config = current().choice(), current().access(), current().config_file
    found = {
        "context": choice.name,
        "chosen_by": choice.source,
        "zookeeper": access.zookeeper,
        "root": access.root,
        "config": None if config in (None, os.devnull) else str(Path(str(config))),
        "tls": access.security.is_on,
        "contexts_file": str(contexts_file()),
    }
    if output == "json":
        print_json(found)
        return
    names = ("Context", "Chosen by", "ZooKeeper", "Root", "Settings file", "TLS", "Contexts in")
    values = ["yes" if value is True else "no" if value is False else value for value in found.values()]
    print_table(["SETTING", "VALUE"], zip(names, values, strict=True))
