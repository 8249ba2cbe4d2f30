"""The quotas of a cluster: metamq.security.quotas applies them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from metamq.errors import ConfigError
from metamq.security.quotas import LIMIT_MAX, QUOTAS_MAX, Quota, Quotas
from metamq.zk.documents import fields, number
from metamq.zk.paths import Paths
from metamq.zk.security.shared_node import SharedNode


def with_quota(quotas: Quotas, principal: str, quota: Quota) -> Quotas:
    """Returns the quotas with a new or changed one for the principal. Raises ConfigError."""
    if principal not in quotas and len(quotas) >= QUOTAS_MAX:
        raise ConfigError(f"there are {QUOTAS_MAX:,} quotas already, the limit", hint="Use one for all: '*'.")
    return {**quotas, principal: quota}


def without_quota(quotas: Quotas, principal: str) -> Quotas:
    """Returns the quotas without that of a principal. Raises ConfigError if it has none."""
    if principal not in quotas:
        raise ConfigError(f"{principal!r} has no quota of its own", hint="`metamq quota list` shows all quotas.")
    return {name: quota for name, quota in quotas.items() if name != principal}


def _encoded(quotas: Quotas) -> bytes:
    return json.dumps({name: quota._asdict() for name, quota in quotas.items()}).encode()


def _decoded(document: dict[str, Any]) -> Quotas:
    return {name: _quota(fields(limits)) for name, limits in document.items()}


def _quota(limits: Mapping[str, Any]) -> Quota:
    """Leaves out limits that this release does not know."""
    return Quota(**{name: number(limits[name], high=LIMIT_MAX) for name in Quota._fields if name in limits})


QUOTAS: SharedNode[Quotas] = SharedNode("quotas", Paths.quotas, {}, _decoded, _encoded, "metamq quota set")
