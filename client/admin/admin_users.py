"""The administration of users who log in by password, and of rights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from metamq.security.login import make_verifiers
from metamq.security.names import check_name
from metamq.security.rights import RightDecision, Rule, Rules, RuleTable, check_right, parse_resource, parse_rule
from metamq.zk.cluster.rights import change_rules, read_rules, with_rules, without_rules
from metamq.zk.cluster.users import change_users, read_users, with_user, without_user
from metamq.zk.names import check_name as check_topic_name

if TYPE_CHECKING:
    from metamq.client.net.cluster import ClusterClient


async def all_users(cluster: ClusterClient) -> list[str]:
    """Returns the names of all users, in order."""
    return sorted(await read_users(cluster.session))


async def set_user(cluster: ClusterClient, name: str, password: str) -> None:
    """Adds a user, or changes its password. See Admin.set_user."""
    check_name(name)
    verifiers = make_verifiers(password)
    await change_users(cluster.session, lambda users: with_user(users, name, verifiers))


async def remove_user(cluster: ClusterClient, name: str) -> None:
    """Removes a user. See Admin.remove_user."""
    await change_users(cluster.session, lambda users: without_user(users, name))


async def all_rules(cluster: ClusterClient) -> list[Rule]:
    """Returns all rules, in order. See Admin.rules."""
    return sorted(await read_rules(cluster.session), key=str)


async def add_rules(cluster: ClusterClient, rules: Rules) -> None:
    """Adds rules. See Admin.add_rules."""
    await change_rules(cluster.session, lambda stored: with_rules(stored, rules))


async def remove_rules(cluster: ClusterClient, rules: Rules) -> None:
    """Removes rules. See Admin.remove_rules."""
    await change_rules(cluster.session, lambda stored: without_rules(stored, rules))


async def explain(cluster: ClusterClient, principal: str, right: str, resource: str) -> RightDecision:
    """Decides as a broker does. See Admin.explain_right."""
    found = parse_resource(resource)
    check_right(right, found)
    return RuleTable(await read_rules(cluster.session)).decide(principal, right, found)


def parsed_rules(effect: str, principal: str, right: str, resources: Sequence[str]) -> Rules:
    """Returns a rule for each resource. Raises ConfigError."""
    rules = tuple(parse_rule(effect, principal, right, resource) for resource in resources)
    for _effect, _principal, _right, resource in rules:
        if name := resource.name.removesuffix("*"):
            check_topic_name("topic", name)
    return rules
