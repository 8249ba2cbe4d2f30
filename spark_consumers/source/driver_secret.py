"""A secret of this user's drivers on this machine, from which the tokens of their queries are derived.

Spark plans each batch, and ends each write, in another process of the driver. With the secret, all of them, and all
queries with the same rights, use one token. So there are few tokens, and each new query renews its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from metamq.zk.server.jars import cache_folder

if TYPE_CHECKING:
    from metamq.security.config import SecurityConfig

SECRET_BYTES = 32
FILE_NAME = "spark-tokens.key"


def token_seed(security: SecurityConfig, rights: frozenset[tuple[str, str]]) -> bytes | None:
    """Returns the seed of the token for these rights. None: no secret can be kept, so each token is a new one."""
    secret = _secret(cache_folder() / FILE_NAME)
    if secret is None:
        return None
    return hmac.new(secret, f"{security!r} {sorted(rights)}".encode(), hashlib.sha256).digest()


def _secret(path: Path) -> bytes | None:
    """Returns the secret in the file, which only its owner can read; makes it if there is none."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            descriptor, made = tempfile.mkstemp(dir=path.parent)  # only its owner can read it
            try:
                with open(descriptor, "wb") as file:
                    file.write(secrets.token_bytes(SECRET_BYTES))
                with contextlib.suppress(FileExistsError):  # another process was first
                    os.link(made, path)
            finally:
                os.unlink(made)
        found = path.read_bytes()
        if len(found) == SECRET_BYTES and path.stat().st_uid == os.getuid():
            return found
    return None
