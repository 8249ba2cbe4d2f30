"""`metamq security`, and `metamq up --secure`: the commands of docs/security.md run as printed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from metamq import Producer, SecurityConfig
from metamq.errors import ConnectError
from metamq.security.certificates import Authority
from metamq.testing import cluster
from metamq.zk.session.session import Session
from tests import one_zookeeper
from tests.cli.conftest import Metamq, Outcome
from tests.parts import SLOW_S
from tests.security.certificate_folder import HOSTS, in_days, make_folder, secured
from tests.security.nodes import run

ROOT = Path(__file__).parents[2]
OFF = "Security is off: brokers apply no rule and no quota. docs/security.md turns it on.\n"
COMMANDS = "metamq security ", "metamq user ", "metamq acl ", "metamq quota ", "metamq group "
GUIDE = (ROOT / "docs" / "security.md").read_text()


def commands() -> list[list[str]]:
    """Those of the guide that need no cluster but this one."""
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```$", GUIDE, re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith(COMMANDS)]


@pytest.mark.slow
def test_the_guide_runs_as_printed(offline: Metamq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the hosts' machines: all is on this one, in the folder of the authority."""

    def here(*arguments: str) -> Outcome:
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            return offline(*arguments)

    init, *others = commands()
    assert here(*init).status == 0
    with cluster(folder=tmp_path / "cluster", security=secured(tmp_path / "metamq-security")) as running:
        running.create_topic("flights", partitions=1)
        monkeypatch.setenv("METAMQ_ZOOKEEPER", running.zookeeper)
        monkeypatch.setenv("METAMQ_SECURITY_DIR", str(tmp_path / "metamq-security"))
        monkeypatch.setenv("METAMQ_SECURITY_ROLE", "admin")
        words = "add list allow allow list set set list owner issue allow migrate list issue issue revoke"
        assert [command[1] for command in others] == words.split()
        with running.consumer(topics=["flights"], group="etl", idle_timeout_s=1) as consumer:
            assert list(consumer) == []
        for command in others:
            printed, _, file = " ".join(command).partition(" >")
            done = here(*printed.split())
            assert done.status == 0, done.talk
            if file:
                (tmp_path / file).write_bytes(done.data)
        states = {one["name"]: one["state"] for one in here("security", "list", "-o", "json").json}
        assert states == {"admin": "ok", "brokers": "ok", "prometheus": "ok", "report": "revoked", "zookeeper": "ok"}
        made = {one.name: one for one in Authority(tmp_path / "metamq-security").certificates()}
        assert set(made["brokers"].hosts) >= {"broker-0.example.org", "zk1.example.org", "localhost", "127.0.0.1"}
        (snippet,) = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
        as_user = {name: value for name, value in os.environ.items() if not name.startswith("METAMQ_SECURITY")}
        subprocess.run([sys.executable, "-c", snippet], check=True, timeout=SLOW_S, env=as_user, cwd=tmp_path)
        with running.consumer(topics=["flights"], start="earliest", idle_timeout_s=5) as consumer:
            assert [message.value for message in consumer] == [b"hello"]


