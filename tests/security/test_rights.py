"""Rules of rights: decisions by value, and what real brokers then do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metamq import Admin, Consumer, Producer, SecurityConfig
from metamq.broker.front_door import authorisation
from metamq.client.net import outages
from metamq.errors import ConfigError, CorruptData, MetamqError, NotAuthorized
from metamq.security.certificates import Authority
from metamq.security.rights import (
    CLUSTER,
    NAME_CHARS_MAX,
    NO_RULES,
    REMEMBERED_MAX,
    RIGHTS,
    SUPERUSERS,
    TOPIC,
    UNLIMITED,
    Access,
    Resource,
    Rule,
    RuleTable,
    parse_resource,
    parse_rule,
)
from metamq.testing import Cluster
from metamq.testing import cluster as own_cluster
from metamq.wire import status
from metamq.wire.commands import (
    Branches,
    Command,
    Get,
    GetPartition,
    GetResult,
    OffsetsEntry,
    Promote,
    PutEntry,
    PutResult,
    Stats,
    TopicChange,
    Tx,
)
from metamq.wire.status import decode_error
from metamq.wire.xa import Verb
from metamq.zk.names import MAX_NAME_CHARS
from metamq.zk.security import rights
from tests.broker.front_door.conftest import batch_of
from tests.parts import SLOW_S, wait_until
from tests.security.certificate_folder import secured
from tests.security.raw_client import RawClient, new_topic, of

LONG_MS = 120_000
"""Longer than the test waits for an answer, so a poll does not end by itself before."""


def rule(text: str) -> Rule:
    return parse_rule(*text.split())


@pytest.mark.parametrize(
    ("rules", "asked", "is_allowed"),
    [
        ([], "etl read topic:a", False),
        (["allow etl read topic:a"], "etl read topic:a", True),
        (["allow etl read topic:a"], "etl write topic:a", False),
        (["allow etl read topic:a"], "etl read topic:ab", False),
        (["allow etl read topic:a"], "other read topic:a", False),
        (["allow etl read topic:a*"], "etl read topic:ab", True),
        (["allow etl read topic:a*"], "etl read topic:a", True),
        (["allow etl read topic:a*"], "etl read topic:b", False),
        (["allow * read topic:*"], "etl read topic:b", True),
        (["allow * read topic:*", "deny etl read topic:b"], "etl read topic:b", False),
        (["allow * read topic:*", "deny etl read topic:b"], "other read topic:b", True),
        (["allow etl read topic:b", "deny * read topic:*"], "etl read topic:b", False),
        (["allow etl describe cluster"], "etl describe cluster", True),
        (["allow etl read topic:*"], "etl describe cluster", False),
        (["deny * read topic:*"], "admin read topic:b", True),
        (["deny * promote cluster"], "brokers promote cluster", True),
    ],
)
def test_a_decision(rules: list[str], asked: str, is_allowed: bool) -> None:
    principal, right, resource = asked.split()
    found = RuleTable(map(rule, rules)).decide(principal, right, parse_resource(resource))
    assert found.is_allowed == is_allowed
    assert found.rule is None or str(found.rule) in rules


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("permit", "etl", "read", "topic:a"), "'permit' is not the effect of a rule. It is `allow` or `deny`"),
        (("allow", "e t l", "read", "topic:a"), "cannot be the name of a principal"),
        (("allow", "admin", "read", "topic:a"), "a rule for 'admin' has no effect"),
        (("allow", "etl", "read", "a"), "'a' is not a resource. Write topic:NAME"),
        (("allow", "etl", "read", "topic:"), "'topic:' is not a resource"),
        (("allow", "etl", "read", "topic:a*b"), "is not a resource"),
        (("allow", "etl", "describe", "cluster:a"), "is not a resource"),
        (("allow", "etl", "eat", "topic:a"), "'eat' is not a right on topic:a. Those of a topic are: read, write"),
        (("allow", "etl", "read", "cluster"), "Those of a cluster are: describe, promote, recover"),
    ],
)
def test_a_rule_that_is_none(words: tuple[str, str, str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("*", r"\*")):
        parse_rule(*words)


NAMES = st.text("abc-", min_size=1, max_size=3)
RULES = st.builds(
    Rule,
    st.sampled_from(["allow", "deny"]),
    st.sampled_from(["*", "etl", "other"]),
    st.sampled_from(RIGHTS[TOPIC]),
    st.builds(Resource, st.just(TOPIC), st.builds(lambda name, end: name + end, NAMES, st.sampled_from(["", "*"]))),
)


@given(st.lists(RULES, max_size=6), st.sampled_from(["etl", "other", *SUPERUSERS]), NAMES)
def test_one_more_allow_takes_nothing_away_and_one_more_deny_gives_nothing(
    rules: list[Rule], principal: str, name: str
) -> None:
    resource = Resource(TOPIC, name)
    for right in RIGHTS[TOPIC]:
        now = RuleTable(rules).decide(principal, right, resource).is_allowed
        for more in rules:
            changed = RuleTable([*rules, more._replace(effect="allow")])
            assert changed.decide(principal, right, resource).is_allowed >= now
            changed = RuleTable([*rules, more._replace(effect="deny")])
            assert changed.decide(principal, right, resource).is_allowed <= now


@given(st.lists(RULES, max_size=6), st.sampled_from(["etl", "other", *SUPERUSERS]), NAMES)
def test_a_table_decides_as_the_rules_read_one_by_one(rules: list[Rule], principal: str, name: str) -> None:
    def matching(effect: str, right: str) -> bool:
        return any(
            rule.effect == effect
            and rule.right == right
            and rule.principal in (principal, "*")
            and (rule.resource.name == name or fits(rule.resource.name))
            for rule in rules
        )

    def fits(pattern: str) -> bool:
        return pattern.endswith("*") and name.startswith(pattern[:-1])

    table = RuleTable(rules)
    for right in RIGHTS[TOPIC]:
        expected = principal in SUPERUSERS or (matching("allow", right) and not matching("deny", right))
        assert table.decide(principal, right, Resource(TOPIC, name)).is_allowed == expected
        access = Access(principal, table)
        assert (access.refusal(right, name) is None) == (access.refusal(right, name) is None) == expected


@given(st.lists(RULES, max_size=6, unique=True))
def test_the_node_has_them_all(rules: list[Rule]) -> None:
    assert rights.RULES.parsed("/node", rights.rules_json(tuple(rules))) == tuple(rules)


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", b'{"rules": [["allow", "etl", "read"]]}', b'{"rules": [["may", "etl", "read", "a"]]}'],
)
def test_a_damaged_node(data: bytes) -> None:
    with pytest.raises(CorruptData, match="the list of rules in ZooKeeper"):
        rights.RULES.parsed("/node", data)


def test_a_rule_of_a_later_release_decides_nothing_and_stays() -> None:
    stored = rights.RULES.parsed(
        "/node", b'{"rules": [["allow", "etl", "fly", "group:g"], ["deny", "etl", "read", "topic:a"]]}'
    )
    assert not RuleTable(stored).decide("etl", "read", Resource(TOPIC, "a")).is_allowed
    changed = rights.with_rules(stored, (rule("allow etl read topic:b"),))
    assert b'["allow", "etl", "fly", "group:g"]' in rights.rules_json(changed)


def test_what_a_client_makes_a_broker_remember_is_limited() -> None:
    assert NAME_CHARS_MAX == MAX_NAME_CHARS
    access = Access("etl", RuleTable([rule("allow etl read topic:a*")]))
    for number in range(3 * REMEMBERED_MAX):
        assert access.refusal("read", f"a{number}") is None
        assert access.refusal("read", f"b{number}") is not None
    assert len(access._allowed) <= REMEMBERED_MAX
    assert len(str(access.refusal("read", "a" * 1_000_000))) < 1000


def test_more_rules_than_a_node_holds() -> None:
    many = tuple(rule(f"allow etl read topic:{number:0200}") for number in range(5000))
    with pytest.raises(ConfigError, match=r"the rules would take 1,\S+ bytes, the limit is 900,000"):
        rights.rules_json(many)


def test_every_command_has_its_right() -> None:
    assert authorisation.NEEDS.keys() == set(Command)


@pytest.mark.parametrize("principal", SUPERUSERS)
def test_the_clusters_own_principals_are_not_limited(principal: str) -> None:
    access = Access(principal, RuleTable([rule("deny * write topic:*")]))
    assert not access.is_limited
    access.check_topic("write", "a")
    access.check_cluster("promote")


def test_only_brokers_join_as_a_replica() -> None:
    authorisation.check(Command.SYNC, UNLIMITED)
    authorisation.check(Command.SYNC, Access("brokers", NO_RULES))
    for principal in ("admin", "etl"):
        with pytest.raises(NotAuthorized, match="may not join as a replica of cluster"):
            authorisation.check(Command.SYNC, Access(principal, RuleTable([rule("allow * promote cluster")])))


# -- at real brokers --------------------------------------------------------------------------------------------------


def requests(topic: str, topic_id: str = "") -> dict[int, tuple[Any, bytes]]:
    """A request of each command that needs a right."""
    put = [PutEntry(topic, topic_id, 0, 4)]
    tx = Tx([1, b"x", b""], 0, "s", [Verb.START, Verb.SEND], 0, -1, 0, put)
    return {
        Command.PUT: (put, b"abcd"),
        Command.GET: (Get(0, 1, 1000, 1000, [GetPartition(1, topic, topic_id, 0)], [(1, 0)], []), b""),
        Command.OFFSETS: ([OffsetsEntry(topic, topic_id, 0, -1)], b""),
        Command.TX: (tx, b"abcd"),
        Command.PROMOTE: (Promote(accept_loss=False), b""),
        Command.STATS: (Stats("", 0), b""),
        Command.SYNC: (None, b""),
        Command.TOPIC: (TopicChange(topic, b"{}", -1), b""),
    }


@pytest.mark.parametrize("command", sorted(requests("x")), ids=lambda number: Command(number).name)
def test_without_a_rule_nothing_is_allowed_and_nothing_is_shown_to_exist(
    secure: Cluster, authority: Authority, name: str, command: int
) -> None:
    hidden, its_id = new_topic(secure, f"hidden-{command}")
    said = []
    for topic, topic_id in ((hidden, its_id), ("not-there", "")):
        with RawClient(secure, authority, name) as client:
            error = client.error(command, *requests(topic, topic_id)[command])
        assert isinstance(error, NotAuthorized), error
        said.append(str(error).replace(topic, "T"))
    assert said[0] == said[1]


def test_an_operators_decision_about_a_branch_needs_a_right(secure: Cluster, authority: Authority, name: str) -> None:
    header = Tx([1, b"x", b""], 0, "s", [Verb.HEURISTIC_ROLLBACK], 0, -1, 0, [])
    with secure.admin() as admin, RawClient(secure, authority, name) as client:
        admin.add_rules("allow", name, "write", "topic:some")
        refusal = f"'{name}' may not recover cluster"
        wait_until(lambda: refusal in str(client.error(Command.TX, header)), what=refusal)
        admin.remove_rules("allow", name, "write", "topic:some")
        admin.add_rules("allow", name, "recover", CLUSTER)
        wait_until(lambda: is_served(client, Command.TX, header), what="the rule")


def test_an_administrator_is_no_replica(secure: Cluster, authority: Authority) -> None:
    with RawClient(secure, authority, "admin") as client:
        assert isinstance(client.error(Command.SYNC, None), NotAuthorized)


def test_each_batch_of_a_put_counts_by_itself(secure: Cluster, authority: Authority, name: str) -> None:
    allowed, refused = new_topic(secure, "allowed"), new_topic(secure, "refused")
    with secure.admin() as admin, RawClient(secure, authority, name) as client:
        admin.add_rules("allow", name, "write", "topic:allowed")
        batch = bytes(batch_of([b"x"]))
        put = [PutEntry(*topic, 0, len(batch)) for topic in (allowed, refused, allowed)]

        def results() -> list[PutResult]:
            return [PutResult(*one) for one in client.ask(Command.PUT, put, batch * 3)]

        wait_until(lambda: results()[0].status == status.OK, what="the rule")
        first, second, third = results()
        assert (first.status, third.status) == (status.OK, status.OK)
        assert isinstance(decode_error(second.status, second.error), NotAuthorized)


def test_without_a_topic_to_write_there_are_no_transactions(secure: Cluster, authority: Authority, name: str) -> None:
    with RawClient(secure, authority, name) as client:
        for verb in {*Verb} - {Verb.SEND}:
            header = Tx([1, b"x", b""], 0, "s", [verb], 0, -1, 0, [])
            assert isinstance(client.error(Command.TX, header), NotAuthorized)
        assert client.ask(Command.BRANCHES, Branches(0, True))[1] == []


def test_a_right_on_the_cluster(secure: Cluster, authority: Authority, name: str) -> None:
    with secure.admin() as admin, RawClient(secure, authority, name) as client:
        admin.add_rules("allow", name, "describe", CLUSTER)
        wait_until(lambda: is_served(client, Command.STATS, Stats("", 0)), what="the rule")
        admin.remove_rules("allow", name, "describe", CLUSTER)
        wait_until(lambda: not is_served(client, Command.STATS, Stats("", 0)), what="no rule")


def is_served(client: RawClient, command: int, header: Any) -> bool:
    try:
        client.ask(command, header)
    except NotAuthorized:
        return False
    return True


@pytest.mark.slow
def test_a_producer_and_a_consumer(secure: Cluster, authority: Authority, name: str) -> None:
    secure.create_topic("shared", partitions=1)
    security = of(authority, name)
    with secure.admin() as admin, Producer(secure.zookeeper, security=security, linger_ms=0) as producer:
        with pytest.raises(NotAuthorized, match=f"'{name}' may not write topic:shared"):
            producer.send("shared", b"x").result(SLOW_S)
        admin.add_rules("allow", name, "write", "topic:sha*")
        assert admin.explain_right(name, "write", "topic:shared").is_allowed
        wait_until(lambda: is_taken(producer, "shared"), what="a message")
        with (
            pytest.raises(NotAuthorized, match=f"'{name}' may not read topic:shared"),
            Consumer(secure.zookeeper, topics="shared", idle_timeout_s=5, security=security) as consumer,
        ):
            list(consumer)
        admin.add_rules("allow", name, "read", "topic:shared")
        wait_until(lambda: is_read(secure, security), what="the message")


def test_a_missing_right_ends_a_loop_at_once(
    secure: Cluster, authority: Authority, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a wait for PATIENCE_S: the right does not come by itself. Here that wait is longer than a test."""
    monkeypatch.setattr(outages, "PATIENCE_S", 3600.0)
    secure.create_topic("secret", partitions=2)
    with (
        pytest.raises(NotAuthorized, match=f"'{name}' may not read topic:secret") as refused,
        Consumer(secure.zookeeper, topics="secret", idle_timeout_s=1, security=of(authority, name)) as consumer,
    ):
        list(consumer)
    assert "acl explain" in str(refused.value)


