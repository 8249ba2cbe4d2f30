"""Settings: one TOML file, then METAMQ_… in the environment, then arguments; a later source wins.

A setting is a field of a frozen dataclass. An unknown key is an error with a suggestion. An error names the source of
the value: the user must know which of the three places is wrong.

Other programs use the environment too: a Kubernetes Service called metamq puts METAMQ_PORT into every pod. So a
variable is an error only if it begins with the prefix of the section, as METAMQ_BROKER_…, or is very similar to a known
variable.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
import tomllib
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from metamq.client.checks import wrong_type
from metamq.errors import ConfigError
from metamq.security.config import SecurityConfig
from metamq.words import measure
from metamq.zk.paths import DEFAULT_ROOT

T = TypeVar("T")

ENVIRONMENT_PREFIX = "METAMQ_"
DEFAULT_ZOOKEEPER = "127.0.0.1:2181"
CONFIG_FILE_VARIABLE = "METAMQ_CONFIG"
ZOOKEEPER_VARIABLE = "METAMQ_ZOOKEEPER"
ROOT_VARIABLE = "METAMQ_ROOT"
CONTEXT_VARIABLE = "METAMQ_CONTEXT"
"""Chooses a context of `metamq context`; only the command line reads it."""
SECTIONS = ("broker", "producer", "consumer", "security")
VARIABLES = (
    CONFIG_FILE_VARIABLE, ZOOKEEPER_VARIABLE, ROOT_VARIABLE, CONTEXT_VARIABLE, "METAMQ_JAVA", "METAMQ_ZOOKEEPER_JARS",
    "METAMQ_MAVEN", "METAMQ_ZOOKEEPER_MEMORY", "METAMQ_ZOOKEEPER_ENSEMBLE", "METAMQ_ZOOKEEPER_ID", "METAMQ_LOG_FORMAT",
)  # fmt: skip
"""The variables that belong to no section."""
KEYS = ("zookeeper", "root", *SECTIONS)
"""The keys that are allowed at the top level of the file."""
NEAR = 0.85
"""From this similarity on, one name counts as a misspelling of another. Equal names have 1."""

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


class ClusterAccess(NamedTuple):
    """The way to a cluster."""

    zookeeper: str
    """"host:port,host:port/chroot"."""
    root: str = DEFAULT_ROOT
    """The root znode of metamq."""
    security: SecurityConfig = SecurityConfig()


def cluster_access(
    zookeeper: str | None, root: str | None, file: str | Path | None, security: SecurityConfig | None
) -> ClusterAccess:
    """Returns the way to a cluster: the arguments, the environment, the TOML file, or the defaults. Raises
    ConfigError."""
    return ClusterAccess(
        zookeeper_servers(zookeeper, file), zookeeper_root(root, file), security_config(security, file)
    )


def security_config(given: SecurityConfig | None, file: str | Path | None = None) -> SecurityConfig:
    """Returns the argument as it is, or the settings of [security] and METAMQ_SECURITY_... Raises ConfigError."""
    if given is None:
        return load(SecurityConfig, "security", file=file, arguments={})
    if not isinstance(given, SecurityConfig):
        raise wrong_type("`security`", "a metamq.SecurityConfig", given)
    return given


def load(
    cls: type[T],
    section: str,
    *,
    file: str | Path | None = None,
    arguments: Mapping[str, Any],
    others: type | None = None,
) -> T:
    """Returns an instance of the dataclass `cls` from the file's `[section]`, the environment and the arguments.

    An argument of None is ignored. `others` is the class that passes the arguments on: its own parameters count as
    known names in suggestions for a misspelled argument. Raises ConfigError that names the source and the key.
    """
    values: dict[str, Any] = {}
    file = file or os.environ.get(CONFIG_FILE_VARIABLE)
    for key, value in read_section(file, section).items():
        field = _field(cls, key, f"[{section}] of {file}")
        values[field.name] = _convert(cls, field, value, f"{key} in [{section}] of {file}")
    variables = {variable(section, field.name): field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    check_environment(variables, section)
    for name, field in variables.items():
        if name in os.environ:
            values[field.name] = _convert(cls, field, os.environ[name], name)
    for key, value in arguments.items():
        if value is not None:
            field = _field(cls, key, "the arguments", others)
            _check_argument(cls, field, value)
            values[field.name] = value
    return cls(**values)


def variable(section: str, key: str) -> str:
    """Returns the name of a setting's environment variable, as METAMQ_BROKER_PORT."""
    return f"{ENVIRONMENT_PREFIX}{section}_{key}".upper()


def check_environment(names: Collection[str] = (), section: str = "") -> None:
    """Raises ConfigError for a variable that is probably a misspelling of one of VARIABLES or the section's `names`."""
    known = {*VARIABLES, *names}
    others = tuple(variable(other, "") for other in SECTIONS if other != section)
    for name in sorted(os.environ):
        if not name.startswith(ENVIRONMENT_PREFIX) or name in known or name.startswith(others):
            continue
        prefix = variable(section, "")
        if section and name.startswith(prefix):
            raise unknown(name, list(names), "the environment", prefix)
        if difflib.get_close_matches(name, known, 1, NEAR):
            raise unknown(name, list(known), "the environment")