@pytest.mark.slow
def test_users(offline: Metamq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with one_zookeeper.cluster() as running:
        monkeypatch.setenv("METAMQ_ZOOKEEPER", running.zookeeper)
        assert offline("user", "list", "-o", "json").json == []
        assert offline("user", "add", "etl", stdin=b"a long password\n").talk == "The user etl is added.\n"
        (tmp_path / "other").write_text("another password")
        again = offline("user", "add", "etl", "--password-file", tmp_path / "other")
        assert again.talk == "The user etl has another password.\n"
        made = offline("user", "add", "report", "--generate")
        assert len(made.text.strip()) >= 32
        assert made.text.strip() not in made.talk
        assert offline("user", "list", "-o", "json").json == ["etl", "report"]
        assert offline("user", "remove", "etl").talk == "The user etl is removed.\n"
        assert offline("acl", "allow", "report", "read", "topic:a", "topic:b").status == 0
        removed = "The user report is removed. 2 rules for that name stay: see `metamq acl list`.\n"
        assert offline("user", "remove", "report").talk == removed
        for arguments, problem in (
            (("remove", "etl"), "there is no user 'etl'"),
            (("add", "x"), "there is no password on standard input"),
            (("add", "brokers", "--generate"), "is the name of a certificate"),
            (("add", "a b", "--generate"), "cannot be the name of a principal"),
        ):
            assert problem in offline("user", *arguments).talk


def test_what_must_be_renewed_is_shown(offline: Metamq, tmp_path: Path) -> None:
    folder = tmp_path / "security"
    assert offline("security", "init", "--dir", folder, "--hosts", "a.example,10.0.0.7").status == 0
    assert offline("security", "list", "--dir", folder).status == 0
    authority = Authority(folder)
    authority.issue("soon", days=20)
    authority.issue("late", days=2, now=in_days(-9))
    listed = offline("security", "list", "--dir", folder)
    assert listed.status == 1
    assert {line.split()[0]: line.split()[1] for line in listed.text.splitlines()[1:]} == {
        "admin": "ok", "brokers": "ok", "late": "expired", "soon": "renew", "zookeeper": "ok",
    }  # fmt: skip
    before = {one.name: one for one in authority.certificates()}["brokers"]
    assert offline("security", "issue", "brokers", "--dir", folder, "--days", 30).status == 0
    after = {one.name: one for one in authority.certificates()}["brokers"]
    assert (after.hosts, after.not_after < before.not_after - timedelta(days=300)) == (before.hosts, True)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("init",), "has an authority already"),
        (("issue", "../x"), "cannot be the name of a principal"),
        (("revoke", "nobody"), "has no certificate 'nobody'"),
        (("issue", "x", "--hosts", "a:1"), "with a port"),
    ],
)
def test_misuse(offline: Metamq, tmp_path: Path, arguments: tuple[str, ...], problem: str) -> None:
    folder = tmp_path / "security"
    assert offline("security", "init", "--dir", folder).status == 0
    done = offline("security", *arguments, "--dir", folder)
    assert done.status == 1
    assert problem in done.talk
    assert "no authority" in offline("security", "list", "--dir", tmp_path / "other").talk


@pytest.mark.slow
def test_up_is_secure_and_stays_so(process: Callable[..., subprocess.Popen[bytes]], tmp_path: Path) -> None:
    ports = ("--port", 0, "--broker-port", 0, "--http-port", -1, "--data", tmp_path, "-o", "json")
    for options in (["--secure", "--slaves", 0], ["--slaves", 1]):
        child = process("up", *options, *ports)
        assert child.stdout is not None
        told = json.loads(child.stdout.readline())
        address = told["zookeeper"]
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(told["console"], timeout=SLOW_S)
        assert refused.value.code == 401
        refused.value.close()
        security = SecurityConfig(dir=str(tmp_path / "security"), role="admin")
        with Producer(address, security=security) as producer:
            assert producer is not None
        with pytest.raises(ConnectError):
            Producer(address)
        for slave in (one for one in psutil.Process(child.pid).children() if "--replica=1" in one.cmdline()):
            slave.kill()
            assert child.stderr is not None
            again = next(line for line in iter(child.stderr.readline, b"") if line.startswith(b"To start"))
            command = again.decode().removeprefix("To start it again: ")
            assert command.startswith(f"METAMQ_SECURITY_DIR={tmp_path}/security metamq broker --replica 1 ")
        child.terminate()
        assert child.wait(SLOW_S) == 0


def test_quotas(offline: Metamq, monkeypatch: pytest.MonkeyPatch) -> None:
    with one_zookeeper.cluster() as running:
        monkeypatch.setenv("METAMQ_ZOOKEEPER", running.zookeeper)
        done = offline("quota", "set", "etl", "--write-bytes", "10MB", "--read-bytes", "50MB")
        assert done.talk == (
            "No user has the name etl. The quota applies to a certificate or a token of that name.\n"
            "The quota of etl at each broker, in a second: --write-bytes 10,000,000, --read-bytes 50,000,000.\n" + OFF
        )
        assert offline("quota", "set", "*", "--requests", "1000").status == 0
        shown = [line.split() for line in offline("quota", "list").text.splitlines()[1:]]
        assert shown == [["*", "unlimited", "unlimited", "1,000"], ["etl", "10,000,000", "50,000,000", "unlimited"]]
        assert offline("quota", "list", "-o", "json").json[0] == {
            "principal": "*", "write_bytes_s": None, "read_bytes_s": None, "requests_s": 1000,
        }  # fmt: skip
        for words, said in (
            (("etl",), "'etl' has no limit"),
            (("etl", "--write-bytes", "0"), "leave the option out"),
            (("etl", "--requests", "0"), "0 is not in the range"),
            (("admin", "--requests", "1"), "'admin' never has a quota"),
            (("", "--requests", "1"), "cannot be the name of a principal"),
        ):
            refused = offline("quota", "set", *words)
            assert refused.status in (1, 2)
            assert said in refused.talk
        assert offline("quota", "remove", "etl").talk == "The quota of etl is removed.\n"
        assert "has no quota of its own" in offline("quota", "remove", "etl").talk


