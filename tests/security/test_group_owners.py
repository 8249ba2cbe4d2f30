"""A group belongs to the user or certificate that made it; one that a client without either made is open to all."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Iterator
from pathlib import Path

import pytest
from kazoo.security import make_acl, make_digest_acl_credential

from metamq import Admin, Consumer, SecurityConfig
from metamq.client.net.delegating import DelegatedToken
from metamq.errors import AuthenticationFailed, ConfigError, MetamqError, NotAuthorized
from metamq.security.certificates import Authority
from metamq.security.rights import ANY_PRINCIPAL, READ
from metamq.testing import Cluster, cluster
from metamq.zk.cluster.node_acls import open_groups
from metamq.zk.nodes import ANY_VERSION
from metamq.zk.partitions import TopicPartition
from metamq.zk.paths import Paths
from metamq.zk.security.owner_key import digest_of, proof_of
from metamq.zk.session.acls import owned_by
from metamq.zk.session.session import Session
from tests.parts import SLOW_S, read_to_end, wait_until
from tests.security.certificate_folder import client_of, secured
from tests.security.nodes import run, tree
from tests.security.test_delegation import with_a_token

pytestmark = pytest.mark.slow
PATHS = Paths("/meta")
COUNT = 20


@pytest.fixture(scope="module")
def owned(authority: Authority) -> Iterator[Cluster]:
    """A topic with messages, and two programs that may read it."""
    with cluster(security=secured(authority.folder)) as running, running.admin() as admin:
        running.create_topic("flights", partitions=2)
        for program in ("etl", "report"):
            authority.issue(program)
            admin.add_rules("allow", program, "read", "topic:flights")
        with running.producer() as producer:
            producer.send_many("flights", [b"%d" % number for number in range(COUNT)]).result(SLOW_S)
        yield running


@pytest.fixture
def etl(authority: Authority) -> SecurityConfig:
    return client_of(authority.folder, "etl")


@pytest.fixture
def report(authority: Authority) -> SecurityConfig:
    return client_of(authority.folder, "report")


@pytest.fixture
def group() -> str:
    return uuid.uuid4().hex


def consume(running: Cluster, group: str, security: SecurityConfig) -> int:
    """Reads and commits as a member; returns the number of messages."""
    with Consumer(
        running.zookeeper, topics="flights", group=group, start="earliest", idle_timeout_s=1, security=security
    ) as consumer:
        found = len(read_to_end(consumer))
        consumer.commit()
        return found


async def outcome(change: Awaitable[object]) -> str:
    """Empty if it is done, else what the client reads."""
    try:
        await change
    except MetamqError as error:
        return str(error)
    return ""


@pytest.fixture
def user(owned: Cluster, authority: Authority, tmp_path: Path) -> SecurityConfig:
    """A user who logs in by password, and may read."""
    (tmp_path / "password").write_text("correct horse battery")
    with owned.admin() as admin:
        admin.set_user("reader", "correct horse battery")
        admin.add_rules("allow", "reader", "read", "topic:flights")
    security = SecurityConfig(
        ca=str(authority.folder / "ca.crt"), user="reader", password_file=str(tmp_path / "password")
    )
    wait_until(lambda: is_user(owned, security), what="the user")
    return security


def is_user(running: Cluster, security: SecurityConfig) -> bool:
    try:
        consume(running, uuid.uuid4().hex, security)
    except (AuthenticationFailed, NotAuthorized):
        return False
    return True


def test_a_group_belongs_to_the_user_with_a_password_who_made_it(
    owned: Cluster, authority: Authority, group: str, user: SecurityConfig, etl: SecurityConfig
) -> None:
    assert consume(owned, group, user) == COUNT
    outcomes: list[str] = []

    async def change(session: Session) -> None:
        path = PATHS.group(group)
        outcomes.extend([await outcome(session.set(one, b"", ANY_VERSION)) for one in await tree(session, path)])
        outcomes.append(await outcome(session.create(f"{path}/stranger")))

    for stranger in (etl, SecurityConfig(ca=str(authority.folder / "ca.crt"))):
        run(owned, stranger, change)
    assert len(outcomes) > 8
    assert all("may not" in one for one in outcomes), outcomes
    assert consume(owned, group, user) == 0, "it continues, in another session"
    with Admin(owned.zookeeper, security=user) as admin:
        admin.delete_group(group)


def test_an_administrator_gives_a_group_to_a_user_with_a_password(
    owned: Cluster, group: str, user: SecurityConfig, etl: SecurityConfig
) -> None:
    assert consume(owned, group, etl) == COUNT
    with pytest.raises(NotAuthorized):
        consume(owned, group, user)
    with owned.admin() as admin:
        assert admin.groups()[group].owner == "etl"
        assert admin.set_group_owner(group, "reader") == []
        assert admin.describe_group(group).owner == "reader"
        assert admin.set_group_owner(group, ANY_PRINCIPAL) == []
        assert admin.describe_group(group).owner is None
        assert admin.set_group_owner(group, "reader") == []
    assert consume(owned, group, user) == 0
    with pytest.raises(NotAuthorized):
        consume(owned, group, etl)


def test_the_proof_is_what_zookeeper_computes() -> None:
    """`digest_of` as in ZooKeeper's DigestAuthenticationProvider.generateDigest, by kazoo's own code."""
    proof = proof_of(b"key", "etl")
    name, secret = proof.split(":")
    assert digest_of(proof) == make_digest_acl_credential(name, secret)
    assert proof != proof_of(b"key", "other").replace("other", "etl")
    assert proof != proof_of(b"another key", "etl")


def test_another_certificate_reads_a_group_and_changes_nothing(
    owned: Cluster, authority: Authority, group: str, etl: SecurityConfig, report: SecurityConfig
) -> None:
    assert consume(owned, group, etl) == COUNT
    outcomes: list[str] = []

    async def attack(session: Session) -> None:
        nodes = await tree(session, PATHS.group(group))
        assert len(nodes) > 4
        for path in nodes:
            assert (await session.get(path)).data is not None
            outcomes.append(await outcome(session.set(path, b"", ANY_VERSION)))
            outcomes.append(await outcome(session.create(f"{path}/new")))
            outcomes.append(await outcome(session.set_acl(path, owned_by("report"))))
            if path != nodes[0]:  # that one is in a folder where each client makes groups, and is not empty
                outcomes.append(await outcome(session.delete(path, ANY_VERSION)))

    for stranger in (report, client_of(authority.folder)):
        run(owned, stranger, attack)
    assert [one for one in outcomes if "belongs to the user or certificate that made it" not in one] == []
    with pytest.raises(NotAuthorized, match="may not access znode /meta/consumers/"):
        consume(owned, group, report)
    assert consume(owned, group, etl) == 0, "it continues after its committed offsets"


def test_a_group_is_given_to_another_certificate(
    owned: Cluster, group: str, etl: SecurityConfig, report: SecurityConfig
) -> None:
    assert consume(owned, group, etl) == COUNT
    with Admin(owned.zookeeper, security=report) as theirs, pytest.raises(NotAuthorized):
        theirs.set_group_owner(group, "report")
    with owned.admin() as admin:
        admin.set_group_owner(group, "report")
        assert consume(owned, group, report) == 0
        with pytest.raises(NotAuthorized):
            consume(owned, group, etl)
        admin.set_group_owner(group, "*")
        assert consume(owned, group, etl) == 0
        assert consume(owned, group, report) == 0
        with pytest.raises(ConfigError, match="there is no group"):
            admin.set_group_owner("not-there", "report")


def test_offsets_are_copied_and_deleted_only_in_a_group_of_ones_own(
    owned: Cluster, group: str, etl: SecurityConfig, report: SecurityConfig
) -> None:
    assert consume(owned, group, etl) == COUNT
    own = f"{group}-report"
    with Admin(owned.zookeeper, security=report) as theirs:
        copied = theirs.copy_offsets(group, own)
        assert sum(one.after or 0 for one in copied) == COUNT, "each program reads the offsets"
        for refused in (
            lambda: theirs.delete_offsets(group, copied[0].topic),
            lambda: theirs.copy_offsets(own, group, overwrite=True),
        ):
            with pytest.raises(NotAuthorized):
                refused()
        assert theirs.describe_group(own).owner == "report"
    assert consume(owned, own, report) == 0
    with owned.admin() as admin:
        assert sum(one.before or 0 for one in admin.delete_offsets(group, copied[0].topic)) == COUNT
    assert consume(owned, group, etl) == COUNT, "the nodes are still those of the owner"


def test_an_owner_gives_its_group_away(owned: Cluster, group: str, etl: SecurityConfig, report: SecurityConfig) -> None:
    assert consume(owned, group, etl) == COUNT
    with Admin(owned.zookeeper, security=etl) as theirs:
        theirs.set_group_owner(group, "report")
    assert consume(owned, group, report) == 0


def test_a_group_of_before_stays_open_for_all(
    owned: Cluster, authority: Authority, group: str, etl: SecurityConfig, report: SecurityConfig
) -> None:
    """It was made without a certificate. What a client with one adds to it is open, too."""

    async def make(session: Session) -> None:
        await session.ensure(PATHS.group(group))

    run(owned, client_of(authority.folder), make)
    assert consume(owned, group, etl) == COUNT
    assert consume(owned, group, report) == 0
    found: list[str] = []

    async def look(session: Session) -> None:
        found.extend(await open_groups(session))

    run(owned, secured(authority.folder), look)
    assert group in found


def test_an_owner_deletes_its_group(owned: Cluster, group: str, etl: SecurityConfig, report: SecurityConfig) -> None:
    consume(owned, group, etl)
    with Admin(owned.zookeeper, security=report) as theirs, pytest.raises(NotAuthorized):
        theirs.delete_group(group)
    with Admin(owned.zookeeper, security=etl) as admin:
        admin.delete_group(group)
        assert group not in admin.groups()


def test_what_an_administrator_adds_to_a_group_belongs_to_its_owner(
    owned: Cluster, group: str, etl: SecurityConfig, report: SecurityConfig
) -> None:
    """As the offsets of a topic that the group has not read yet."""
    assert consume(owned, group, etl) == COUNT
    topic = f"second-{group}"
    owned.create_topic(topic, partitions=1)
    with owned.admin() as admin, owned.producer() as producer:
        admin.add_rules("allow", "etl", "read", f"topic:{topic}")
        producer.send_many(topic, [b"1", b"2", b"3"]).result(SLOW_S)
        admin.reset_offsets(group, topic, {TopicPartition(topic, "0-0"): 1})
    with Consumer(
        owned.zookeeper, topics=[topic, "flights"], group=group, start="earliest", idle_timeout_s=1, security=etl
    ) as consumer:
        assert [message.value for message in read_to_end(consumer)] == [b"2", b"3"]
        consumer.commit()
    with pytest.raises(NotAuthorized):
        consume(owned, group, report)


def test_a_node_that_a_stranger_put_into_an_open_group_is_named(
    owned: Cluster, authority: Authority, group: str, etl: SecurityConfig, report: SecurityConfig
) -> None:
    strange = f"{PATHS.group(group)}/strange"

    async def intrude(session: Session) -> None:
        await session.create(strange, makepath=True)
        await session.set_acl(strange, owned_by("report"))

    async def open_it(session: Session) -> None:
        await session.ensure(PATHS.group(group))

    run(owned, client_of(authority.folder), open_it)
    run(owned, report, intrude)
    with owned.admin() as admin:
        assert admin.set_group_owner(group, "etl") == []  # an administrator may change each node with a list of ours
    private = f"{PATHS.group(group)}/private"

    async def hide(session: Session) -> None:
        await session.create(private)
        await session.set_acl(private, [make_acl("x509", "CN=etl", all=True)])

    run(owned, etl, hide)
    with owned.admin() as admin:
        assert admin.set_group_owner(group, "report") == [private]
    assert consume(owned, group, report) == COUNT


def test_a_token_of_a_delegation_makes_no_group(owned: Cluster, etl: SecurityConfig, group: str) -> None:
    async def use(token: DelegatedToken) -> None:
        with pytest.raises(NotAuthorized, match=r"may not write groups and sinks\. Such a token is for reading"):
            await asyncio.to_thread(consume, owned, group, token.config)

    with_a_token(owned, etl, {(READ, "flights")}, use)
    with owned.admin() as admin:
        assert group not in admin.groups()
