"""The users of a cluster who log in by password. ZooKeeper has no passwords, only their verifiers
(metamq.security.login).
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from metamq.errors import ConfigError
from metamq.security.config import RESERVED
from metamq.security.login import MECHANISMS, Verifier, Verifiers
from metamq.zk.documents import fields, number, text
from metamq.zk.paths import Paths
from metamq.zk.security.shared_node import SharedNode

Users = Mapping[str, Verifiers]
"""The verifiers of each user, by name."""
USERS_MAX = 1000
ITERATIONS_MAX = 10_000_000


def with_user(users: Users, name: str, verifiers: Verifiers) -> Users:
    """Returns the users with a new one, or with a changed password. Raises ConfigError."""
    if name in RESERVED:
        raise ConfigError(f"{name!r} is the name of a certificate", hint="Choose another one.")
    if name not in users and len(users) >= USERS_MAX:
        raise ConfigError(
            f"there are {USERS_MAX:,} users already, the limit", hint="Remove one, or give programs certificates."
        )
    return {**users, name: verifiers}


def without_user(users: Users, name: str) -> Users:
    """Returns the users without one. Raises ConfigError if there is no such user."""
    if name not in users:
        raise ConfigError(f"there is no user {name!r}", hint="`metamq user list` shows all users.")
    return {one: verifiers for one, verifiers in users.items() if one != name}


def users_json(users: Users) -> bytes:
    """The data of the node."""
    return json.dumps({name: verifiers_json(verifiers) for name, verifiers in users.items()}).encode()


def verifiers_json(verifiers: Verifiers) -> dict[str, dict[str, object]]:
    """The JSON document of verifiers."""
    return {mechanism: _to_json(verifier) for mechanism, verifier in verifiers.items()}


def _to_json(verifier: Verifier) -> dict[str, object]:
    keys = {name: base64.b64encode(getattr(verifier, name)).decode() for name in ("salt", "stored_key", "server_key")}
    return {**keys, "iterations": verifier.iterations}


def _decoded(document: dict[str, Any]) -> Users:
    return {name: read_verifiers(fields(verifiers)) for name, verifiers in document.items()}


def read_verifiers(stored: Mapping[str, Any]) -> Verifiers:
    """Reads the JSON document of verifiers. Raises ValueError or a similar error."""
    return {name: _verifier(fields(one)) for name, one in stored.items() if name in MECHANISMS}


def _verifier(one: Mapping[str, Any]) -> Verifier:
    salt, stored, server = (_bytes(text(one[name])) for name in ("salt", "stored_key", "server_key"))
    return Verifier(salt, stored, server, number(one["iterations"], high=ITERATIONS_MAX))


def _bytes(value: str) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from error


USERS: SharedNode[Users] = SharedNode("users", Paths.users, {}, _decoded, users_json, "metamq user add")
