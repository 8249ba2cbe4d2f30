"""Changes of topics that clients ask brokers for: how many at a time, how large, and what of them is written down."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import metamq
from metamq import aio, testing
from metamq.broker.front_door.administration import CHANGES_MAX, DOCUMENT_BYTES_MAX
from metamq.errors import ConfigError, NotAuthorized, ServerBusy
from metamq.security.certificates import Authority
from metamq.testing import Cluster
from metamq.wire import status
from metamq.wire.commands import Command, TopicChange
from metamq.wire.status import decode_error
from metamq.zk.cluster.schemas import SCHEMAS_BYTES_MAX, Schema
from metamq.zk.cluster.topics import NEW, TopicConfig, to_json
from tests.one_zookeeper import cluster
from tests.parts import wait_until
from tests.security.certificate_folder import client_of, secured
from tests.security.raw_client import RawClient
from tests.security.test_fuzz_secure import TlsClient

pytestmark = pytest.mark.slow
MANY = 30


@pytest.fixture(scope="module")
def audited(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Path]]:
    path = tmp_path_factory.mktemp("audit") / "audit.log"
    with cluster(security=secured(authority.folder, zookeeper_tls=False), audit=str(path)) as running:
        yield running, path


def test_a_client_has_few_changes_made_at_a_time_and_many_of_them_leave_few_lines(
    audited: tuple[Cluster, Path], authority: Authority, name: str
) -> None:
    running, path = audited
    with running.admin() as admin, RawClient(running, authority, name) as first:
        admin.add_rules("allow", name, "create", "topic:mine-*")
        wrong = TopicChange("mine-0", b"{}", NEW)
        wait_until(lambda: "may not" not in str(first.error(Command.TOPIC, wrong)), what="the rule")
    with TlsClient(running.broker.port, authority.folder, name) as client:
        client.greeted()
        documents = {f"mine-{number}": to_json(TopicConfig(f"mine-{number}", {0: 1})) for number in range(MANY)}
        requests = [client.frame(Command.TOPIC, TopicChange(*one, NEW))[1] for one in documents.items()]
        client.send(b"".join(requests))
        frames = [client.answer() for _ in range(MANY)]
        done = [frame for frame in frames if frame.status == status.OK]
        errors = [decode_error(frame.status, frame.header) for frame in frames if frame.status != status.OK]
    assert len(done) >= CHANGES_MAX
    assert errors
    assert {type(error) for error in errors} == {ServerBusy}, errors[0]
    with running.admin() as admin:
        assert sum(topic.startswith("mine-") for topic in admin.topics()) == len(done)
    wait_until(lambda: path.read_text().count('"change"') > 0, what="lines")
    assert path.read_text().count('"change"') <= 45, "20 in a second"


def test_a_large_document_is_refused(audited: tuple[Cluster, Path], authority: Authority) -> None:
    running, _path = audited
    with RawClient(running, authority, "admin") as client:
        error = client.error(Command.TOPIC, TopicChange("large", bytes(DOCUMENT_BYTES_MAX + 1), NEW))
        assert isinstance(error, ConfigError)
        assert f"take more than {DOCUMENT_BYTES_MAX:,} bytes" in str(error)


def test_a_user_registers_schemas_up_to_their_limit(authority: Authority, name: str) -> None:
    fields = [{"name": f"field_{number}", "type": "int"} for number in range(6000)]
    definition = json.dumps({"type": "record", "name": "Large", "fields": fields})
    assert SCHEMAS_BYTES_MAX * 0.8 < len(definition) < SCHEMAS_BYTES_MAX
    with testing.cluster(security=secured(authority.folder)) as running:
        running.create_topic("large", partitions=1)
        with running.admin() as admin:
            admin.add_rules("allow", name, "alter", "topic:large")
        with metamq.Admin(running.zookeeper, security=client_of(authority.folder, name)) as admin:
            assert registered(admin, Schema("avro", definition)) == 1


def registered(admin: metamq.Admin, schema: Schema) -> int:
    """The version of the schema, once the broker knows the rule."""
    found: list[int] = []

    def is_registered() -> bool:
        with contextlib.suppress(NotAuthorized):
            found.append(admin.register_schema("large", schema))
        return bool(found)

    wait_until(is_registered, what="the rule")
    return found[0]


def test_more_changes_at_a_time_than_a_broker_makes_are_all_made(authority: Authority, name: str) -> None:
    security = client_of(authority.folder, name)

    async def create_all(running: Cluster) -> None:
        async with aio.Admin(running.zookeeper, security=security) as admin:
            await asyncio.gather(*(admin.create_topic(f"all-{number}", partitions=1) for number in range(MANY)))

    with testing.cluster(security=secured(authority.folder)) as running, running.admin() as admin:
        admin.add_rules("allow", name, "create", "topic:all-*")
        asyncio.run(create_all(running))
        assert len(admin.topics()) == MANY
