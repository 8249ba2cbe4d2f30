"""Nodes in ZooKeeper belong to brokers and administrators, and what is left to other clients."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Iterator

import pytest
from kazoo.security import make_acl

from metamq import Admin, Consumer, Producer, SecurityConfig
from metamq.errors import MetamqError, NotAuthorized
from metamq.security.certificates import Authority
from metamq.testing import Cluster, cluster
from metamq.zk.cluster.node_acls import correct_nodes, wrong_nodes
from metamq.zk.cluster.schemas import Schema
from metamq.zk.nodes import ANY_VERSION, Create, Delete
from metamq.zk.paths import Paths
from metamq.zk.session.acls import acl_of, differs
from metamq.zk.session.session import Session
from tests.parts import SLOW_S, read_to_end, wait_until
from tests.security.certificate_folder import client_of, secured
from tests.security.nodes import run, tree

PATHS = Paths("/meta")


@pytest.fixture(scope="module")
def owned(authority: Authority) -> Iterator[Cluster]:
    """A cluster with TLS to ZooKeeper, a topic, a group, users and rules."""
    authority.issue("etl")
    with cluster(security=secured(authority.folder)) as running, running.admin() as admin:
        running.create_topic("flights", partitions=2)
        admin.set_user("user", "a long password")
        for right in ("read", "write"):
            admin.add_rules("allow", "etl", right, "topic:flights")
        with running.producer() as producer:
            producer.send("flights", b"hello").result(SLOW_S)
        with running.consumer(topics=["flights"], group="old", start="earliest", idle_timeout_s=1) as consumer:
            assert len(read_to_end(consumer)) == 1
            consumer.commit()
        yield running


@pytest.fixture(params=["etl", ""], ids=["with a certificate", "without one"])
def stranger(request: pytest.FixtureRequest, authority: Authority) -> SecurityConfig:
    return client_of(authority.folder, request.param)


def test_a_stranger_changes_nothing_but_groups_and_sinks(
    owned: Cluster, authority: Authority, stranger: SecurityConfig
) -> None:
    """Each node that there is, with each change."""
    nodes: list[str] = []
    found: dict[str, list[str]] = {}

    async def look(session: Session) -> None:
        nodes.extend(await tree(session, "/meta"))

    run(owned, secured(authority.folder), look)
    assert {PATHS.topic_config("flights"), PATHS.users(), PATHS.rights(), PATHS.master(0), PATHS.groups()} <= {*nodes}

    async def attack(session: Session) -> None:
        for path in nodes:
            if path.startswith((f"{PATHS.groups()}/", f"{PATHS.sinks()}/")):
                continue  # it is theirs
            new = f"{path}/new"
            outcomes = [
                await outcome(session.set(path, b"", ANY_VERSION)),
                await outcome(session.set_acl(path, acl_of(PATHS, "/elsewhere"))),
                await outcome(session.delete(path, ANY_VERSION)),
                await outcome(session.create(new)),
                await outcome(session.delete(new, ANY_VERSION)),
                await outcome(session.multi([Create(new, b""), Delete(new, ANY_VERSION)])),
            ]
            found[path] = outcomes

    run(owned, stranger, attack)
    refused = ["NotAuthorized"] * 6
    assert found.pop("/meta") == ["NotAuthorized"] * 2 + ["NotEmpty"] + ["NotAuthorized"] * 3
    for path in (PATHS.groups(), PATHS.sinks()):
        assert found.pop(path) == ["NotAuthorized"] * 3 + ["done"] * 3
    assert len(found) > 10
    assert {path: outcomes for path, outcomes in found.items() if outcomes != refused} == {}
    with owned.admin() as admin:
        assert admin.topics().keys() == {"flights"}


def test_a_user_changes_topics_through_brokers(owned: Cluster, authority: Authority) -> None:
    """Each change needs its right; ZooKeeper lets the user change nothing."""
    authority.issue("report")
    security = client_of(authority.folder, "report")

    def refusal(change: Callable[[Admin], object]) -> str:
        with Admin(owned.zookeeper, security=security) as theirs:
            try:
                change(theirs)
            except NotAuthorized as error:
                return error.problem
            return ""

    def register(theirs: Admin) -> object:
        return theirs.register_schema("report-1", Schema("json", '{"type": "object", "properties": {}}'))

    changes: dict[str, Callable[[Admin], object]] = {
        "create": lambda admin: admin.create_topic("report-1", partitions=1),
        "alter": lambda admin: admin.alter("report-1", partitions=2, retention_ms=60_000),
        "delete": lambda admin: admin.delete("report-1"),
    }
    with owned.admin() as admin:
        for right, change in changes.items():
            if right == "alter":
                assert refusal(register) == "'report' may not alter topic:report-1"
            assert refusal(change) == f"'report' may not {right} topic:report-1"
            admin.add_rules("allow", "report", right, "topic:report-*")
            wait_until(lambda change=change: not refusal(change), what=f"the rule for {right}")
            assert refusal(lambda theirs: theirs.create_topic("other", partitions=1))
            if right == "alter":
                assert not refusal(register)
                config = admin.topics()["report-1"]
                assert (config.partitions, config.retention_ms) == ({0: 2}, 60_000)
                assert len(config.schemas.versions) == 1
        assert "report-1" not in admin.topics()

    found: list[str] = []

    async def look(session: Session) -> None:
        found[:] = await session.children(PATHS.offered_topics("topics-pub"))

    def is_gone() -> bool:
        run(owned, secured(authority.folder), look)
        return "report-1" not in found

    wait_until(is_gone, what="no node for offers of the deleted topic")


async def outcome(change: Awaitable[object]) -> str:
    try:
        await change
    except MetamqError as error:
        return type(error).__name__
    return "done"


def test_a_node_that_a_stranger_owns_is_found_and_told(owned: Cluster, authority: Authority) -> None:
    """Of the time when the cluster was open. Its owner alone can change it, or ZooKeeper's superuser."""
    path = f"{PATHS.root}/config/strange"
    theirs = [make_acl("x509", "CN=etl", all=True)]

    async def take(session: Session) -> None:
        await session.create(path)
        await session.set_acl(path, theirs)

    async def look(session: Session) -> None:
        assert await wrong_nodes(session) == [path]
        assert await correct_nodes(session, [path], lambda amount: None) == [path]
        await session.delete(path, ANY_VERSION)

    run(owned, secured(authority.folder), take)
    run(owned, secured(authority.folder), look)


