"""Delegation: a client grants some of its rights to others, for a limited time. Without I/O.

A client makes an id and a secret. It gives brokers the verifier of the secret (metamq.security.login), the rights, and
a time. The holder of the secret logs in as `token:ID` by SCRAM. It acts for the client that delegated, with these
rights only. So a task of Spark needs no password and no key: it has the secret of a token for its query's topics.

    the client's own rights are checked      when it delegates, and at each request of the token's holder
    ends                                     at its time, unless it is renewed; when the client, or an administrator,
                                             ends it; when the client's user is removed, or gets another password
    is not possible                          with a token: it cannot delegate
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from metamq.errors import ConfigError
from metamq.security.config import DelegatedConfig, SecurityConfig
from metamq.security.login import ITERATIONS, MECHANISMS, SALT_BYTES, TOKEN_PREFIX, Verifier, Verifiers, make_verifiers
from metamq.security.rights import ANY_TOPIC, READ, WRITE

MECHANISM = MECHANISMS[0]
SECRET_BYTES = 32
ID_CHARS = 16
LIFETIME_MAX_S = 7 * 86_400
DELEGATIONS_MAX = 1000
"""The most tokens of a cluster. One principal has at most a tenth of this number."""
OWN_CHARS_MAX = 50_000
"""The most characters of topics in all tokens of a principal. All principals' tokens share one node."""
KEY_BYTES = 64
"""The length of a key of SHA-512."""
RIGHTS_MAX = 200
"""As DELEGATED_RIGHTS_MAX in metamq.wire.limits."""


class Delegation(NamedTuple):
    """A token, as brokers store it."""

    principal: str
    """The client that delegated."""
    rights: frozenset[tuple[str, str]]
    """(right, topic): READ or WRITE; a topic's name, or ANY_TOPIC for all topics on which the client has the right."""
    expires_ms: int
    """Milliseconds since 1970."""
    verifiers: Verifiers


Delegations = Mapping[str, Delegation]
"""By the token's id."""


def make_token(config: SecurityConfig, seed: bytes | None = None) -> DelegatedConfig:
    """Returns the settings of a token for clients of the same cluster. Its id and secret are random, or derived from
    `seed`, which must be as secret. Raises ConfigError if a file of the authority cannot be read."""
    seed = seed or secrets.token_bytes(SECRET_BYTES)
    files = config.files()
    return DelegatedConfig(
        zookeeper_tls=config.zookeeper_tls,
        token_id=hmac.new(seed, b"id", hashlib.sha256).hexdigest()[:ID_CHARS],
        secret=hmac.new(seed, b"secret", hashlib.sha256).hexdigest(),
        authority=_read(files.ca),
        revocations=_read(files.revoked) if files.revoked else "",
    )


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the file {path} of the authority cannot be read: {error.strerror}") from error


def verifier_of(token: DelegatedConfig) -> Verifier:
    """Returns the secret's verifier, the same in each call. A fixed salt is enough, since the secret is random."""
    salt = hashlib.sha256(token.token_id.encode()).digest()[:SALT_BYTES]
    return make_verifiers(token.secret, salt)[MECHANISM]


def find_token(delegations: Delegations, user: str, now_ms: int) -> Delegation | None:
    """Returns the token of a user name, or None if there is none or it has expired."""
    found = delegations.get(user.removeprefix(TOKEN_PREFIX)) if user.startswith(TOKEN_PREFIX) else None
    return found if found is not None and found.expires_ms > now_ms else None


def rights_on(right: str, topics: Iterable[str]) -> frozenset[tuple[str, str]]:
    """Returns the right on each topic, or on all topics if there are too many for a token."""
    found = frozenset((right, topic) for topic in topics)
    return found if len(found) <= RIGHTS_MAX else frozenset({(right, ANY_TOPIC)})


def check_rights(rights: frozenset[tuple[str, str]]) -> None:
    """Raises ConfigError if no token can have these rights."""
    if not rights or len(rights) > RIGHTS_MAX:
        raise ConfigError(f"a token has 1 to {RIGHTS_MAX} rights, not {len(rights)}", hint=f"Use {ANY_TOPIC!r}.")
    for right, _topic in rights:
        if right not in (READ, WRITE):
            raise ConfigError(f"a token cannot have the right {right[:40]!r}", hint=f"It is {READ} or {WRITE}.")


def is_renewed(known: Delegation | None, wanted: Delegation, now_ms: int) -> bool:
    """True if the token has the wanted rights, and at least half of the wanted time."""
    if known is None or known._replace(expires_ms=wanted.expires_ms) != wanted:
        return False
    return known.expires_ms - now_ms >= (wanted.expires_ms - now_ms) / 2


def with_token(delegations: Delegations, token_id: str, wanted: Delegation, now_ms: int) -> Delegations:
    """Returns the tokens with a new or renewed one, without those that have expired. Raises ConfigError.

    A token with at least half of the wanted time does not change, so most requests to brokers write nothing. Renewing
    never shortens a token.
    """
    known = delegations.get(token_id)
    if known is not None and known.principal != wanted.principal:
        raise ConfigError("another client has a token with this id", hint="Make a new one.")
    if is_renewed(known, wanted, now_ms):
        return delegations
    kept = {one: found for one, found in delegations.items() if found.expires_ms > now_ms and one != token_id}
    owned = [found for found in kept.values() if found.principal == wanted.principal]
    own = len(owned)
    chars = sum(len(topic) for found in (*owned, wanted) for _right, topic in found.rights)
    if chars > OWN_CHARS_MAX:
        raise ConfigError(
            f"the tokens of {wanted.principal} name topics with {chars:,} characters, the limit is {OWN_CHARS_MAX:,}",
            hint=f"Delegate the right on {ANY_TOPIC!r}, or let queries end.",
        )
    if len(kept) >= DELEGATIONS_MAX or own >= DELEGATIONS_MAX // 10:
        raise ConfigError(
            f"{wanted.principal} has {own:,} tokens, and the cluster {len(kept):,}: the limits are "
            f"{DELEGATIONS_MAX // 10:,} and {DELEGATIONS_MAX:,}",
            hint="Let queries end, or shorten `tokenLifetime`.",
        )
    return {**kept, token_id: wanted}


def without_token(delegations: Delegations, token_id: str, principal: str) -> Delegations:
    """Returns the tokens without one, if it is of this principal."""
    return {one: found for one, found in delegations.items() if one != token_id or found.principal != principal}


def without_tokens_of(delegations: Delegations, principal: str) -> Delegations:
    """Returns the tokens without those of a principal."""
    return {one: found for one, found in delegations.items() if found.principal != principal}


def check_verifier(verifier: Verifier) -> None:
    """Raises ConfigError unless verifier_of() could have made it. It is stored beside those of others."""
    salt, stored, server, iterations = verifier
    if (len(salt), len(stored), len(server), iterations) != (SALT_BYTES, KEY_BYTES, KEY_BYTES, ITERATIONS):
        raise ConfigError(
            "the verifier of a token is not one of SCRAM-SHA-512", hint=f"It has {ITERATIONS:,} iterations."
        )
