"""The rules of a cluster that allow and deny rights: metamq.security.rights decides by them."""

from __future__ import annotations

import json
from typing import Any

from metamq.errors import ConfigError
from metamq.security.rights import ALLOW, DENY, Resource, Rule, Rules
from metamq.zk.documents import items, texts
from metamq.zk.paths import Paths
from metamq.zk.security.shared_node import DATA_BYTES_MAX, SharedNode


def with_rules(rules: Rules, more: Rules) -> Rules:
    """Returns the rules with these added, each once, in order."""
    return tuple(sorted({*rules, *more}, key=str))


def without_rules(rules: Rules, fewer: Rules) -> Rules:
    """Returns the rules without these. Raises ConfigError if one of these does not exist."""
    for rule in fewer:
        if rule not in rules:
            raise ConfigError(f"there is no rule `{rule}`", hint="`metamq acl list` shows all rules.")
    return tuple(rule for rule in rules if rule not in fewer)


def rules_json(rules: Rules) -> bytes:
    """The data of the node. Raises ConfigError if it would be too large for ZooKeeper."""
    stored = [[rule.effect, rule.principal, rule.right, str(rule.resource)] for rule in rules]
    data = json.dumps({"rules": stored}).encode()
    if len(data) > DATA_BYTES_MAX:
        raise ConfigError(
            f"the rules would take {len(data):,} bytes, the limit is {DATA_BYTES_MAX:,}",
            hint="Use a prefix, as in topic:orders-*, and remove rules with `metamq acl remove`.",
        )
    return data


def _decoded(document: dict[str, Any]) -> Rules:
    """Keeps rules with rights that this release does not know: they decide nothing here, and are not lost."""
    return tuple(_rule(*texts(one)) for one in items(document["rules"]))


def _rule(effect: str, principal: str, right: str, resource: str) -> Rule:
    if effect not in (ALLOW, DENY):
        raise ValueError(f"{effect[:40]!r} is not the effect of a rule")
    kind, _, name = resource.partition(":")
    return Rule(effect, principal, right, Resource(kind, name))


RULES: SharedNode[Rules] = SharedNode("rules", Paths.rights, (), _decoded, rules_json, "metamq acl allow")
