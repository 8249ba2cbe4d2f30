"""The rules of a cluster that give and deny rights: one persistent node, which brokers follow.

metamq.security.rights decides by them. Each change is made by compare-and-set.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from metamq.errors import ConfigError
from metamq.security.rights import ALLOW, DENY, Resource, Rule, Rules
from metamq.zk.documents import items, read_document, texts
from metamq.zk.session.change import change_node

if TYPE_CHECKING:
    from metamq.zk.cluster.brokers import Watcher
    from metamq.zk.session.session import Session

NODE_BYTES_MAX = 900_000
"""A little less than ZooKeeper stores in a node."""


async def read_rules(session: Session, watch: Watcher | None = None) -> Rules:
    """Returns all rules. `watch` is called once if they change. Raises CorruptData, ConnectionLost."""
    path = session.paths.rights()
    node = await session.get_or_none(path, watch=watch)
    return _parsed(path, None if node is None else node.data)


async def change_rules(session: Session, change: Callable[[Rules], Rules]) -> None:
    """Stores `change(what is stored)` by compare-and-set; `change` may be called several times.

    Raises CorruptData, the errors of `change`, and ConnectionLost: then the outcome is unknown.
    """
    path = session.paths.rights()
    await change_node(session, path, lambda data: _parsed(path, data), change, rules_json)


def with_rules(rules: Rules, more: Rules) -> Rules:
    """Returns the rules and these ones, each once, in order."""
    return tuple(sorted({*rules, *more}, key=str))


def without_rules(rules: Rules, fewer: Rules) -> Rules:
    """Returns the rules without these ones. Raises ConfigError if one of them is not there."""
    for rule in fewer:
        if rule not in rules:
            raise ConfigError(f"there is no rule `{rule}`", hint="`metamq acl list` shows all rules.")
    return tuple(rule for rule in rules if rule not in fewer)


def rules_json(rules: Rules) -> bytes:
    """The data of the node. Raises ConfigError if it would be too large for ZooKeeper."""
    stored = [[rule.effect, rule.principal, rule.right, str(rule.resource)] for rule in rules]
    data = json.dumps({"rules": stored}).encode()
    if len(data) > NODE_BYTES_MAX:
        raise ConfigError(
            f"the rules would take {len(data):,} bytes, the limit is {NODE_BYTES_MAX:,}",
            hint="Use a prefix, as in topic:orders-*, and remove rules with `metamq acl remove`.",
        )
    return data


def _parsed(path: str, data: bytes | None) -> Rules:
    if data is None:
        return ()
    hint = "Delete this node with ZooKeeper's own client, then add the rules again: `metamq acl allow`."
    return read_document(f"the list of rights in ZooKeeper ({path})", data, _read, hint=hint)


def _read(document: dict[str, Any]) -> Rules:
    """Keeps rules of rights that this release does not know: they decide nothing here, and are not lost."""
    return tuple(_rule(*texts(one)) for one in items(document["rules"]))


def _rule(effect: str, principal: str, right: str, resource: str) -> Rule:
    if effect not in (ALLOW, DENY):
        raise ValueError(f"{effect[:40]!r} is not the effect of a rule")
    kind, _, name = resource.partition(":")
    return Rule(effect, principal, right, Resource(kind, name))