def read_file(file: str | Path | None) -> dict[str, Any]:
    """Returns the content of the TOML file; by default of the file $METAMQ_CONFIG, else {}. Raises ConfigError."""
    file = file or os.environ.get(CONFIG_FILE_VARIABLE)
    if file is None:
        return {}
    if not isinstance(file, str | os.PathLike):
        raise wrong_type("`config`", "a path", file)
    try:
        content = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error
    for key in content:
        if key not in KEYS:
            raise unknown(key, list(KEYS), str(file))
    return content


def read_section(file: str | Path | None, section: str) -> dict[str, Any]:
    """Returns one section of the file, empty if the file does not have the section."""
    values = read_file(file).get(section, {})
    if not isinstance(values, dict):
        raise ConfigError(f"{section!r} in {file} must be a table, [{section}]")
    return values


def zookeeper_servers(given: str | None, file: str | Path | None = None) -> str:
    """Returns ZooKeeper's address: the argument, $METAMQ_ZOOKEEPER, `zookeeper` in the file, else 127.0.0.1:2181."""
    return _text("zookeeper", given, ZOOKEEPER_VARIABLE, file, DEFAULT_ZOOKEEPER, "zk1:2181,zk2:2181/chroot")


def zookeeper_root(given: str | None, file: str | Path | None = None) -> str:
    """Returns the root znode of metamq: the argument, $METAMQ_ROOT, `root` in the file, else /meta."""
    return _text("root", given, ROOT_VARIABLE, file, DEFAULT_ROOT, DEFAULT_ROOT)


def _text(key: str, given: str | None, name: str, file: str | Path | None, default: str, example: str) -> str:
    check_environment()
    file = file or os.environ.get(CONFIG_FILE_VARIABLE)
    stored = read_file(file).get(key)  # reads the file in every case: a wrong file must raise an error
    found = given or os.environ.get(name) or stored or default
    if not isinstance(found, str):
        raise wrong_type(f"`{key}`" if given else f"{key} in {file}", f"a string like {example!r}", found)
    return found


def unknown(key: str, known: list[str], where: str, prefix: str = "") -> ConfigError:
    """Returns the error for an unknown key, with the most similar known key. All keys begin with `prefix`."""
    near = difflib.get_close_matches(key.removeprefix(prefix), [name.removeprefix(prefix) for name in known], 1)
    hint = f"Did you mean {prefix + near[0]!r}?" if near else f"Known: {', '.join(sorted(known))}."
    return ConfigError(f"unknown setting {key!r} in {where}", hint=hint)


def _field(cls: type[Any], key: str, where: str, others: type | None = None) -> dataclasses.Field[Any]:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    if key not in fields:
        more = [] if others is None else inspect.signature(others).parameters.values()
        raise unknown(key, [*fields, *(one.name for one in more if one.kind is not one.VAR_KEYWORD)], where)
    return fields[key]


def _convert(cls: type[Any], field: dataclasses.Field[Any], value: Any, source: str) -> Any:
    """Returns `value` as the field's type. Parses strings from the environment."""
    kinds = _kinds(typing.get_type_hints(cls)[field.name])
    if isinstance(value, str) and str not in kinds:
        value = _parse(value, field.name, kinds, source)
    if float in kinds and type(value) is int:
        value = float(value)
    if type(value) not in kinds:
        raise ConfigError(f"{source} must be {_wanted(field.name, kinds)}, not {value!r}")
    return value


def _check_argument(cls: type[Any], field: dataclasses.Field[Any], value: Any) -> None:
    """Raises WrongType. The callables are checked elsewhere."""
    kinds = _kinds(typing.get_type_hints(cls)[field.name])
    if not all(isinstance(kind, type) for kind in kinds):
        return
    fits = isinstance(value, (*kinds, int) if float in kinds else kinds)
    if not fits or (isinstance(value, bool) and bool not in kinds):
        raise wrong_type(f"`{field.name}`", _wanted(field.name, kinds), value)


def _wanted(name: str, kinds: tuple[type, ...]) -> str:
    """Returns a description of the values that a setting accepts."""
    words = {bool: "true or false", int: measure(name, whole=True), float: measure(name, whole=False), str: "a string"}
    return " or ".join(words[kind] for kind in kinds if kind in words)


def _kinds(hint: Any) -> tuple[type, ...]:
    if isinstance(hint, types.UnionType):
        return tuple(typing.get_args(hint))
    return (hint,)


def _parse(text: str, name: str, kinds: tuple[type, ...], source: str) -> Any:
    lowered = text.strip().lower()
    if bool in kinds and lowered in _TRUE | _FALSE:
        return lowered in _TRUE
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(lowered)
            except ValueError:
                continue
    raise ConfigError(f"{source} must be {_wanted(name, kinds)}, not {text!r}")