def is_taken(producer: Producer, topic: str) -> bool:
    try:
        producer.send(topic, b"x").result(SLOW_S)
    except NotAuthorized:
        return False
    return True


def is_read(secure: Cluster, security: SecurityConfig) -> bool:
    try:
        with Consumer(secure.zookeeper, topics="shared", idle_timeout_s=1, security=security) as consumer:
            return [message.value for message in consumer] == [b"x"]
    except NotAuthorized:
        return False


def test_a_right_that_is_taken_away_ends_a_parked_poll(
    secure: Cluster, authority: Authority, name: str, report_figures: Callable[[str], None]
) -> None:
    topic, its_id = new_topic(secure, "revoked")
    opening = Get(0, 1, 1000, 1000, [GetPartition(1, topic, its_id, 0)], [(1, 0)], [])
    again = opening._replace(closed=[1])
    removed_at = 0.0

    def remove() -> None:
        nonlocal removed_at
        removed_at = time.monotonic()
        admin.remove_rules("allow", name, "read", "topic:revoked")

    with secure.admin() as admin, RawClient(secure, authority, name) as client:
        (refused,) = client.ask(Command.GET, opening)
        assert isinstance(error_of(refused), NotAuthorized)
        admin.add_rules("allow", name, "read", "topic:revoked")
        wait_until(lambda: client.ask(Command.GET, again) == [], what="the rule")
        (revoked,) = client.ask_in_the_meantime(Command.GET, Get(LONG_MS, 1, 1000, 1000, [], [], []), remove)
        report_figures(f"a waiting GET is refused {time.monotonic() - removed_at:.2f} s after the rule is removed")
        assert isinstance(error_of(revoked), NotAuthorized)
        admin.add_rules("allow", name, "read", "topic:revoked")
        wait_until(lambda: client.ask(Command.GET, again) == [], what="the rule again")


