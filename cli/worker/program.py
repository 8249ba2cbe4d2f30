"""The program of a worker: the functions and objects of the user, each at a path like `shop.billing:bill`."""

from __future__ import annotations

import builtins
import difflib
import inspect
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from metamq.cli.show.user_objects import SEPARATOR, import_module, load
from metamq.client.checks import check_listener
from metamq.client.offsets.offsets_database import DatabaseOffsets
from metamq.client.schemas.topic import Topic
from metamq.errors import ConfigError

GUESS_RATIO = 0.8
"""The likeness of a class that is guessed: most names end with Error, so difflib's own 0.6 finds any of them."""


class Program(NamedTuple):
    """The functions that a worker calls. With `is_async` they run in the loop of asyncio, otherwise in threads."""

    handler: Callable[..., Any]
    takes_consumer: bool
    """True if the second argument of the handler is the consumer."""
    lifespan: Callable[[], Any] | None
    """Returns a context manager: it begins before the worker joins its group, and ends after the worker has left."""
    is_async: bool


def load_program(handler_path: str, lifespan_path: str | None) -> Program:
    """Imports the functions. Raises ConfigError, WrongType, and each MetamqError that an import raises."""
    handler = load(handler_path)
    if not callable(handler) or isinstance(handler, type):
        raise ConfigError(f"{handler_path} is a {_kind(handler)}, not a function", hint=_handler_hint(handler_path))
    check_listener(handler)
    lifespan = None if lifespan_path is None else load(lifespan_path)
    if lifespan_path is not None and not _takes(lifespan, 0):
        raise ConfigError(
            f"{lifespan_path} is not a function without arguments",
            hint="Write it with @contextmanager or @asynccontextmanager, and no argument.",
        )
    takes_consumer = not _takes(handler, 1)
    if takes_consumer and not _takes(handler, 2):
        raise ConfigError(f"{handler_path} does not take one message", hint=_handler_hint(handler_path))
    is_async = any(map(inspect.iscoroutinefunction, (handler, type(handler).__call__)))
    return Program(handler, takes_consumer, lifespan, is_async)


def load_exceptions(option: str, paths: Sequence[str]) -> tuple[type[Exception], ...]:
    """Imports classes of exceptions; a name without a module is one of Python's own. Raises as load()."""
    return tuple(_exception_at(option, path) for path in paths)


def _exception_at(option: str, path: str) -> type[Exception]:
    module_name, _, name = path.rpartition(SEPARATOR)
    module = import_module(module_name, path) if module_name else builtins
    try:
        found = attrgetter(name)(module)
    except AttributeError:
        classes = [one for one, value in vars(module).items() if _is_exception(value)]
        near = difflib.get_close_matches(name, classes, 1, GUESS_RATIO)
        prefix = path.removesuffix(name)
        guess = f"Did you mean {prefix}{near[0]}? " if near else ""
        where = f"the module {module_name} has" if module_name else "Python has"
        raise ConfigError(
            f"{option} {path}: {where} no exception of this name",
            hint=f"{guess}Write MODULE:CLASS, as sqlalchemy.exc:OperationalError.",
        ) from None
    if not _is_exception(found):
        raise ConfigError(
            f"{option} {path} is no class of exceptions",
            hint="Give a class, as psycopg:OperationalError, or the name of one of Python's.",
        )
    kind: type[Exception] = found
    return kind


def _is_exception(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)


def load_others(decode: str | None, offsets: str | None) -> dict[str, Any]:
    """Imports the arguments `decode` and `offsets` of the Consumer, if they are given. Raises as load()."""
    found = {}
    if decode is not None:
        found["decode"] = load(decode)
        if not callable(found["decode"]):
            raise ConfigError(
                f"--decode {decode} is a {_kind(found['decode'])}, not a function",
                hint="Give a function of the bytes, as json:loads.",
            )
    if offsets is not None:
        found["offsets"] = load(offsets)
        if not hasattr(found["offsets"], "claimed"):
            raise ConfigError(
                f"--offsets {offsets} is a {_kind(found['offsets'])}",
                hint="Give the path of a DatabaseOffsets or FileOffsets.",
            )
    return found


def check_together(path: str, program: Program, consumer: dict[str, Any], run: dict[str, Any]) -> None:
    """Raises ConfigError unless the options fit together, and the handler at the path fits them."""
    auto_commit, is_database = consumer["auto_commit"], isinstance(consumer.get("offsets"), DatabaseOffsets)
    if isinstance(consumer["topics"], Topic) and "decode" in consumer:
        raise ConfigError("--topic is a Topic, which decodes the values", hint="Leave --decode out.")
    if run["order"] == "key" and is_database and not auto_commit:
        raise ConfigError(
            "--order key does not work with --no-auto-commit and --offsets of a database: a transaction would commit "
            "the offset of a message before unfinished ones",
            hint="Leave --order key out, or --no-auto-commit.",
        )
    if not auto_commit and not program.takes_consumer:
        raise ConfigError(
            f"{path} cannot commit, and --no-auto-commit leaves that to it",
            hint=f"Write `def {_name_in(path)}(message, consumer)`, and call consumer.commit(message).",
        )
    if auto_commit and program.takes_consumer and is_database:
        raise ConfigError(
            f"--offsets is a database, and {path} gets the consumer, but the worker commits by itself",
            hint="Give --no-auto-commit, and call consumer.commit(message, connection=...). Or write "
            f"`def {_name_in(path)}(message)`, which does not commit.",
        )


def load_topics(given: Sequence[str]) -> list[str] | Topic[Any]:
    """Returns names as they are, or the Topic at a path. Raises as load()."""
    paths = [one for one in given if SEPARATOR in one]
    if not paths:
        return list(given)
    if len(given) > 1:
        raise ConfigError(
            f"{paths[0]} is a Topic, and there is another --topic",
            hint="A worker reads one Topic, or several topics by their names.",
        )
    found = load(paths[0])
    if not isinstance(found, Topic):
        raise ConfigError(
            f"--topic {paths[0]} is a {_kind(found)}, not a metamq.Topic",
            hint="Give the name of a topic, or the path of a Topic.",
        )
    return found


def _takes(function: Any, count: int) -> bool:
    """Returns True if the function can be called with so many arguments."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # a function in C may have no signature
        return count < 2
    return True


def _handler_hint(path: str) -> str:
    name = _name_in(path)
    return f"Write `def {name}(message)`, or `def {name}(message, consumer)`; each may begin with `async`."


def _name_in(path: str) -> str:
    name = path.rpartition(SEPARATOR)[2]
    return name if name.isidentifier() else "handle"


def _kind(value: object) -> str:
    return "class" if isinstance(value, type) else f"value of type {type(value).__name__}"
