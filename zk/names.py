"""Names: the rules for names of topics, groups, consumers and brokers, and the names of partitions."""

from __future__ import annotations

import re
from functools import lru_cache

from metamq.errors import ConfigError, WrongType

MAX_NAME_CHARS = 200

DEAD_LETTER_SUFFIX = ".dead-letter"
"""The suffix of a group's name in the name of its dead-letter topic."""

RETRY_SUFFIX = ".retry"
"""The suffix of a group's name in the name of its retry topic."""
MAX_GROUP_CHARS = MAX_NAME_CHARS - len(DEAD_LETTER_SUFFIX)

OWN = "~"
"""The first character in the names of a broker's own logs: no topic's name can begin with it."""

NAMES_KEPT = 1 << 16
"""Names of partitions whose numbers are kept in memory."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")
_OUTSIDE = re.compile(r"[^A-Za-z0-9._-]")
_PARTITION = re.compile(r"(0|[1-9][0-9]{0,8})-(0|[1-9][0-9]{0,8})")
_RULE = f"Names have 1 to {MAX_NAME_CHARS} characters, each a letter a-z or A-Z, a digit, '.', '_' or '-'."


def check_name(kind: str, name: str) -> str:
    """Returns `name`. `kind` says what it names ("topic", "group", "consumer id").

    Raises ConfigError with the kind, the wrong character and the rule.
    """
    if not isinstance(name, str):
        hint = f"Give its `name`, {name.name!r}." if hasattr(name, "name") else _RULE
        raise ConfigError(f"{kind} is {name!r}, not a string", hint=hint)
    if _NAME.fullmatch(name) and name not in (".", ".."):
        return name
    outside = _OUTSIDE.search(name)
    if not name:
        problem = f"{kind} is empty"
    elif outside is not None:
        problem = f"{kind} {name!r} has {outside.group()!r} at character {outside.start() + 1}"
    elif len(name) > MAX_NAME_CHARS:
        problem = f"{kind} {name[:30]!r}... has {len(name):,} characters"
    else:
        problem = f"{kind} {name!r} is a path"
    raise ConfigError(problem, hint=_RULE + " '.' and '..' are not names.")


def check_node(kind: str, name: str) -> str:
    """Returns `name`, the name of an existing thing, by any rule.

    Raises ConfigError if no node in ZooKeeper can have it.
    """
    if not isinstance(name, str) or not name.isprintable() or "/" in name or name in ("", ".", ".."):
        check_name(kind, name)
    return name


def check_topic(name: str) -> str:
    """Returns `name`. Raises ConfigError if it cannot be the name of a topic and of a broker's folder."""
    check_name("topic", name)
    return _without_dot("topic", name)


def is_pattern(text: str) -> bool:
    """Returns True if the text has a wildcard: a topic's name has none."""
    return any(wildcard in text for wildcard in "*?[")


def check_group(name: str) -> str:
    """Returns `name`. Raises ConfigError if it cannot be the name of a consumer group and of its dead-letter topic."""
    check_name("group", name)
    if len(name) > MAX_GROUP_CHARS:
        raise ConfigError(
            f"group {name[:30]!r}... has {len(name)} characters",
            hint=f"A group has at most {MAX_GROUP_CHARS}: {DEAD_LETTER_SUFFIX!r} is added to it.",
        )
    return _without_dot("group", name)


def _without_dot(kind: str, name: str) -> str:
    if name.startswith("."):
        raise ConfigError(
            f"{kind} {name!r} begins with a dot", hint="It, or its dead-letter topic, could not be a folder."
        )
    return name


def check_consumer(name: str) -> str:
    """Returns `name`. Raises ConfigError if it cannot be a consumer's id."""
    return check_name("consumer id", name)


def check_path(path: str, what: str = "a znode path") -> str:
    """Returns `path`. Raises ConfigError unless it is "/name/name" with plain names; "/" alone is not allowed."""
    if not path.startswith("/"):
        raise ConfigError(f"{what}, {path!r}, does not start with '/'", hint='Write it like "/meta".')
    for name in path[1:].split("/"):
        check_name(f"a part of {what} ({path})", name)
    return path


def partition_name(broker_id: int, index: int) -> str:
    """The name of partition `index` at the broker: (0, 3) is "0-3". Raises ConfigError for negative numbers."""
    name = f"{broker_id}-{index}"
    parse_partition(name)
    return name


def is_partition(name: str) -> bool:
    """True if it is the name of a partition."""
    return _PARTITION.fullmatch(name) is not None


def parse_partition(name: str) -> tuple[int, int]:
    """(broker id, index) of a partition's name: "0-3" is (0, 3). Raises ConfigError if it is not such a name.

    It is also a sort key, which puts "0-10" after "0-9": `sorted(names, key=parse_partition)`.
    """
    try:
        return _parsed(name)
    except TypeError:
        raise WrongType(f"partition must be a string, not {name!r}", hint='Write it like "0-3".') from None


@lru_cache(maxsize=NAMES_KEPT)
def _parsed(name: str) -> tuple[int, int]:
    match = _PARTITION.fullmatch(name)
    if match is None:
        raise ConfigError(f"partition {name!r} is not a broker id, a '-' and an index", hint='Write it like "0-3".')
    return int(match.group(1)), int(match.group(2))
