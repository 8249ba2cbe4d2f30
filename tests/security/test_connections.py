"""The limit on the connections of one principal."""

from __future__ import annotations

from pathlib import Path

import pytest

from metamq import SecurityConfig
from metamq.client.net.blocking_connection import BlockingConnection
from metamq.errors import AuthenticationFailed, ConnectError
from metamq.security.certificates import Authority
from metamq.security.tls import client_security
from metamq.testing import Cluster
from tests.one_zookeeper import cluster
from tests.parts import SLOW_S, wait_until
from tests.security.certificate_folder import client_of, secured


def connect(running: Cluster, security: SecurityConfig) -> BlockingConnection:
    brokers = client_security(security).brokers
    return BlockingConnection.open("127.0.0.1", running.broker.port, security=brokers, timeout_s=SLOW_S)


@pytest.mark.parametrize("by_password", [False, True])
def test_one_principal_leaves_connections_to_others(
    authority: Authority, name: str, tmp_path: Path, by_password: bool
) -> None:
    authority.issue("other")
    secure = secured(authority.folder, zookeeper_tls=False)
    with cluster(security=secure, connections_max=30, connections_per_principal_max=2) as running:
        security = client_of(authority.folder, name)
        if by_password:
            password = tmp_path / "password"
            password.write_text("right one")
            with running.admin() as admin:
                admin.set_user(name, "right one")
            ca = str(authority.folder / "ca.crt")
            security = SecurityConfig(ca=ca, user=name, password_file=str(password), zookeeper_tls=False)
        wait_until(lambda: is_known(running, security), what="the user")
        kept = [connect(running, security) for _ in range(2)]
        with pytest.raises(
            ConnectError, match=f"busy: '{name}' has 2 connections already, the limit for one"
        ) as caught:
            connect(running, security)
        assert caught.value.retriable
        assert "connections_per_principal_max" in caught.value.hint
        names = ("other", "other", "admin", "admin", "admin")
        others = [connect(running, client_of(authority.folder, each)) for each in names]
        kept.pop().abort()

        def is_served() -> bool:
            try:
                kept.append(connect(running, security))
            except ConnectError:
                return False
            return True

        wait_until(is_served, what="a place for another connection")
        for connection in (*kept, *others):
            connection.abort()


def is_known(running: Cluster, security: SecurityConfig) -> bool:
    try:
        connect(running, security).abort()
    except AuthenticationFailed:
        return False
    return True
