"""An open cluster becomes a secure one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from metamq import Admin, Consumer, Producer, SecurityConfig
from metamq.errors import AuthenticationFailed
from metamq.security.tls import client_security
from metamq.testing import BrokerProcess
from metamq.zk.server.embedded import EmbeddedZooKeeper
from metamq.zk.session.acls import acl_of
from metamq.zk.session.session import Session
from tests.cli.conftest import Metamq
from tests.parts import SLOW_S, read_to_end
from tests.security.certificate_folder import client_of, make_folder, secured


def beside_an_open_broker(zookeeper: str, security: SecurityConfig, do: Callable[[], str]) -> str:
    """Registers a broker as one without a certificate does, and returns what `do` returns meanwhile."""

    async def run() -> str:
        async with await Session.open(zookeeper, security=client_security(security)) as session:
            path = session.paths.master(7)
            await session.create(path, ephemeral=True, makepath=True)
            await session.set_acl(path, acl_of(session.paths, "/elsewhere"))
            return await asyncio.to_thread(do)

    return asyncio.run(run())


@pytest.mark.slow
def test_an_open_cluster_becomes_a_secure_one(offline: Metamq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path / "security").folder
    with EmbeddedZooKeeper(tmp_path / "zookeeper") as server:
        broker = BrokerProcess(server.address, tmp_path / "broker")
        broker.start()
        with Admin(server.address) as admin, Producer(server.address) as producer:
            admin.create_topic("flights", partitions=2)
            producer.send("flights", b"before").result(SLOW_S)
        broker.stop()
    security = secured(folder)
    with EmbeddedZooKeeper(tmp_path / "zookeeper", security=security) as server:
        broker = BrokerProcess(server.address, tmp_path / "broker")
        broker.security = security
        broker.start()
        monkeypatch.setenv("METAMQ_ZOOKEEPER", server.address)
        assert "has no TLS" in offline("security", "migrate", "--yes").talk
        monkeypatch.setenv("METAMQ_SECURITY_DIR", str(folder))
        monkeypatch.setenv("METAMQ_SECURITY_ROLE", "admin")

        def found() -> dict[str, str]:
            (finding,) = [one for one in offline("doctor", "-o", "json").json if one["what"] == "security"]
            return finding

        assert found()["detail"] == "on, and others can change nodes in ZooKeeper, as /meta"
        plan = offline("security", "migrate")
        assert plan.status == 1
        assert "Other clients can change " in plan.talk
        assert found()["status"] == "warning", "without --yes nothing is done"
        assert "and would end: /meta/brokers/ids/7/master" in beside_an_open_broker(
            server.address, security, lambda: offline("security", "migrate", "--yes").talk
        )
        corrected = offline("security", "migrate", "--yes", "-o", "json").json["corrected"]
        assert {"/meta", "/meta/config/topics/flights", "/meta/brokers/ids/0/state"} <= {*corrected}
        assert offline("security", "migrate", "--yes", "-o", "json").json == {"corrected": []}
        assert found() == {"what": "security", "status": "ok", "detail": "on", "hint": ""}
        with Admin(server.address, security=client_of(folder)) as stranger, pytest.raises(AuthenticationFailed):
            stranger.delete("flights")
        broker.stop()
        broker.start()  # its nodes are its own
        with (
            Producer(server.address, security=security) as producer,
            Consumer(
                server.address, topics="flights", start="earliest", idle_timeout_s=1, security=security
            ) as consumer,
        ):
            producer.send("flights", b"after").result(SLOW_S)
            assert sorted(message.value for message in read_to_end(consumer)) == [b"after", b"before"]
        broker.stop()
