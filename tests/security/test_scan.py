"""A scan of a cluster with security on: with the rights of its principal, and with a certificate only."""

from __future__ import annotations

import pyarrow as pa
import pytest

import metamq
from metamq import Producer, SecurityConfig
from metamq.errors import ConnectError, NotAuthorized
from metamq.testing import Cluster


def test_a_scan_has_the_rights_of_its_principal(secure: Cluster, security: SecurityConfig, name: str) -> None:
    with Producer(secure.zookeeper, security=security) as producer:
        producer.send_table(name, pa.table({"value": ["a", "b"]}))
    table = metamq.scan(name, zookeeper=secure.zookeeper, security=security)
    by_broker = metamq.Scan([task._replace(in_place=False) for task in table._tasks], table.schema)
    for one in (table, by_broker):
        assert pa.table(one)["value"].to_pylist() == [b"first", b"a", b"b"]
    secure.create_topic(f"{name}-of-others", partitions=1)
    with pytest.raises(NotAuthorized):
        metamq.scan(f"{name}-of-others", zookeeper=secure.zookeeper, security=security)
    with pytest.raises(ConnectError):
        metamq.scan(name, zookeeper=secure.zookeeper, security=SecurityConfig(), timeout_s=1)
