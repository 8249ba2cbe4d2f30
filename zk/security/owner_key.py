"""Owners of groups without a certificate: ZooKeeper knows them by a secret that brokers give at the login.

All brokers compute the same secret for a principal, from a key in ZooKeeper that only they and administrators read. The
client proves to ZooKeeper by the scheme `digest` that it has the secret, over TLS.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import secrets
from typing import TYPE_CHECKING

from metamq.zk.errors import NodeExists

if TYPE_CHECKING:
    from metamq.zk.session.session import Session

KEY_BYTES = 32


async def read_owner_key(session: Session) -> bytes:
    """Returns the key; makes it if there is none. Raises NotAuthorized, ConnectionLost."""
    path = session.paths.owner_key()
    while True:
        node = await session.get_or_none(path)
        if node is not None:
            return node.data
        with contextlib.suppress(NodeExists):
            await session.create(path, secrets.token_bytes(KEY_BYTES), makepath=True)


def proof_of(key: bytes, principal: str) -> str:
    """Returns the principal's proof of identity for ZooKeeper: its name and its secret."""
    return f"{principal}:{hmac.new(key, principal.encode(), hashlib.sha256).hexdigest()}"


def digest_of(proof: str) -> str:
    """Returns the identity in access lists of a client that has this proof, as ZooKeeper computes it."""
    digest = base64.b64encode(hashlib.sha1(proof.encode()).digest()).decode()
    return f"{proof.partition(':')[0]}:{digest}"