def test_tokens(offline: Metamq, monkeypatch: pytest.MonkeyPatch) -> None:
    with one_zookeeper.cluster() as running:
        monkeypatch.setenv("METAMQ_ZOOKEEPER", running.zookeeper)
        assert offline("user", "tokens", "-o", "json").json == []
        assert offline("user", "end-tokens", "etl").talk == "etl has no tokens.\n"
        for wrong in ("", "*"):
            assert offline("user", "end-tokens", wrong).status == 1


def test_doctor_looks_at_certificates_and_lists(
    tmp_path: Path, offline: Metamq, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = make_folder(tmp_path / "security")
    folder = authority.folder
    with one_zookeeper.cluster(security=secured(folder, zookeeper_tls=False)) as running:
        monkeypatch.setenv("METAMQ_ZOOKEEPER", running.zookeeper)
        for name, value in (("DIR", str(folder)), ("ROLE", "admin"), ("ZOOKEEPER_TLS", "false")):
            monkeypatch.setenv(f"METAMQ_SECURITY_{name}", value)
        assert "certificates: valid for at least 364 days\n" in offline("doctor").text
        authority.issue("brokers", HOSTS, days=20)
        assert "the certificate of broker 0 expires in 19 days" in offline("doctor").text

        async def damage(session: Session) -> None:
            await session.create(session.paths.quotas(), b'{"etl": {"requests_s": 1.5}}', makepath=True)

        run(running, running.security, damage)
        done = offline("doctor")
        assert done.status == 1
        assert "the list of quotas in ZooKeeper" in done.text + done.talk


def test_rules(offline: Metamq, monkeypatch: pytest.MonkeyPatch) -> None:
    with one_zookeeper.cluster() as running:
        monkeypatch.setenv("METAMQ_ZOOKEEPER", running.zookeeper)
        assert offline("acl", "list", "-o", "json").json == []
        done = offline("acl", "allow", "etl", "read", "topic:a", "topic:b-*")
        added = "The rule `allow etl read topic:a` is added.\nThe rule `allow etl read topic:b-*` is added.\n"
        assert done.talk == added + OFF
        assert offline("acl", "deny", "*", "read", "topic:b-x").status == 0
        shown = [line.split() for line in offline("acl", "list").text.splitlines()[1:]]
        assert shown == [
            ["*", "deny", "read", "topic:b-x"],
            ["etl", "allow", "read", "topic:a"],
            ["etl", "allow", "read", "topic:b-*"],
        ]
        yes = offline("acl", "explain", "etl", "read", "topic:b-y")
        assert (yes.status, yes.text) == (0, "yes: the rule `allow etl read topic:b-*` allows it\n")
        no = offline("acl", "explain", "etl", "read", "topic:b-x", "-o", "json")
        assert no.status == 1
        assert no.json["rule"] == {"effect": "deny", "principal": "*", "right": "read", "resource": "topic:b-x"}
        assert offline("acl", "explain", "etl", "write", "topic:a").text == "no: no rule allows it\n"
        assert offline("acl", "remove", "allow", "etl", "read", "topic:a").status == 0
        again = offline("acl", "remove", "allow", "etl", "read", "topic:a")
        assert again.status == 1
        assert "there is no rule `allow etl read topic:a`" in again.talk
        wrong = offline("acl", "allow", "etl", "eat", "topic:a")
        assert "'eat' is not a right on topic:a\n  Those of a topic are: read, write" in wrong.talk
