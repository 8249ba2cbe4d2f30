"""Rights on delayed messages: those of the topic that they are for."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest

from metamq import Admin, Consumer, Producer
from metamq.client.net.inboxes import inbox_of
from metamq.errors import MetamqError, NotAuthorized
from metamq.security.certificates import Authority
from metamq.security.rights import Access, RuleTable, parse_rule
from metamq.testing import Cluster
from metamq.wire.commands import Command, TopicChange
from metamq.zk.cluster.topics import NEW, TopicConfig, to_json
from metamq.zk.cluster.trims import Trim
from tests.parts import SLOW_S, wait_until
from tests.security.raw_client import RawClient, of


def test_rights_of_topics_with_delayed_messages() -> None:
    rules = [("allow", "etl", "write", "topic:*"), ("deny", "etl", "write", "topic:secret")]
    rules += [("allow", "etl", "read", "topic:*"), ("allow", "bob", "write", "topic:orders.delayed")]
    rules += [("deny", "etl", "read", "topic:private.delayed")]
    table = RuleTable([parse_rule(*rule) for rule in rules])

    def may(principal: str, right: str, topic: str) -> bool:
        return Access(principal, table).refusal(right, topic) is None

    assert may("etl", "write", "orders.delayed")
    assert may("etl", "create", "orders.delayed")
    assert not may("etl", "create", "orders")
    assert not may("etl", "alter", "orders.delayed")
    assert not may("etl", "write", "secret.delayed")
    assert not may("etl", "create", "secret.delayed")
    assert not may("bob", "write", "orders.delayed"), "a rule for the topic itself gives nothing"
    assert may("etl", "read", "private")
    assert not may("etl", "read", "private.delayed"), "but it may deny"
    for right in ("read", "write", "create"):
        assert not may("etl", right, "metamq.delays.0.3")
        assert may("admin", right, "metamq.delays.0.3")


def levels_of(admin: Admin) -> list[str]:
    return [topic for topic in admin.topics() if topic.startswith("metamq.delays.")]


@pytest.mark.slow
def test_a_writer_may_delay_and_no_more(secure: Cluster, authority: Authority, name: str) -> None:
    secure.create_topic(name, partitions=2)
    secure.create_topic(f"{name}-2", partitions=1)
    security = of(authority, name)
    with secure.admin() as admin, Producer(secure.zookeeper, security=security) as producer:
        admin.add_rules("allow", name, "write", f"topic:{name}")

        def is_taken() -> bool:
            with contextlib.suppress(NotAuthorized):
                producer.send(name, b"later", delay_s=3).result(SLOW_S)
                return True
            return False

        wait_until(is_taken, what="a delayed message")
        with pytest.raises(NotAuthorized):
            producer.send(f"{name}-2", b"forbidden", delay_s=0.1).result(SLOW_S)
        headers = {"metamq-due": b"1", "metamq-topic": f"{name}-2".encode()}
        producer.send(f"{name}.delayed", b"by hand", headers=headers).result(SLOW_S)
        wait_until(lambda: levels_of(admin), what="a level")
        level = levels_of(admin)[0]
        with pytest.raises(NotAuthorized):
            producer.send(level, b"by hand", headers=headers).result(SLOW_S)
    with secure.consumer(topics=name, start="earliest") as consumer:
        assert sorted(next(iter(consumer)).value for _ in range(2)) == [b"by hand", b"later"]
    with (
        pytest.raises(NotAuthorized),
        Consumer(secure.zookeeper, topics=level, start="earliest", idle_timeout_s=1, security=security) as consumer,
    ):
        next(iter(consumer))


def test_a_writer_makes_the_topic_of_delayed_messages_as_the_other_topic_is(
    secure: Cluster, authority: Authority, name: str
) -> None:
    secure.create_topic(name, partitions=2)
    with secure.admin() as admin:
        admin.add_rules("allow", name, "write", f"topic:{name}")
        inbox = inbox_of(admin.topics()[name])
    with RawClient(secure, authority, name) as client:

        def error(config: TopicConfig) -> str:
            try:
                client.ask(Command.TOPIC, TopicChange(config.topic, to_json(config), NEW))
            except MetamqError as refusal:
                return type(refusal).__name__
            return ""

        wait_until(lambda: error(replace(inbox, min_insync=2)) != "NotAuthorized", what="the rule")
        wrong = (
            replace(inbox, min_insync=2),
            replace(inbox, partitions={0: 100}),
            replace(inbox, trims={"0-0": Trim(1 << 62, 1 << 62)}),
            replace(inbox, max_message_bytes=4 << 20),
        )
        assert {error(one) for one in wrong} == {"ConfigError"}
        assert error(inbox) == ""
