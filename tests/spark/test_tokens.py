"""Tasks that log in by a token of their query, as executors do, at real brokers and without Spark."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from metamq import Admin, Producer, SecurityConfig
from metamq.client.scan.connection_pool import ConnectionKey, connection_pool
from metamq.client.scan.fetch import FetchTask, fetch
from metamq.errors import AuthenticationFailed, ConfigError, ConnectError, NotAuthorized
from metamq.security.certificates import Authority
from metamq.security.config import DelegatedConfig
from metamq.security.rights import READ, WRITE
from metamq.spark_consumers.driver.planning import batch_ranges, tasks
from metamq.spark_consumers.driver.query_view import QueryView
from metamq.spark_consumers.sink import sink_client as worker
from metamq.spark_consumers.sink.sink_client import for_tasks
from metamq.spark_consumers.sink.sink_options import SinkOptions, parse_sink_options
from metamq.spark_consumers.source.driver_secret import token_seed
from metamq.spark_consumers.source.options import parse_options
from metamq.testing import Cluster, cluster
from tests.parts import wait_until
from tests.security.certificate_folder import HOSTS, in_days, make_folder, secured

PASSWORD = "canary in a coal mine"
TOPIC = "flights"
OTHER = "trains"
VALUES = [b"%d" % number for number in range(1000)]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def secure(certificates: Path) -> Iterator[Cluster]:
    """A master, a slave, and a ZooKeeper that speaks TLS."""
    with cluster(security=secured(certificates)) as running, running.admin() as admin:
        running.add_slave()
        for topic in (TOPIC, OTHER):
            running.create_topic(topic, partitions=1)
        admin.set_user("etl", PASSWORD)
        for right in (READ, WRITE):
            admin.add_rules("allow", "etl", right, f"topic:{TOPIC}")
        with running.producer() as producer:
            producer.send_many(TOPIC, VALUES)
        wait_until(lambda: is_ready(admin), what="a slave in sync")
        with running.consumer(topics=TOPIC, start="earliest", idle_timeout_s=1) as consumer:
            assert [message.value for message in consumer] == VALUES
        yield running


def is_ready(admin: Admin) -> bool:
    (broker,) = admin.replicas().values()
    return len(broker.replicas) == 2 and all(replica.in_sync for replica in broker.replicas)


@pytest.fixture
def driver(secure: Cluster, certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The environment of a driver that logs in by password; returns the file with it."""
    password = tmp_path / "password"
    password.write_text(PASSWORD)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = {"CA": certificates / "ca.crt", "USER": "etl", "PASSWORD_FILE": password}
    for name, value in settings.items():
        monkeypatch.setenv(f"METAMQ_SECURITY_{name}", str(value))
    return password


def planned(secure: Cluster, **options: str) -> list[FetchTask]:
    given = {"zookeeper": secure.zookeeper, "subscribe": TOPIC, "readFiles": "false", **options}
    parsed = parse_options(given, streaming=False)
    with QueryView(parsed.access) as view:
        ranges = batch_ranges(view, parsed)
        return tasks(view, parsed, ranges, topics={one.tp.topic for one in ranges})


def rows(task: FetchTask) -> int:
    return sum(header.count for chunk in fetch(task) for header, *_rest in chunk)


def test_tasks_need_no_file_and_carry_no_password(secure: Cluster, driver: Path) -> None:
    (task,) = planned(secure)
    driver.unlink()
    sent = pickle.dumps(task)
    assert PASSWORD.encode() not in sent
    assert str(driver).encode() not in sent
    assert isinstance(task.access.security, DelegatedConfig)
    assert task.access.security.secret not in repr(task)
    assert rows(pickle.loads(sent)) == len(VALUES)


def test_a_task_finds_moved_brokers_in_zookeeper_without_a_certificate(secure: Cluster, driver: Path) -> None:
    (task,) = planned(secure)
    assert rows(task._replace(replicas=())) == len(VALUES)


def test_slaves_know_the_token(secure: Cluster, driver: Path) -> None:
    (task,) = planned(secure)
    (slave,) = [replica for replica in task.replicas if replica.port == secure.slaves[0].port]
    assert rows(task._replace(replicas=(slave,))) == len(VALUES)


def test_with_delegation_off_tasks_use_the_files(secure: Cluster, driver: Path) -> None:
    (task,) = planned(secure, delegation="false")
    assert task.access.security.password_file == str(driver)
    assert rows(task) == len(VALUES)


@pytest.mark.parametrize("text", ["30s", "8d", "soon"])
def test_the_lifetime_has_limits(text: str) -> None:
    with pytest.raises(ConfigError, match="tokenLifetime"):
        parse_options({"subscribe": TOPIC, "tokenLifetime": text}, streaming=False)


def test_a_driver_without_the_right_gets_no_token(secure: Cluster, driver: Path) -> None:
    with pytest.raises(NotAuthorized, match=f"'etl' may not read topic:{OTHER}"):
        planned(secure, subscribe=OTHER)


def changed(task: FetchTask, **fields: Any) -> FetchTask:
    """The task with another token. It tries for a moment only, and over new connections."""
    close_pool()
    security = replace(task.access.security, **fields)
    return task._replace(access=task.access._replace(security=security), poll_timeout_s=0.5, with_slaves=False)


def close_pool() -> None:
    while kept := connection_pool().kept:
        kept.pop().abort()


