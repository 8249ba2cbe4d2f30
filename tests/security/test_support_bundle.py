"""`metamq bundle` of a cluster with security: names of users and rights, and no secret of them."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metamq import testing
from metamq.security.certificates import Authority
from metamq.security.delegation import MECHANISM, Delegation
from metamq.security.login import make_verifiers
from metamq.testing import Cluster
from metamq.zk.security.delegations import DELEGATIONS
from metamq.zk.session.session import Session
from tests.parts import SLOW_S
from tests.security.certificate_folder import secured
from tests.security.nodes import run, tree

PASSWORD, TOKEN, VALUE = "correct horse battery", "a long enough secret", b"a value that no bundle has"


@pytest.fixture(scope="module")
def guarded(authority: Authority) -> Iterator[Cluster]:
    """Brokers and ZooKeeper speak TLS only."""
    with testing.cluster(security=secured(authority.folder), http_tls=True) as running:
        yield running


def bundle(running: Cluster, folder: Path, role: str, path: Path) -> tuple[int, Any, dict[str, bytes]]:
    """(exit status, what it printed, the files by name) with the certificate `role`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("METAMQ_")}
    environment |= {"METAMQ_ZOOKEEPER": running.zookeeper, "METAMQ_SECURITY_DIR": str(folder)}
    environment["METAMQ_SECURITY_ROLE"] = role
    options = ["-o", "json", "--samples", "1", "--timeout", "60s", "--logs", str(running.folder)]
    command = [sys.executable, "-W", "error", "-m", "metamq.cli", "bundle", str(path), *options]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=4 * SLOW_S, check=False)
    assert done.returncode in (0, 1), done.stderr.decode()
    with tarfile.open(path) as archive:
        files = {one.name.partition("/")[2]: archive.extractfile(one) for one in archive}
        return done.returncode, json.loads(done.stdout), {name: one.read() for name, one in files.items() if one}


async def secrets_of(session: Session) -> list[bytes]:
    """The texts in the nodes with secrets that are no name, no right and no number."""
    found: list[bytes] = []
    for path in await tree(session, session.paths.security()):
        data = (await session.get(path)).data
        if path == session.paths.owner_key():
            found += [data, base64.b64encode(data), data.hex().encode()]
        elif data:
            found += [text.encode() for text in verifiers_in(json.loads(data))]
    return found


def verifiers_in(value: Any) -> Iterator[str]:
    for name, one in value.items() if isinstance(value, dict) else ():
        if name in ("salt", "stored_key", "server_key"):
            yield one
        else:
            yield from verifiers_in(one)


def test_an_administrator_gets_names_and_no_secret(guarded: Cluster, authority: Authority, tmp_path: Path) -> None:
    guarded.create_topic("orders", partitions=1)
    with guarded.admin() as admin:
        admin.set_user("etl", PASSWORD)
        admin.add_rules("allow", "etl", "read", "topic:orders")
        admin.set_quota("etl", requests_s=5)
    with guarded.producer() as producer:
        producer.send("orders", VALUE, key=VALUE).result(SLOW_S)
    token = Delegation("etl", frozenset({("read", "orders")}), 1 << 50, {MECHANISM: make_verifiers(TOKEN)[MECHANISM]})
    secrets = [PASSWORD.encode(), TOKEN.encode(), VALUE]

    async def add(session: Session) -> None:
        await DELEGATIONS.change(session, lambda known: {**known, "0123456789abcdef": token})
        secrets.extend(await secrets_of(session))

    run(guarded, guarded.security, add)
    for file in authority.folder.glob("*.key"):
        secrets += [line for line in file.read_bytes().splitlines() if not line.startswith(b"-----")]
    assert len(secrets) > 15
    with (guarded.folder / "broker-0.log").open("ab") as log:
        log.write(b"2026-11-28 10:42:14,503 ERROR metamq.broker: " + b" ".join(secrets[-3:]) + b"\n")

    status, printed, files = bundle(guarded, authority.folder, "admin", tmp_path / "b.tar.gz")
    for secret in secrets:
        assert [name for name, data in files.items() if secret in data] == [], secret
    assert (status, printed["problems"]) == (0, [])
    found = json.loads(files["cluster/security.json"])
    assert (found["users"], found["quotas"]["etl"]["requests_s"]) == (["etl"], 5)
    assert any("etl" in rule and "orders" in rule for rule in found["rules"])
    assert found["delegations"] == [{"principal": "etl", "rights": [["read", "orders"]], "expires_ms": 1 << 50}]
    nodes = json.loads(files["zookeeper/nodes.json"])["counts"]
    assert nodes["security/users"] == {"nodes": 1, "ephemeral": 0, "bytes": 0, "largest": 0, "largest_path": ""}
    assert b"with TLS" in files["zookeeper/servers.json"]
    assert any(name.endswith("/metrics-1.txt") for name in files)
    assert b"(removed) (removed) (removed)" in files["logs/broker-0.log"]


def test_a_client_without_rights_gets_the_rest(
    guarded: Cluster, authority: Authority, name: str, tmp_path: Path
) -> None:
    guarded.create_topic("refunds", partitions=1)
    status, printed, files = bundle(guarded, authority.folder, name, tmp_path / "b.tgz")
    assert status == 1
    missing = {one["part"] for one in printed["problems"]}
    assert {"brokers", "statistics", "security", "status"} <= missing
    assert "refunds" in [one["topic"] for one in json.loads(files["cluster/topics.json"])]
    assert json.loads(files["cluster/brokers.json"])[0]["live"] is True
    assert any(name.endswith("/readyz.txt") for name in files)
    assert b"status 403" in files["errors.txt"]