def error_of(result: list[Any]) -> MetamqError:
    found = GetResult(*result)
    return decode_error(found.status, found.error)


@pytest.mark.slow
def test_while_zookeeper_is_away_the_last_rules_count(authority: Authority, name: str) -> None:
    with own_cluster(security=secured(authority.folder, zookeeper_tls=False)) as running:
        known, other = (requests(*new_topic(running, topic))[Command.OFFSETS] for topic in ("known", "other"))
        with running.admin() as admin, RawClient(running, authority, name) as client:
            admin.add_rules("allow", name, "read", "topic:known")
            wait_until(lambda: not isinstance(client.error(Command.OFFSETS, *known), NotAuthorized), what="the rule")
            running.zookeeper_server.kill()
            assert not isinstance(client.error(Command.OFFSETS, *known), NotAuthorized)
            assert isinstance(client.error(Command.OFFSETS, *other), NotAuthorized)
            running.zookeeper_server.restart()
            admin.add_rules("deny", "*", "read", "topic:known")
            wait_until(lambda: isinstance(client.error(Command.OFFSETS, *known), NotAuthorized), what="a new rule")


@pytest.mark.slow
def test_a_slave_joins_and_a_promotion_is_not_planned_without_figures(authority: Authority, name: str) -> None:
    """A master that refuses its figures is not taken for a dead one."""
    security = of(authority, name)
    with own_cluster(security=secured(authority.folder, zookeeper_tls=False)) as running:
        running.add_slave()
        with running.admin() as admin, Admin(running.zookeeper, security=security) as limited:
            wait_until(lambda: admin.plan_promotion(0, 1).in_sync, what="a slave in sync")
            admin.add_rules("allow", name, "promote", CLUSTER)
            with pytest.raises(NotAuthorized, match="may not describe cluster"):
                limited.plan_promotion(0, 1)
            admin.add_rules("allow", name, "describe", CLUSTER)
            wait_until(lambda: may_plan(limited), what="the rule")
            limited.promote(0, 1)


def may_plan(admin: Admin) -> bool:
    try:
        return admin.plan_promotion(0, 1).master_lives
    except NotAuthorized:
        return False
