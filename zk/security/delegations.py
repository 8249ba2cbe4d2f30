"""The tokens of a cluster: metamq.security.delegation explains them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from metamq.errors import ConfigError
from metamq.security.delegation import Delegation, Delegations
from metamq.zk.documents import fields, items, number, text, texts
from metamq.zk.paths import Paths
from metamq.zk.security.shared_node import DATA_BYTES_MAX, SharedNode
from metamq.zk.security.users import read_verifiers, verifiers_json


def _encoded(delegations: Delegations) -> bytes:
    data = json.dumps(
        {
            token_id: {
                "principal": found.principal,
                "rights": sorted(found.rights),
                "expires_ms": found.expires_ms,
                "verifiers": verifiers_json(found.verifiers),
            }
            for token_id, found in delegations.items()
        }
    ).encode()
    if len(data) > DATA_BYTES_MAX:
        hint = "End queries, or end tokens with `metamq user end-tokens`."
        raise ConfigError("the tokens of all clients take too much space in ZooKeeper", hint=hint)
    return data


def _decoded(document: dict[str, Any]) -> Delegations:
    return {token_id: _delegation(fields(found)) for token_id, found in document.items()}


def _delegation(found: Mapping[str, Any]) -> Delegation:
    rights = frozenset((right, topic) for right, topic in map(texts, items(found["rights"])))
    verifiers = read_verifiers(fields(found["verifiers"]))
    return Delegation(text(found["principal"]), rights, number(found["expires_ms"]), verifiers)


DELEGATIONS: SharedNode[Delegations] = SharedNode("tokens", Paths.delegations, {}, _decoded, _encoded, "")
