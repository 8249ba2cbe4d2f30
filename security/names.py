"""The names of principals: users, and the owners of certificates."""

from __future__ import annotations

from metamq.errors import ConfigError


def check_name(name: str) -> str:
    """Returns the name of a principal. Raises ConfigError: it must be usable as a file name and in a rule."""
    allowed = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ._-@"
    if not 1 <= len(name) <= 64 or set(name) - set(allowed) or name[0] in ".-":
        raise ConfigError(
            f"{name!r} cannot be the name of a principal",
            hint="It has 1 to 64 of the characters A-Z a-z 0-9 . _ - @, and does not begin with a dot or a dash.",
        )
    if name.lower() == "ca":
        raise ConfigError("'ca' cannot be the name of a principal", hint="The files of the authority have that name.")
    return name
