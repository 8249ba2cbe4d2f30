"""Delegation: tokens for a part of what a client may do, for a limited time."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from metamq import Consumer, Producer, SecurityConfig
from metamq.client.net.blocking_connection import BlockingConnection
from metamq.client.net.cluster import ClusterClient
from metamq.client.net.delegating import DelegatedToken
from metamq.client.net.first_contact import open_client_session
from metamq.client.settings import ClusterAccess
from metamq.errors import AuthenticationFailed, ConfigError, ConnectError, MetamqError, NotAuthorized
from metamq.security.certificates import Authority
from metamq.security.config import DelegatedConfig
from metamq.security.delegation import (
    DELEGATIONS_MAX,
    MECHANISM,
    RIGHTS_MAX,
    Delegation,
    check_rights,
    check_verifier,
    find_token,
    make_token,
    rights_on,
    verifier_of,
    with_token,
    without_token,
    without_tokens_of,
)
from metamq.security.login import make_verifiers
from metamq.security.rights import READ, WRITE, Access, RuleTable, parse_rule
from metamq.security.tls import client_security
from metamq.testing import Cluster
from metamq.wire import status
from metamq.wire.commands import LATEST, Command, Delegate, DelegatedRight, OffsetsEntry, OffsetsResult, Stats
from metamq.wire.status import decode_error
from metamq.zk.security.delegations import DELEGATIONS
from metamq.zk.session.session import Session
from tests.parts import SLOW_S, wait_until
from tests.security.nodes import run
from tests.security.raw_client import RawClient

NOW_MS = 1_000_000
FAR_MS = 1 << 50
VERIFIERS = {MECHANISM: make_verifiers("a long enough secret")[MECHANISM]}


def token(principal: str = "etl", expires_ms: int = NOW_MS + 100_000, topic: str = "flights") -> Delegation:
    return Delegation(principal, frozenset({(READ, topic)}), expires_ms, VERIFIERS)


def test_a_token_is_found_until_it_expires() -> None:
    known = {"abc": token()}
    assert find_token(known, "token:abc", NOW_MS) == known["abc"]
    assert find_token(known, "token:abc", NOW_MS + 100_000) is None
    assert find_token(known, "abc", NOW_MS) is None
    assert find_token(known, "token:other", NOW_MS) is None


def test_tokens_are_added_renewed_and_ended_by_their_own_client_only() -> None:
    known = with_token({}, "abc", token(), NOW_MS)
    assert with_token(known, "abc", token(expires_ms=NOW_MS + 200_000), NOW_MS) is known, "it has half of the time"
    assert with_token(known, "abc", token(expires_ms=NOW_MS + 10_000), NOW_MS) is known, "it is never shortened"
    renewed = with_token(known, "abc", token(expires_ms=NOW_MS + 250_000), NOW_MS)
    assert renewed["abc"].expires_ms == NOW_MS + 250_000
    assert without_tokens_of({**known, "x": token("other")}, "etl") == {"x": token("other")}
    with pytest.raises(ConfigError, match="another client has a token"):
        with_token(known, "abc", token("other"), NOW_MS)
    assert without_token(known, "abc", "other") == known
    assert without_token(known, "abc", "etl") == {}
    later = with_token(known, "new", token(expires_ms=NOW_MS + 300_000), NOW_MS + 200_000)
    assert [*later] == ["new"], "expired ones are dropped"


def test_one_client_leaves_room_for_others() -> None:
    full = {f"t{number}": token() for number in range(DELEGATIONS_MAX // 10)}
    with pytest.raises(ConfigError, match="etl has 100 tokens"):
        with_token(full, "more", token(), NOW_MS)
    assert "more" in with_token(full, "more", token("other"), NOW_MS)
    assert "t0" in with_token(full, "t0", token(expires_ms=NOW_MS + 300_000), NOW_MS)
    long = token()._replace(rights=frozenset((READ, f"{number:0200}") for number in range(RIGHTS_MAX)))
    with pytest.raises(ConfigError, match="name topics with 80,"):
        with_token({"long": long}, "more", long, NOW_MS)


def test_the_rights_of_a_token() -> None:
    assert rights_on(READ, ["a", "b"]) == {(READ, "a"), (READ, "b")}
    assert rights_on(READ, map(str, range(RIGHTS_MAX + 1))) == {(READ, "*")}
    for wrong in (frozenset(), frozenset({("promote", "a")}), frozenset((READ, str(n)) for n in range(RIGHTS_MAX + 1))):
        with pytest.raises(ConfigError):
            check_rights(wrong)


@pytest.mark.parametrize(
    ("only", "right", "topic", "is_allowed"),
    [
        ({(READ, "a")}, READ, "a", True),
        ({(READ, "a")}, WRITE, "a", False),
        ({(READ, "a")}, READ, "b", False),
        ({(READ, "*")}, READ, "b", True),
        ({(READ, "*")}, READ, "c", False),  # the client has no right on it
        (set(), READ, "a", False),
    ],
)
def test_a_holder_may_do_what_the_client_and_the_token_allow(
    only: set[tuple[str, str]], right: str, topic: str, is_allowed: bool
) -> None:
    rules = RuleTable(parse_rule("allow", "etl", right, f"topic:{name}") for right in (READ, WRITE) for name in "ab")
    access = Access("etl", rules, only=frozenset(only))
    assert (access.refusal(right, topic) is None) == is_allowed


def test_the_holder_of_an_administrators_token_is_no_administrator() -> None:
    access = Access("admin", RuleTable(()), only=frozenset({(READ, "a")}))
    assert access.refusal(READ, "a") is None
    assert access.refusal(WRITE, "a") is not None
    for refused in (
        lambda: access.check_cluster("describe"),
        lambda: access.check_cluster("promote"),
        access.check_is_broker,
        access.check_begins,
        lambda: access.check_owner("admin", ""),
    ):
        with pytest.raises(NotAuthorized):
            refused()
    assert not access.may_recover


def test_a_holder_knows_the_secret_and_shows_it_nowhere(authority: Authority) -> None:
    config = make_token(SecurityConfig(ca=str(authority.folder / "ca.crt")))
    assert config.secret not in repr(config)
    assert config.authority not in repr(config)
    assert config.secret not in repr(ClusterAccess("zk:2181", security=config))
    assert pickle.loads(pickle.dumps(config)) == config
    assert verifier_of(config) == verifier_of(pickle.loads(pickle.dumps(config)))
    assert config.is_on
    with pytest.raises(ConfigError, match="cannot be read"):
        make_token(SecurityConfig(ca="/nowhere/ca.crt"))


def test_a_seed_gives_the_same_token_and_no_seed_a_new_one(authority: Authority) -> None:
    config = SecurityConfig(ca=str(authority.folder / "ca.crt"))
    assert make_token(config, b"seed") == make_token(config, b"seed")
    assert make_token(config, b"seed") != make_token(config, b"other")
    assert make_token(config) != make_token(config)


def test_verifiers_that_are_not_stored(authority: Authority) -> None:
    good = verifier_of(make_token(SecurityConfig(ca=str(authority.folder / "ca.crt"))))
    check_verifier(good)
    wrong = (
        {"salt": b"x" * 5000},
        {"stored_key": b""},
        {"server_key": b"x" * 65},
        {"iterations": -1},
        {"iterations": 10**8},
    )
    for fields in wrong:
        with pytest.raises(ConfigError, match="SCRAM-SHA-512"):
            check_verifier(good._replace(**fields))


def test_the_node() -> None:
    known = {"abc": token(), "def": token("other", topic="*")}
    assert DELEGATIONS.parsed("/node", DELEGATIONS.encode(known)) == known


# At a real broker


def with_a_token(
    secure: Cluster,
    security: SecurityConfig,
    rights: set[tuple[str, str]],
    use: Callable[[DelegatedToken], Awaitable[Any]],
    lifetime_s: float = 60,
) -> Any:
    """The result of `use`, in the loop of the client that delegates."""

    async def delegate() -> Any:
        session = await open_client_session(ClusterAccess(secure.zookeeper, security=security), 10_000)
        cluster = ClusterClient(session)
        try:
            token = DelegatedToken.new(cluster, security, frozenset(rights), lifetime_s)
            await token.renew()
            return await use(token)
        finally:
            await cluster.close()
            await session.close()

    return asyncio.run(delegate())


class Holder:
    """A connection by a token, as tasks of Spark use it."""

    def __init__(self, secure: Cluster, config: DelegatedConfig) -> None:
        security = client_security(config).brokers
        self.connection = BlockingConnection.open("127.0.0.1", secure.broker.port, security=security, timeout_s=SLOW_S)

    def error(self, command: int, header: Any) -> MetamqError | None:
        """That of the request, or of its only entry."""
        self.connection.send(command, header, timeout_s=SLOW_S)
        answer = self.connection.receive(timeout_s=SLOW_S)
        if answer.status != status.OK:
            return decode_error(answer.status, answer.header)
        result = OffsetsResult(*answer.header[0]) if command == Command.OFFSETS else None
        return decode_error(result.status, result.error) if result is not None and result.status else None

    def read_error(self, topic: str) -> MetamqError | None:
        return self.error(Command.OFFSETS, [OffsetsEntry(topic, "", 0, LATEST)])


def test_a_holder_reads_and_does_nothing_else(secure: Cluster, security: SecurityConfig, name: str) -> None:
    async def use(token: DelegatedToken) -> None:
        holder = await asyncio.to_thread(Holder, secure, token.config)
        assert not isinstance(holder.read_error(name), NotAuthorized)
        assert isinstance(holder.read_error("other"), NotAuthorized)
        assert isinstance(holder.error(Command.STATS, Stats("", 0)), NotAuthorized)
        again = Delegate("mine", [DelegatedRight(READ, name)], 60, *verifier_of(token.config))
        assert "only a user" in str(holder.error(Command.DELEGATE, again))
        with (
            Producer(secure.zookeeper, security=token.config, linger_ms=0) as producer,
            pytest.raises(NotAuthorized, match=f"'{name}' may not write topic:{name}"),
        ):
            await asyncio.to_thread(producer.send(name, b"x").result, SLOW_S)
        holder.connection.abort()

    with_a_token(secure, security, {(READ, name)}, use)


@pytest.mark.parametrize(
    ("token_id", "rights", "words"),
    [
        ("a/b", [(READ, "t")], "cannot be the name"),
        ("abc", [], "1 to 200 rights"),
        ("abc", [("promote", "t")], "cannot have the right 'promote'"),
        ("abc", [(READ,)], "DelegatedRight has 2 fields"),
        ("abc", [("x" * 1000, "t")], "cannot have the right"),
        ("abc", [(READ, str(number)) for number in range(RIGHTS_MAX + 1)], "the limit is 200"),
    ],
)
def test_tokens_that_cannot_be(
    secure: Cluster, authority: Authority, name: str, token_id: str, rights: list[Any], words: str
) -> None:
    with RawClient(secure, authority, name) as client, pytest.raises(MetamqError, match=words):
        client.ask(Command.DELEGATE, [token_id, rights, 60, *VERIFIERS[MECHANISM]])


def test_who_has_a_right_on_no_topic_delegates_nothing_on_all_topics(
    secure: Cluster, authority: Authority, name: str
) -> None:
    with RawClient(secure, authority, name) as client:
        for rights in ([(READ, "*")], [(WRITE, "*")]):
            with pytest.raises(NotAuthorized, match="topic:\\*"):
                client.ask(Command.DELEGATE, ["abc", rights, 60, *VERIFIERS[MECHANISM]])


def test_any_time_is_answered(secure: Cluster, authority: Authority, name: str, security: SecurityConfig) -> None:
    with RawClient(secure, authority, name) as client:
        for lifetime_s in (-(2**63), -1, 0, 2**63 - 1, 0):
            client.ask(Command.DELEGATE, ["abc", [(READ, name)], lifetime_s, *VERIFIERS[MECHANISM]])


def test_brokers_do_not_delegate(secure: Cluster, authority: Authority) -> None:
    """A holder of their token could act on behalf of others."""
    with RawClient(secure, authority, "brokers") as client, pytest.raises(ConfigError, match="can delegate"):
        client.ask(Command.DELEGATE, ["abc", [(READ, "t")], 60, *VERIFIERS[MECHANISM]])


def test_a_holder_writes(secure: Cluster, security: SecurityConfig, name: str) -> None:
    async def use(token: DelegatedToken) -> None:
        with Producer(secure.zookeeper, security=token.config, linger_ms=0) as producer:
            await asyncio.to_thread(producer.send(name, b"by token").result, SLOW_S)

    with_a_token(secure, security, {(WRITE, name)}, use)
    with Consumer(secure.zookeeper, topics=name, security=security, start="earliest", idle_timeout_s=1) as consumer:
        assert [message.value for message in consumer] == [b"first", b"by token"]


def test_who_delegates_must_have_the_right(secure: Cluster, security: SecurityConfig, name: str) -> None:
    async def use(token: DelegatedToken) -> None:
        raise AssertionError("no token")

    with pytest.raises(NotAuthorized, match=f"'{name}' may not read topic:other"):
        with_a_token(secure, security, {(READ, "other")}, use)


def test_a_token_ends_when_its_client_ends_it(secure: Cluster, security: SecurityConfig, name: str) -> None:
    async def use(token: DelegatedToken) -> None:
        holder = await asyncio.to_thread(Holder, secure, token.config)
        await token.end()
        await asyncio.to_thread(wait_until, lambda: is_closed(holder, name), what="the end of the connection")
        with pytest.raises(AuthenticationFailed):
            await asyncio.to_thread(Holder, secure, token.config)

    with_a_token(secure, security, {(READ, name)}, use)


def is_closed(holder: Holder, topic: str) -> bool:
    try:
        holder.read_error(topic)
    except ConnectError:
        return True
    return False


@pytest.mark.slow
def test_a_token_ends_after_its_time_and_not_before_if_it_is_renewed(
    secure: Cluster, security: SecurityConfig, name: str
) -> None:
    async def use(token: DelegatedToken) -> None:
        keeping = asyncio.ensure_future(token.keep())
        holder = await asyncio.to_thread(Holder, secure, token.config)
        first_end_s = expires_s(secure, name)
        await asyncio.to_thread(wait_until, lambda: time.time() > first_end_s, what="the end of its first lifetime")
        assert not isinstance(await asyncio.to_thread(holder.read_error, name), NotAuthorized)
        keeping.cancel()
        await asyncio.to_thread(wait_until, lambda: is_closed(holder, name), what="the end of the connection")

    with_a_token(secure, security, {(READ, name)}, use, lifetime_s=3)


def expires_s(secure: Cluster, name: str) -> float:
    with secure.admin() as admin:
        (found,) = [one for one in admin.tokens() if one.principal == name]
    return found.expires_ms / 1000


def test_a_rule_counts_for_holders_too(secure: Cluster, security: SecurityConfig, name: str) -> None:
    async def use(token: DelegatedToken) -> None:
        holder = await asyncio.to_thread(Holder, secure, token.config)
        with secure.admin() as admin:
            await asyncio.to_thread(admin.remove_rules, "allow", name, READ, f"topic:{name}")
        await asyncio.to_thread(
            wait_until, lambda: isinstance(holder.read_error(name), NotAuthorized), what="the rule's end"
        )
        holder.connection.abort()

    with_a_token(secure, security, {(READ, name)}, use)


def test_an_administrator_lists_and_ends_tokens(secure: Cluster, security: SecurityConfig, name: str) -> None:
    async def use(token: DelegatedToken) -> None:
        holder = await asyncio.to_thread(Holder, secure, token.config)
        with secure.admin() as admin:
            (found,) = [one for one in admin.tokens() if one.principal == name]
            assert (found.token_id, found.rights) == (token.config.token_id, ((READ, name),))
            await asyncio.to_thread(admin.end_tokens, name)
            await asyncio.to_thread(wait_until, lambda: is_closed(holder, name), what="the end of the connection")
            assert not [one for one in admin.tokens() if one.principal == name]

    with_a_token(secure, security, {(READ, name)}, use)


def test_the_tokens_of_a_user_end_with_its_password(secure: Cluster, authority: Authority, name: str) -> None:
    with secure.admin() as admin:

        async def add(session: Session) -> None:
            await DELEGATIONS.change(session, lambda known: {**known, f"of-{name}": token(name, FAR_MS)})

        for change in (lambda: admin.set_user(name, "another password"), lambda: admin.remove_user(name)):
            admin.set_user(name, "the first password")
            run(secure, secure.security, add)
            assert [one for one in admin.tokens() if one.principal == name]
            change()
            assert not [one for one in admin.tokens() if one.principal == name]


def test_the_name_of_a_token_is_no_password(secure: Cluster, security: SecurityConfig, name: str) -> None:
    async def use(token: DelegatedToken) -> None:
        guessed = DelegatedConfig(
            zookeeper_tls=False,
            token_id=token.config.token_id,
            secret="not the secret",
            authority=token.config.authority,
        )
        with pytest.raises(AuthenticationFailed, match="the token has ended, or its secret is wrong"):
            await asyncio.to_thread(Holder, secure, guessed)

    with_a_token(secure, security, {(READ, name)}, use)
