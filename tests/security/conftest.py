"""A cluster with security on, and a new principal for each test."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from metamq import Producer, SecurityConfig
from metamq.errors import NotAuthorized
from metamq.security.certificates import Authority
from metamq.security.rights import READ, WRITE
from metamq.testing import Cluster
from tests.one_zookeeper import cluster
from tests.parts import SLOW_S, wait_until
from tests.security.certificate_folder import secured
from tests.security.raw_client import of


@pytest.fixture(scope="module")
def authority(certificates: Path) -> Authority:
    return Authority(certificates)


@pytest.fixture(scope="module")
def secure(authority: Authority) -> Iterator[Cluster]:
    with cluster(security=secured(authority.folder, zookeeper_tls=False)) as running:
        yield running


@pytest.fixture
def name(authority: Authority) -> str:
    """A principal with a certificate, which no other test gives rights."""
    name = f"p-{uuid.uuid4().hex[:8]}"
    authority.issue(name)
    return name


@pytest.fixture
def security(secure: Cluster, authority: Authority, name: str) -> SecurityConfig:
    """Of a client that may read and write the topic of its own name."""
    secure.create_topic(name, partitions=1)
    with secure.admin() as admin:
        for right in (READ, WRITE):
            admin.add_rules("allow", name, right, f"topic:{name}")
    security = of(authority, name)
    with Producer(secure.zookeeper, security=security, linger_ms=0) as producer:
        wait_until(lambda: is_sent(producer, name), what="the rules")
    return security


def is_sent(producer: Producer, topic: str) -> bool:
    with contextlib.suppress(NotAuthorized):
        producer.send(topic, b"first").result(SLOW_S)
        return True
    return False
