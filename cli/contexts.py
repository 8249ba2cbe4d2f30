"""Named clusters, and the choice of the cluster that a command works on.

The file `contexts.toml` has a name for each cluster, and the name in use. A context names a ZooKeeper address,
a root and a settings file. Certificates and the file with a password are named in the settings file, so the contexts
have no secret. Only the owner may read them: they show where the secrets are.

A context counts as a whole: a command does not take the address of one cluster and the certificates of another. The
cluster comes from the first of these that names one:

    --zookeeper
    --context
    METAMQ_ZOOKEEPER, or a settings file (--config or METAMQ_CONFIG) with `zookeeper`
    METAMQ_CONTEXT
    the context of `metamq context use`
    the default: 127.0.0.1:2181
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import click

from metamq.client.settings import CONTEXT_VARIABLE, ZOOKEEPER_VARIABLE, read_file
from metamq.errors import ConfigError
from metamq.private_files import OWNER_MODE, make_folder, replace_file

KEYS = ("zookeeper", "root", "config")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class NamedCluster:
    """A context. A text is empty if the context does not set it."""

    zookeeper: str = ""
    root: str = ""
    config: str = ""


class Choice(NamedTuple):
    """The context of a command, None for no context, and what chose the cluster."""

    name: str | None
    cluster: NamedCluster
    source: str


@dataclass(slots=True)
class Contexts:
    """The content of the file. `current` is empty if no context is in use."""

    current: str = ""
    named: dict[str, NamedCluster] = field(default_factory=dict)

    def get(self, name: str, source: str) -> NamedCluster:
        """Returns a context. Raises ConfigError."""
        if name in self.named:
            return self.named[name]
        near = difflib.get_close_matches(name, self.named, 1)
        known = f"There are: {', '.join(sorted(self.named))}." if self.named else "There is none yet."
        hint = f"Did you mean {near[0]!r}?" if near else f"{known} `metamq context add` adds one."
        raise ConfigError(f"there is no context {name!r} ({source})", hint=hint)


def contexts_file() -> Path:
    """Returns the path of the file with the contexts, which may not exist."""
    return Path(click.get_app_dir("metamq")) / "contexts.toml"


def read_contexts() -> Contexts:
    """Returns the contexts; none if there is no file. Raises ConfigError."""
    file = contexts_file()
    try:
        return _contexts(tomllib.loads(file.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return Contexts()
    except OSError as error:
        raise ConfigError(f"cannot read the contexts in {file}: {error.strerror}") from error
    except ValueError as error:
        hint = "Correct the file, or remove it and add the contexts again."
        raise ConfigError(f"{file} has no contexts: {error}", hint=hint) from error


def _contexts(document: dict[str, Any]) -> Contexts:
    named = document.get("contexts", {})
    current = document.get("current", "")
    if not isinstance(current, str) or not isinstance(named, dict):
        raise ValueError("`current` must be a name, and `contexts` a table")
    return Contexts(current, {name: _cluster(name, values) for name, values in named.items()})


def _cluster(name: str, values: Any) -> NamedCluster:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a name for a context: use letters, digits, '-' and '_'")
    if not isinstance(values, dict):
        raise ValueError(f"`contexts.{name}` must be a table")
    for key, value in values.items():
        if key not in KEYS or not isinstance(value, str):
            raise ValueError(f"`{key}` of the context {name!r} is not a text named {', '.join(KEYS)}")
    return NamedCluster(**values)


def _quoted(text: str) -> str:
    """Returns a TOML string. JSON's escapes of characters above U+FFFF are none of TOML's."""
    return json.dumps(text, ensure_ascii=False)


def write_contexts(contexts: Contexts) -> None:
    """Replaces the file. Raises OSError."""
    lines = ["# `metamq context` writes this file.", f"current = {_quoted(contexts.current)}"]
    for name, cluster in sorted(contexts.named.items()):
        values = [f"{key} = {_quoted(value)}" for key, value in asdict(cluster).items() if value]
        lines += ["", f"[contexts.{name}]", *values]
    make_folder(contexts_file().parent)
    replace_file(contexts_file(), "\n".join([*lines, ""]).encode(), OWNER_MODE)


def check_name(name: str) -> str:
    """Returns the name. Raises ConfigError if no context can have it."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not a name for a context", hint="Use letters, digits, '-' and '_'.")
    return name


def choose(zookeeper: str | None, context: str | None, config: str | None, *, implicit: bool = True) -> Choice:
    """Returns the choice for the options of a command. Without `implicit` only --context chooses a context.

    Raises ConfigError.
    """
    none = NamedCluster()
    if zookeeper and context:
        raise ConfigError("--zookeeper and --context both name a cluster", hint="Give one of them.")
    if zookeeper:
        return Choice(None, none, "--zookeeper")
    if context:
        return Choice(context, read_contexts().get(context, "--context"), "--context")
    if os.environ.get(ZOOKEEPER_VARIABLE):
        return Choice(None, none, ZOOKEEPER_VARIABLE)
    if read_file(config).get("zookeeper"):
        return Choice(None, none, "the settings file")
    if implicit and (name := os.environ.get(CONTEXT_VARIABLE)):
        return Choice(name, read_contexts().get(name, CONTEXT_VARIABLE), CONTEXT_VARIABLE)
    if implicit and (stored := read_contexts()).current:
        return Choice(stored.current, stored.get(stored.current, "in use"), "`metamq context use`")
    return Choice(None, none, "the default")
