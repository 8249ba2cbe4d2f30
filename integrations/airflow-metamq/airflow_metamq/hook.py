"""The connection type `metamq`: the way to a cluster, from a Connection of Airflow."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import Any

from airflow.sdk import BaseHook, Connection

from metamq import Admin, SecurityConfig
from metamq.client.settings import load
from metamq.errors import ConfigError, MetamqError, NotAuthorized
from metamq.security.config import PasswordConfig


def settings_of(connection: Connection) -> dict[str, Any]:
    """Returns the arguments of metamq's clients for a Connection. Raises ConfigError.

    host, port       ZooKeeper; the default is $METAMQ_ZOOKEEPER. The host may also be "zk1:2181,zk2:2181/chroot".
    login, password  a user of metamq
    extra            `root`, `config`, and in `security` the fields of SecurityConfig
    """
    extra = dict(connection.extra_dejson)
    security: SecurityConfig = load(
        SecurityConfig, "security", file=extra.get("config"), arguments=extra.pop("security", {})
    )
    if connection.login:
        if not security.is_on:
            raise ConfigError(
                f"the connection {connection.conn_id} has a login, but the authority of the brokers is not known",
                hint='Add {"security": {"ca": "..."}} to its extra, or set METAMQ_SECURITY_CA.',
            )
        fields = {**asdict(security), "user": "", "password_file": "", "token_file": ""}
        security = PasswordConfig(**fields, name=connection.login, password=connection.password or "")
    port = f":{connection.port}" if connection.port else ""
    return {"zookeeper": f"{connection.host}{port}" if connection.host else None, **extra, "security": security}


class MetamqHook(BaseHook):
    """The way to a cluster for tasks: `Producer(**MetamqHook("metamq_default").settings())`."""

    conn_name_attr = "metamq_conn_id"
    default_conn_name = "metamq_default"
    conn_type = "metamq"
    hook_name = "metamq"

    def __init__(self, metamq_conn_id: str = default_conn_name) -> None:
        super().__init__()
        self._conn_id = metamq_conn_id

    def settings(self) -> dict[str, Any]:
        """Returns the arguments of metamq's clients. Raises ConfigError, and Airflow's error without a connection."""
        return settings_of(self.get_connection(self._conn_id))

    def test_connection(self) -> tuple[bool, str]:
        """Returns True if all brokers answer this client, and a text for people."""
        try:
            with Admin(**self.settings()) as admin:
                for broker_id in admin.brokers():
                    with contextlib.suppress(NotAuthorized):  # then the login is right
                        admin.statistics(broker_id)
        except MetamqError as error:
            return False, str(error)
        return True, "All brokers answer."
