"""The limit on the connections of one principal."""

from __future__ import annotations

import pytest

from metamq.client.net.blocking_connection import BlockingConnection
from metamq.errors import ConnectError
from metamq.security.certificates import Authority
from metamq.security.tls import client_security
from metamq.testing import Cluster
from tests.one_zookeeper import cluster
from tests.parts import SLOW_S, wait_until
from tests.security.certificate_folder import client_of, secured


def connect(running: Cluster, authority: Authority, name: str) -> BlockingConnection:
    security = client_security(client_of(authority.folder, name)).brokers
    return BlockingConnection.open("127.0.0.1", running.broker.port, security=security, timeout_s=SLOW_S)


def test_one_principal_leaves_connections_to_others(authority: Authority, name: str) -> None:
    authority.issue("other")
    security = secured(authority.folder, zookeeper_tls=False)
    with cluster(security=security, connections_max=30, connections_per_principal_max=2) as running:
        kept = [connect(running, authority, name) for _ in range(2)]
        with pytest.raises(
            ConnectError, match=f"busy: '{name}' has 2 connections already, the limit for one"
        ) as caught:
            connect(running, authority, name)
        assert caught.value.retriable
        assert "connections_per_principal_max" in caught.value.hint
        others = [connect(running, authority, each) for each in ("other", "other", "admin", "admin", "admin")]
        kept.pop().abort()

        def is_served() -> bool:
            try:
                kept.append(connect(running, authority, name))
            except ConnectError:
                return False
            return True

        wait_until(is_served, what="a place for another connection")
        for connection in (*kept, *others):
            connection.abort()