def test_users_and_rules_are_not_shown(owned: Cluster, stranger: SecurityConfig) -> None:
    async def look(session: Session) -> None:
        assert (await session.get(PATHS.topic_config("flights"))).data
        for path in (PATHS.security(), PATHS.users(), PATHS.rights()):
            with pytest.raises(NotAuthorized):
                await session.get(path)

    run(owned, stranger, look)


def test_a_program_works_and_makes_no_topic(owned: Cluster, authority: Authority) -> None:
    """Its group is its own."""
    security = client_of(authority.folder, "etl")
    group = uuid.uuid4().hex
    with Producer(owned.zookeeper, security=security) as producer:
        producer.send("flights", b"again").result(SLOW_S)
    with Consumer(
        owned.zookeeper, topics="flights", group=group, start="earliest", idle_timeout_s=1, security=security
    ) as consumer:
        assert b"again" in [message.value for message in read_to_end(consumer)]
        consumer.commit()
    with Admin(owned.zookeeper, security=security) as admin:
        assert admin.groups()[group].topics
        with pytest.raises(NotAuthorized, match=r"'etl' may not create topic:own"):
            admin.create_topic("own", partitions=1)
        with pytest.raises(NotAuthorized):
            admin.delete("flights")


def test_new_nodes_have_their_lists(owned: Cluster, authority: Authority) -> None:
    async def look(session: Session) -> None:
        assert await wrong_nodes(session) == []

    run(owned, secured(authority.folder), look)


@pytest.mark.parametrize(
    ("path", "like"),
    [
        ("/meta", "/meta/brokers"), ("/meta/config/topics/t", "/meta"), ("/meta/security/users", "/meta/security"),
        ("/meta/consumers/g/ids/c", "/meta/spark/s"), ("/meta/spark", "/meta/consumers"), ("/", "/meta/consumers/g"),
        ("/metadata", "/"), ("/meta/consumers-2", "/meta"),
    ],
)  # fmt: skip
def test_the_rule(path: str, like: str) -> None:
    assert not differs(acl_of(PATHS, path), acl_of(PATHS, like))
    kinds = [acl_of(PATHS, one) for one in ("/", "/meta", "/meta/consumers", "/meta/security")]
    assert all(differs(a, b) for n, a in enumerate(kinds) for b in kinds[:n])
