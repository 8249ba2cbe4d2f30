"""Login by token: OAUTHBEARER (RFC 7628) over TLS, both ends.

    client                                                  broker
    AUTHENTICATE(OAUTHBEARER, the token)    ─────────>      checks its signature by a JWKS file, its audience, its time
                                            <─────────      done

The token is a JWT signed by the company's authority. A broker verifies it without a server, with the authority's public
keys from a file. It reads the file again after a change. A claim of the token names the principal. The connection ends
when the token expires; the client then reads its token file again and reconnects.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from metamq.errors import AuthenticationFailed, ConfigError

if TYPE_CHECKING:
    from metamq.security.config import SecurityConfig

log = logging.getLogger("metamq.security")

BEARER = "OAUTHBEARER"
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Signatures by a private key only: a broker that can verify a token cannot make one."""
TOKEN_BYTES_MAX = 3 * 1024
"""The frame of a login has at most 4 KiB."""
LEEWAY_S = 10
"""The accepted difference of clocks, in seconds."""
_GS2, _SEPARATOR, _SCHEME = b"n,,", b"\x01", b"auth=Bearer "


def _jwt() -> Any:
    try:
        import jwt
    except ImportError as error:
        raise ConfigError(
            f"a login by token needs the package PyJWT: {error}", hint="pip install 'metamq[security]'"
        ) from error
    return jwt


class TokenLogin:
    """The client's end of a login by token."""

    def __init__(self, address: str, token: str) -> None:
        self._address = address
        self._token = token

    def __repr__(self) -> str:
        return f"<login by token at {self._address}>"

    def first(self, offered: Sequence[str]) -> tuple[str, bytes]:
        """Returns the mechanism and the only message. Raises AuthenticationFailed, ConfigError."""
        if BEARER not in offered:
            raise AuthenticationFailed(
                self._address, "it takes no tokens", hint="Set `jwks` and `audience` in [security] of the brokers."
            )
        token = self._token.encode()
        if len(token) > TOKEN_BYTES_MAX:
            raise ConfigError(f"the token has {len(token):,} bytes, the limit is {TOKEN_BYTES_MAX:,}")
        return BEARER, _SEPARATOR.join((_GS2, _SCHEME + token, b"", b""))

    def next(self, data: bytes) -> bytes:
        """Returns no data: the login is done. Raises AuthenticationFailed."""
        if data:
            raise AuthenticationFailed(self._address, "it answers a token with data")
        return b""


class KnownToken(NamedTuple):
    """The content of a verified token."""

    principal: str
    expires_s: float
    """Seconds since 1970."""


class TokenVerifier:
    """Verifies tokens with the keys in a file. For the broker's loop only."""

    mechanism = BEARER

    def __init__(self, config: SecurityConfig, check_user: Callable[[str], None]) -> None:
        """`check_user` raises ConfigError for a name that no user may have. Raises ConfigError if the file of keys
        cannot be used."""
        self._check_user = check_user
        self._path = config.jwks
        self._audience = config.audience
        self._issuer = config.issuer or None
        self._claim = config.user_claim
        self._state = self._failed = self._state_of_file()
        self._keys = _keys_of(Path(self._path))

    def verify(self, message: bytes, peer: str) -> KnownToken:
        """Returns the content of the token in a client's message. Raises AuthenticationFailed."""
        parts = message.split(_SEPARATOR)
        if len(parts) != 4 or not parts[0].startswith((b"n,", b"y,")) or not parts[1].startswith(_SCHEME):
            raise AuthenticationFailed(peer, f"the message is not one of {BEARER}")
        jwt = _jwt()
        token = parts[1].removeprefix(_SCHEME).decode("ascii", "replace")
        try:
            claims = self._claims(jwt, token)
        except jwt.ExpiredSignatureError:
            raise AuthenticationFailed(peer, "the token has expired", hint="Renew the token file.") from None
        except jwt.InvalidAudienceError:
            raise AuthenticationFailed(peer, "the token is for another audience") from None
        except jwt.InvalidTokenError as error:
            log.info("a token of %s is not valid: %s", peer, error)
            raise AuthenticationFailed(peer, "the token is not valid", hint="The log of the broker says why.") from None
        principal = claims.get(self._claim)
        try:
            if not isinstance(principal, str):
                raise ConfigError("it has no such claim")
            self._check_user(principal)
        except ConfigError as error:
            reason = f"its claim {self._claim!r} cannot be the name of a user"
            log.info("a token of %s is refused: %s: %s", peer, reason, error.problem)
            raise AuthenticationFailed(peer, f"the token is refused: {reason}") from None
        return KnownToken(principal, float(claims["exp"]) + LEEWAY_S)

    def _claims(self, jwt: Any, token: str) -> dict[str, Any]:
        wanted = jwt.get_unverified_header(token).get("kid")
        error: Exception = jwt.InvalidTokenError("no key has its key id")
        for key in self._current_keys():
            if wanted is not None and key.key_id is not None and key.key_id != wanted:
                continue
            try:
                claims: dict[str, Any] = jwt.decode(
                    token, key=key, algorithms=[key.algorithm_name], audience=self._audience, issuer=self._issuer,
                    leeway=LEEWAY_S, options={"require": ["exp"]},
                )  # fmt: skip
            except jwt.InvalidSignatureError as failed:  # another key may fit
                error = failed
                continue
            return claims
        raise error

    def _current_keys(self) -> list[Any]:
        """Returns the keys in the file, or the last keys that could be read."""
        state = self._state_of_file()
        if state not in (self._state, self._failed):
            try:
                self._keys = _keys_of(Path(self._path))
                self._state = self._failed = state
                log.info("tokens are verified with the new keys of %s", self._path)
            except ConfigError as error:
                self._failed = state
                log.error("tokens are still verified with the former keys: %s", error)
        return self._keys

    def _state_of_file(self) -> tuple[int, int, int]:
        try:
            stat = os.stat(self._path)
        except OSError:
            return 0, 0, 0
        return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _keys_of(path: Path) -> list[Any]:
    """Returns the keys in a JWKS file. Raises ConfigError."""
    jwt = _jwt()
    hint = "It is the JSON of the authority's `jwks_uri`."
    try:
        keys = jwt.PyJWKSet.from_json(path.read_text(encoding="utf-8")).keys
    except OSError as error:
        raise ConfigError(f"the file of keys {path} cannot be read: {error.strerror}") from error
    except (jwt.PyJWTError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"the file {path} has no keys that can be used: {error}", hint=hint) from error
    found = [key for key in keys if key.algorithm_name in ALGORITHMS]
    if not found:
        raise ConfigError(f"the file {path} has no public key for signatures", hint=hint)
    return found
