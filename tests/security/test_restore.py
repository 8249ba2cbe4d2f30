"""Users, rules and quotas come back with a restore of ZooKeeper."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from metamq import Admin, Producer, SecurityConfig
from metamq.testing import cluster
from tests.cli.conftest import COMMAND, unset
from tests.parts import SLOW_S, wait_until
from tests.security.certificate_folder import make_folder, secured
from tests.security.conftest import is_sent


@pytest.mark.slow
def test_users_rules_and_quotas_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = make_folder(tmp_path / "authority")
    folder, password, file = tmp_path / "cluster", tmp_path / "password", tmp_path / "cluster.json"
    password.write_text("a password of anna")
    variables = {"METAMQ_SECURITY_DIR": str(authority.folder), "METAMQ_SECURITY_ROLE": "admin"}
    anna = SecurityConfig(ca=str(authority.folder / "ca.crt"), user="anna", password_file=str(password))

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [*COMMAND, "--zookeeper", one.zookeeper, *map(str, arguments)]
        environment = {**unset(os.environ), **variables}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SLOW_S, check=True)

    with cluster(security=secured(authority.folder), folder=folder) as one:
        one.create_topic("orders", 1)
        with one.admin() as admin:
            admin.set_user("anna", password.read_text())
            admin.add_rules("allow", "anna", "write", "topic:orders")
            admin.set_quota("anna", requests_s=1000)
            rules, quotas = admin.rules(), admin.quotas()
        run("cluster", "export", file)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        data = one.broker.data
        one.broker.stop()
        restored = run(
            "--root", "/other", "cluster", "restore", "--data", data, "--export", file, "--yes", "-o", "json"
        )
        assert "verifier" not in restored.stdout
        assert "StoredKey" not in restored.stdout
        nodes = json.loads(restored.stdout)["nodes"]
        assert nodes["/security/users"] == "(secret)"
        with Admin(one.zookeeper, root="/other", security=secured(authority.folder)) as admin:
            assert (admin.users(), admin.rules(), admin.quotas()) == (["anna"], rules, quotas)
        monkeypatch.setenv("METAMQ_ROOT", "/other")
        one.broker.start()
        with Producer(one.zookeeper, root="/other", security=anna, linger_ms=0) as producer:
            wait_until(lambda: is_sent(producer, "orders"), what="anna's login and rule")
