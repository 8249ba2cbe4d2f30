"""Settings: one TOML file, then METAMQ_… in the environment, then arguments; a later one wins.

A setting is a field of a frozen dataclass. Unknown keys are errors with a suggestion, and an error names the source
of the value, so that nobody has to guess which of three places was wrong.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from metamq.errors import ConfigError

T = TypeVar("T")

ENVIRONMENT_PREFIX = "METAMQ_"
DEFAULT_ZOOKEEPER = "127.0.0.1:2181"
CONFIG_FILE_VARIABLE = "METAMQ_CONFIG"

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


def load(cls: type[T], section: str, *, file: str | Path | None = None, arguments: Mapping[str, Any]) -> T:
    """An instance of the dataclass `cls` from the file's `[section]`, the environment and the arguments.

    Arguments that are None count as not given. Raises ConfigError, naming the source and the key.
    """
    values: dict[str, Any] = {}
    file = file or os.environ.get(CONFIG_FILE_VARIABLE)
    for key, value in read_section(file, section).items():
        field = _field(cls, key, f"[{section}] of {file}")
        values[field.name] = _convert(cls, field, value, f"{key} in [{section}] of {file}")
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        name = f"{ENVIRONMENT_PREFIX}{section.upper()}_{field.name.upper()}"
        if name in os.environ:
            values[field.name] = _convert(cls, field, os.environ[name], name)
    for key, value in arguments.items():
        if value is not None:
            values[_field(cls, key, "the arguments").name] = value
    return cls(**values)


def read_file(file: str | Path | None) -> dict[str, Any]:
    """The TOML file's content; without one, that of $METAMQ_CONFIG, else nothing. Raises ConfigError."""
    file = file or os.environ.get(CONFIG_FILE_VARIABLE)
    if file is None:
        return {}
    try:
        return tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error


def read_section(file: str | Path | None, section: str) -> dict[str, Any]:
    """One section of the file, empty when it is not there."""
    values = read_file(file).get(section, {})
    if not isinstance(values, dict):
        raise ConfigError(f"{section!r} in {file} is to be a table, [{section}]")
    return values


def zookeeper_servers(given: str | None, file: str | Path | None = None) -> str:
    """Where ZooKeeper is: the argument, $METAMQ_ZOOKEEPER, `zookeeper` in the file, else 127.0.0.1:2181."""
    file = file or os.environ.get(CONFIG_FILE_VARIABLE)
    servers = given or os.environ.get("METAMQ_ZOOKEEPER") or read_file(file).get("zookeeper") or DEFAULT_ZOOKEEPER
    if not isinstance(servers, str):
        raise ConfigError(f"zookeeper in {file} is to be a string like 'zk1:2181,zk2:2181/chroot', got {servers!r}")
    return servers


def unknown(key: str, known: list[str], where: str) -> ConfigError:
    """The error for a key nobody knows, with the nearest that somebody does."""
    near = difflib.get_close_matches(key, known, 1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(sorted(known))}."
    return ConfigError(f"unknown setting {key!r} in {where}", hint=hint)


def _field(cls: type[Any], key: str, where: str) -> dataclasses.Field[Any]:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    if key not in fields:
        raise unknown(key, list(fields), where)
    return fields[key]


def _convert(cls: type[Any], field: dataclasses.Field[Any], value: Any, source: str) -> Any:
    """`value` as the field's type; strings from the environment are parsed."""
    kinds = _kinds(typing.get_type_hints(cls)[field.name])
    if isinstance(value, str) and str not in kinds:
        value = _parse(value, kinds, source)
    if float in kinds and type(value) is int:
        value = float(value)
    if type(value) not in kinds:
        names = " or ".join(kind.__name__ for kind in kinds)
        raise ConfigError(f"{source} is to be {names}, got {value!r}")
    return value


def _kinds(hint: Any) -> tuple[type, ...]:
    if isinstance(hint, types.UnionType):
        return tuple(typing.get_args(hint))
    return (hint,)


def _parse(text: str, kinds: tuple[type, ...], source: str) -> Any:
    lowered = text.strip().lower()
    if bool in kinds and lowered in _TRUE | _FALSE:
        return lowered in _TRUE
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(lowered)
            except ValueError:
                continue
    raise ConfigError(f"{source} is to be {' or '.join(kind.__name__ for kind in kinds)}, got {text!r}")
