"""A cluster with security on, and a new principal for each test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from metamq.security.certificates import Authority
from metamq.testing import Cluster
from tests.one_zookeeper import cluster
from tests.security.certificate_folder import make_folder, secured


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_folder(tmp_path_factory.mktemp("certificates") / "security")


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