def refused(task: FetchTask) -> str:
    with pytest.raises(ConnectError) as caught:
        list(fetch(task))
    return str(caught.value)


def test_a_token_that_is_unknown(secure: Cluster, driver: Path) -> None:
    (task,) = planned(secure)
    for field in ("token_id", "secret"):
        with pytest.raises(AuthenticationFailed, match=r"the token has ended.* with a longer `tokenLifetime`"):
            list(fetch(changed(task, **{field: "not the right one"})))


def test_a_task_of_another_authority(secure: Cluster, driver: Path, tmp_path: Path) -> None:
    (task,) = planned(secure)
    other = make_folder(tmp_path / "other")
    theirs = (other.folder / "ca.crt").read_text()
    assert "its certificate is rejected" in refused(changed(task, authority=theirs))


def test_a_task_knows_the_revoked_certificates_of_its_driver(
    secure: Cluster, driver: Path, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    revoked = certificates / "revoked.crl"
    monkeypatch.setenv("METAMQ_SECURITY_REVOKED", str(revoked))
    (task,) = planned(secure)
    assert rows(task) == len(VALUES)
    authority = Authority(certificates)
    try:
        authority.revoke("brokers")
        later = changed(task, revocations=revoked.read_text())
        assert "certificate revoked" in refused(later)
    finally:
        authority.issue("brokers", HOSTS)


def test_a_task_at_a_broker_without_tls(secure: Cluster, driver: Path) -> None:
    (task,) = planned(secure)
    with cluster() as plain, pytest.raises(ConnectError, match="it does not speak TLS"):
        connection_pool().take(ConnectionKey(0, "127.0.0.1", plain.broker.port, task.access.security))


@pytest.mark.parametrize(
    ("issue", "problem"),
    [
        (lambda authority: authority.issue("brokers", HOSTS, days=1, now=in_days(-9)), "certificate has expired"),
        (lambda authority: authority.issue("brokers", HOSTS, now=in_days(9)), "certificate is not yet valid"),
        (lambda authority: authority.issue("brokers", ["elsewhere"]), "is not valid for '127.0.0.1'"),
    ],
)
def test_a_brokers_certificate_that_a_task_refuses(
    secure: Cluster, driver: Path, certificates: Path, issue: Callable[[Authority], object], problem: str
) -> None:
    (task,) = planned(secure)
    authority = Authority(certificates)
    try:
        issue(authority)
        assert problem in refused(changed(task))
    finally:
        authority.issue("brokers", HOSTS)


# Sinks


@pytest.fixture
def sinks() -> Iterator[None]:
    """Closes the connections that a worker of Spark would keep."""
    yield
    while worker._connected:
        _access, connected = worker._connected.popitem()
        connected.background.run(connected.close())


def sink(secure: Cluster, **options: str) -> SinkOptions:
    """The options of the tasks."""
    return for_tasks(parse_sink_options({"zookeeper": secure.zookeeper, "topic": TOPIC, **options}, streaming=False))


def test_a_sinks_token_is_for_its_topic(secure: Cluster, driver: Path, sinks: None) -> None:
    made = sink(secure)
    security = made.access.security
    assert isinstance(security, DelegatedConfig)
    assert PASSWORD.encode() not in pickle.dumps(made)
    with Producer(secure.zookeeper, security=security, linger_ms=0) as producer:
        producer.send(TOPIC, b"by token").result(30)
        with pytest.raises(NotAuthorized):
            producer.send(OTHER, b"by token").result(30)


def test_many_batches_have_one_token_for_reading_and_one_for_writing(
    secure: Cluster, driver: Path, sinks: None
) -> None:
    """Spark makes a new writer of a stream for each batch and each commit, and plans each batch query by itself."""
    with secure.admin() as admin:
        admin.end_tokens("etl")
    read = {task.access.security for _ in range(30) for task in planned(secure)}
    written = {sink(secure).access.security for _ in range(120)}
    assert (len(read), len(written)) == (1, 1)
    with secure.admin() as admin:
        own = [token for token in admin.tokens() if token.principal == "etl"]
    assert len(own) == 2


def test_a_sink_is_planned_while_zookeeper_is_frozen(secure: Cluster, driver: Path, sinks: None) -> None:
    """The token is there, with most of its time: brokers look at what they know."""
    before = sink(secure)
    secure.zookeeper_server.freeze()
    try:
        assert sink(secure) == before
    finally:
        secure.zookeeper_server.thaw()


def test_exactly_once_has_no_token(secure: Cluster, driver: Path, sinks: None) -> None:
    assert sink(secure, delivery="exactly_once").access.security.password_file == str(driver)
    with pytest.raises(ConfigError, match="are for delivery=at_least_once"):
        sink(secure, delivery="exactly_once", delegation="true")


def test_the_secret_of_drivers_is_kept_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    config, rights = SecurityConfig(ca="ca.crt", user="etl", password_file="p"), frozenset({(READ, TOPIC)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        seed = token_seed(config, rights)
        assert seed is not None
        assert seed == token_seed(config, rights)
        assert seed != token_seed(replace(config, user="other"), rights)
        assert seed != token_seed(config, frozenset({(WRITE, TOPIC)}))
        (file,) = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert file.stat().st_mode & 0o777 == 0o600
        file.write_bytes(b"")
        assert token_seed(config, rights) is None
