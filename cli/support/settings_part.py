"""The settings of this command and of the brokers on this machine: only known settings, never those of a secret.

The settings of metamq name files with secrets and have none. But a person may write a password into the wrong place.
So a value is shown only if its name is that of a setting. A setting that names a file is shown only if there is such
a file. The values that are left out count as secrets: the filter removes them everywhere else, too.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metamq.cli.support.redaction import SECRET_NAME
from metamq.cli.upkeep.sections import SECTIONS
from metamq.client.settings import ENVIRONMENT_PREFIX, KEYS, VARIABLES, variable

if TYPE_CHECKING:
    from metamq.cli.support.parcel import Parcel
    from metamq.cli.support.redaction import Redaction

SECURITY = "security"
PLACES = ("dir", "ca", "revoked", "certificate", "key", "password_file", "token_file", "jwks")
"""The settings of [security] that name a file or a folder."""
SECRET_FILES = ("key", "password_file", "token_file")
NO_FILE = "(not shown: there is no such file)"
_COMMON = re.compile(r"[A-Za-z]*|[\d.]*")
NO_SETTING = "(not shown: this is not a setting)"


def settings_document(file: str, parcel: Parcel, secrets: Redaction, folder: str = "") -> dict[str, Any] | None:
    """Returns the settings in a TOML file; None if it cannot be read, which the parcel notes.

    `folder` is the present folder of the process that uses the file, if it is another one.
    """
    try:
        content = tomllib.loads(Path(folder, file).read_text(encoding="utf-8"))
    except OSError as error:
        parcel.missing("the settings file", error)
        return None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):  # the error may quote the file
        parcel.missing(f"the settings file {file}", "it is not TOML")
        return None
    shown = ShownSettings(secrets, folder)
    return {"file": file, "settings": {key: shown.section(key, value) for key, value in content.items()}}


def shown_variables(environment: Mapping[str, str], secrets: Redaction, folder: str = "") -> dict[str, str]:
    """Returns the variables that are settings of metamq, and the names of those that only look like one."""
    secrets.hide(value for name, value in environment.items() if SECRET_NAME.search(name) and not os.path.exists(value))
    shown, found = ShownSettings(secrets, folder), {}
    known = {variable(section, one.name): (section, one.name) for section in SECTIONS for one in _fields(section)}
    for name, value in sorted(environment.items()):
        if name in known:
            found[name] = str(shown.setting(*known[name], value))
        elif name in VARIABLES:
            found[name] = value
        elif name.startswith(ENVIRONMENT_PREFIX):
            secrets.hide(_texts(value))
            found[name] = NO_SETTING
    return found


class ShownSettings:
    """The settings of a process, as they may be shown. It makes the secrets in their files known to the filter."""

    def __init__(self, secrets: Redaction, folder: str) -> None:
        self._secrets = secrets
        self._folder = folder

    def section(self, key: str, value: Any) -> Any:
        """Returns a value of the top level."""
        if key not in KEYS:
            self._secrets.hide(_texts(value))
            return NO_SETTING
        if not isinstance(value, dict):
            return value
        return {name: self.setting(key, name, one) for name, one in value.items()}

    def setting(self, section: str, name: str, value: Any) -> Any:
        """Returns the value of a setting in a section, or the reason why it is not shown."""
        if name not in {one.name for one in _fields(section)}:
            self._secrets.hide(_texts(value))
            return NO_SETTING
        if section != SECURITY or name not in PLACES or not value:
            return value
        place = Path(self._folder, str(value))
        if not place.exists():
            self._secrets.hide(_texts(value))
            return NO_FILE
        for file in [place] if name in SECRET_FILES else sorted(place.glob("*.key")) if name == "dir" else []:
            self._secrets.hide_file(file)
        return value


def _fields(section: str) -> tuple[Field[Any], ...]:
    return fields(SECTIONS[section]) if section in SECTIONS else ()


def _texts(value: Any) -> Iterator[str]:
    """Yields the texts in a value, except for single words and numbers, which other texts may have."""
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)
    elif not _COMMON.fullmatch(str(value)):
        yield str(value)
