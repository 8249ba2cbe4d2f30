"""The status port with TLS: health for each client, metrics for a certificate with the right `describe cluster`."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from metamq.broker.config import BrokerConfig
from metamq.broker.front_door.audit import Audit
from metamq.broker.process.pages import guard_of
from metamq.broker.process.users import KnownUsers
from metamq.errors import ConfigError
from metamq.security.certificates import Authority
from metamq.testing import Cluster
from tests.one_zookeeper import cluster
from tests.parts import SLOW_S, http_get, wait_until
from tests.security.certificate_folder import secured


@pytest.fixture(scope="module")
def audit_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit") / "audit.log"


@pytest.fixture(scope="module")
def guarded(authority: Authority, audit_log: Path) -> Iterator[Cluster]:
    security = secured(authority.folder, zookeeper_tls=False)
    with cluster(security=security, http_tls=True, audit=str(audit_log)) as running:
        yield running


def page(running: Cluster, folder: Path, path: str, name: str = "") -> tuple[int, str]:
    """(status, text) of a page, for a client with the certificate `name`, or without one."""
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    if name:
        context.load_cert_chain(folder / f"{name}.crt", folder / f"{name}.key")
    url = f"https://127.0.0.1:{running.broker.http_port}{path}"
    try:
        with urllib.request.urlopen(url, timeout=SLOW_S, context=context) as found:
            return found.status, found.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def refused_metrics(audit_log: Path) -> set[tuple[str, str]]:
    """(principal, address) of each refused request of /metrics. The log is written in whole lines."""
    lines = [json.loads(line) for line in audit_log.read_text().splitlines()]
    return {(line["principal"], line["peer"]) for line in lines if line["what"] == "/metrics" and not line["allowed"]}


def test_health_needs_no_certificate(guarded: Cluster, authority: Authority) -> None:
    for path in ("/healthz", "/readyz"):
        assert page(guarded, authority.folder, path)[0] == 200


def test_metrics_need_a_certificate_with_a_right(
    guarded: Cluster, authority: Authority, name: str, audit_log: Path
) -> None:
    folder = authority.folder
    assert page(guarded, folder, "/metrics") == (
        403,
        "/metrics needs a certificate with the right `describe cluster`\n",
    )
    assert page(guarded, folder, "/metrics", name)[0] == 403
    both = {("", "127.0.0.1"), (name, "127.0.0.1")}
    wait_until(lambda: refused_metrics(audit_log) == both, what="both refusals in the audit log")
    with guarded.admin() as admin:
        admin.add_rules("allow", name, "describe", "cluster")
    wait_until(lambda: page(guarded, folder, "/metrics", name)[0] == 200, what="the rule")
    assert "metamq_broker_" in page(guarded, folder, "/metrics", "admin")[1]


def test_a_client_without_tls_gets_nothing_and_disturbs_nobody(guarded: Cluster, authority: Authority) -> None:
    with pytest.raises((OSError, urllib.error.URLError)):
        http_get(guarded.broker.http_port, "/metrics")
    assert page(guarded, authority.folder, "/healthz")[0] == 200


def test_a_certificate_of_another_authority_is_refused(guarded: Cluster, authority: Authority, tmp_path: Path) -> None:
    other = Authority.make(tmp_path / "other")
    other.issue("admin")
    (other.folder / "ca.crt").write_bytes((authority.folder / "ca.crt").read_bytes())
    with pytest.raises(OSError, match=r"ssl|SSL|closed|reset"):
        page(guarded, other.folder, "/metrics", "admin")


def test_without_certificates_it_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match="http_tls is on, and security is off"):
        guard_of(BrokerConfig(http_tls=True), None, KnownUsers.__new__(KnownUsers), Audit(BrokerConfig()))
