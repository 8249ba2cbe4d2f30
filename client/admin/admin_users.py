"""The administration of users who log in by password, of rights and of quotas."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from metamq.client.admin.admin_model import TokenDescription
from metamq.security.delegation import without_tokens_of
from metamq.security.login import make_verifiers
from metamq.security.names import check_name
from metamq.security.quotas import Quota, check_quota
from metamq.security.rights import RightDecision, Rule, Rules, RuleTable, check_right, parse_resource, parse_rule
from metamq.zk.names import check_name as check_topic_name
from metamq.zk.security.delegations import DELEGATIONS
from metamq.zk.security.quotas import QUOTAS, with_quota, without_quota
from metamq.zk.security.rights import RULES, with_rules, without_rules
from metamq.zk.security.users import USERS, with_user, without_user

if TYPE_CHECKING:
    from metamq.client.net.cluster import ClusterClient


async def all_users(cluster: ClusterClient) -> list[str]:
    """Returns the names of all users, in order."""
    return sorted(await USERS.read(cluster.session))


async def set_user(cluster: ClusterClient, name: str, password: str) -> None:
    """Adds a user, or changes its password. See Admin.set_user."""
    check_name(name)
    verifiers = make_verifiers(password)
    await USERS.change(cluster.session, lambda users: with_user(users, name, verifiers))
    await end_tokens(cluster, name)


async def remove_user(cluster: ClusterClient, name: str) -> None:
    """Removes a user. See Admin.remove_user."""
    await USERS.change(cluster.session, lambda users: without_user(users, name))
    await end_tokens(cluster, name)


async def all_tokens(cluster: ClusterClient) -> list[TokenDescription]:
    """Returns the tokens that count, in order. See Admin.tokens."""
    found = await DELEGATIONS.read(cluster.session)
    now_ms = time.time_ns() // 1_000_000
    return sorted(
        TokenDescription(one.principal, token_id, tuple(sorted(one.rights)), one.expires_ms)
        for token_id, one in found.items()
        if one.expires_ms > now_ms
    )


async def end_tokens(cluster: ClusterClient, principal: str) -> int:
    """Ends all tokens of a principal, and returns their number. See Admin.end_tokens."""
    check_name(principal)
    before = [one for one in await all_tokens(cluster) if one.principal == principal]
    await DELEGATIONS.change(cluster.session, lambda tokens: without_tokens_of(tokens, principal))
    return len(before)


async def all_rules(cluster: ClusterClient) -> list[Rule]:
    """Returns all rules, in order. See Admin.rules."""
    return sorted(await RULES.read(cluster.session), key=str)


async def add_rules(cluster: ClusterClient, rules: Rules) -> None:
    """Adds rules. See Admin.add_rules."""
    await RULES.change(cluster.session, lambda stored: with_rules(stored, rules))


async def remove_rules(cluster: ClusterClient, rules: Rules) -> None:
    """Removes rules. See Admin.remove_rules."""
    await RULES.change(cluster.session, lambda stored: without_rules(stored, rules))


async def explain(cluster: ClusterClient, principal: str, right: str, resource: str) -> RightDecision:
    """Decides as a broker does. See Admin.explain_right."""
    found = parse_resource(resource)
    check_right(right, found)
    return RuleTable(await RULES.read(cluster.session)).decide(principal, right, found)


async def all_quotas(cluster: ClusterClient) -> dict[str, Quota]:
    """Returns the quota of each principal that has one, in order. See Admin.quotas."""
    return dict(sorted((await QUOTAS.read(cluster.session)).items()))


async def set_quota(cluster: ClusterClient, principal: str, quota: Quota) -> None:
    """Sets the quota of a principal. See Admin.set_quota."""
    check_quota(principal, quota)
    await QUOTAS.change(cluster.session, lambda quotas: with_quota(quotas, principal, quota))


async def remove_quota(cluster: ClusterClient, principal: str) -> None:
    """Removes the quota of a principal. See Admin.remove_quota."""
    await QUOTAS.change(cluster.session, lambda quotas: without_quota(quotas, principal))


def parsed_rules(effect: str, principal: str, right: str, resources: Sequence[str]) -> Rules:
    """Returns a rule for each resource. Raises ConfigError."""
    rules = tuple(parse_rule(effect, principal, right, resource) for resource in resources)
    for _effect, _principal, _right, resource in rules:
        if name := resource.name.removesuffix("*"):
            check_topic_name("topic", name)
    return rules
