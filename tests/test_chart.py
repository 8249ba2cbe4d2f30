"""The Helm chart: linted, rendered, valid for Kubernetes, and its settings are those that metamq has."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from metamq.zk.server.ensemble import Ensemble
from tests.cli.conftest import unset
from tests.test_docs import ROOT, SHELL

CHART = ROOT / "charts" / "metamq"
HELM = shutil.which("helm") or shutil.which("helm", path=str(Path.home() / "go" / "bin"))
VERSIONS = ("1.31", "1.37")
SECURE = ("--set", "security.brokers=b,security.zookeeper=z,security.console=c")
VARIANTS: dict[str, tuple[str, ...]] = {
    "default": (),
    "secure": (*SECURE, "--set", "storageClassName=fast,console.host=console.example.org"),
    "small": ("--set", "zookeeper.replicas=1,brokers.count=1,brokers.replicas=1,console.enabled=false,spread=false"),
    "settings": ("--set", "brokers.settings.answer_memory_bytes=1073741824,brokers.settings.group_lag_s=2.5"),
}
STUB = """#!{python}
import json, os, sys
print(json.dumps([sys.argv[1:], dict(os.environ)]))
"""


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    if HELM is None:
        pytest.skip("needs Helm: go install helm.sh/helm/v3/cmd/helm@latest")
    return subprocess.run([HELM, *arguments], capture_output=True, text=True, timeout=60)


def rendered(*options: str) -> list[dict[str, Any]]:
    done = helm("template", "shop", str(CHART), "--namespace", "mq", *options)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def find(documents: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = [one for one in documents if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def started(workload: dict[str, Any], pod: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """The arguments and the variables that the container's `metamq` gets in this pod."""
    container = workload["spec"]["template"]["spec"]["containers"][0]
    stub = folder / "metamq"
    stub.write_text(STUB.format(python=sys.executable))
    stub.chmod(0o755)
    command = container.get("command", ["metamq"]) + container["args"]
    variables = {one["name"]: one["value"] for one in container["env"]}
    path = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "HOSTNAME": pod}
    environment = {**variables, **path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    arguments, environment = json.loads(done.stdout)
    return arguments, {name: value for name, value in environment.items() if name.startswith("METAMQ_")}


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_is_linted_and_valid(variant: str) -> None:
    done = helm("lint", "--strict", str(CHART), *VARIANTS[variant])
    assert done.returncode == 0, done.stdout
    documents = rendered(*VARIANTS[variant])
    assert len(documents) >= 6
    for document in documents:
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)
        if "template" in document.get("spec", {}):
            pod = document["spec"]["template"]["spec"]
            assert pod["securityContext"]["runAsNonRoot"]
            (container,) = pod["containers"]
            assert container["securityContext"]["readOnlyRootFilesystem"]
            volumes = {one["name"] for one in pod["volumes"]}
            claims = {one["metadata"]["name"] for one in document["spec"].get("volumeClaimTemplates", ())}
            assert {one["name"] for one in container["volumeMounts"]} == volumes | claims


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_broker_takes_its_settings(variant: str, tmp_path: Path) -> None:
    documents = rendered(*VARIANTS[variant])
    arguments, variables = started(find(documents, "StatefulSet", "shop-broker-0"), "shop-broker-0-1", tmp_path)
    assert arguments == ["broker"]
    code = (
        "from metamq.broker.config import BrokerConfig; from metamq.client.settings import load, zookeeper_servers\n"
        "c = load(BrokerConfig, 'broker', arguments={}); print(c.id, c.replica, c.advertise, c.failover, "
        "c.group_lag_s, c.answer_memory_bytes, c.console_url or '-', zookeeper_servers(None, None))"
    )
    environment = {**unset(os.environ), **variables}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    lag_s, memory = ("2.5", "1073741824") if variant == "settings" else ("30.0", "268435456")
    url = {"small": "-", "secure": "http://console.example.org/"}.get(variant, "http://shop-console:8180/")
    servers = ",".join(f"shop-zookeeper-{one}.shop-zookeeper" for one in range(1 if variant == "small" else 3))
    host = "shop-broker-0-1.shop-broker-0.mq.svc"
    assert done.stdout.split() == ["0", "1", host, "auto", lag_s, memory, url, servers]
    service = find(documents, "Service", "shop-broker-0")
    assert service["spec"]["clusterIP"] == "None"


def test_the_servers_of_zookeeper_are_an_ensemble(tmp_path: Path) -> None:
    arguments, variables = started(
        find(rendered(*SECURE), "StatefulSet", "shop-zookeeper"), "shop-zookeeper-2", tmp_path
    )
    assert arguments == ["zookeeper", "--data", "/var/lib/metamq/zookeeper", "--host", "0.0.0.0", "--port", "2181"]
    assert variables["METAMQ_SECURITY_DIR"] == "/etc/metamq/security"
    ensemble = Ensemble.parse(int(variables["METAMQ_ZOOKEEPER_ID"]), variables["METAMQ_ZOOKEEPER_ENSEMBLE"])
    assert ensemble.number == 3
    assert len(ensemble.servers) == 3
    alone = rendered("--set", "zookeeper.replicas=1")
    _arguments, variables = started(find(alone, "StatefulSet", "shop-zookeeper"), "shop-zookeeper-0", tmp_path)
    assert "METAMQ_ZOOKEEPER_ID" not in variables


def test_the_console_has_its_names(tmp_path: Path) -> None:
    console = find(rendered(*VARIANTS["secure"]), "Deployment", "shop-console")
    arguments, variables = started(console, "shop-console-x", tmp_path)
    assert arguments == [
        "console", "--host", "0.0.0.0", "--plain-http", "--name", "shop-console", "--name", "console.example.org",
    ]  # fmt: skip
    assert variables["METAMQ_SECURITY_CA"] == "/etc/metamq/security/ca.crt"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("security.brokers=b", "security: give the Secrets of brokers, zookeeper"),
        ("zookeeper.replicas=2", "zookeeper"),
        ("broker.count=2", "broker"),
    ],
)
def test_wrong_values_are_refused(options: str, words: str) -> None:
    done = helm("template", "shop", str(CHART), "--set", options)
    assert done.returncode != 0
    assert words in done.stderr


def test_the_commands_of_the_page_run(tmp_path: Path) -> None:
    """As printed, with kubectl and Helm in their dry runs; without Docker's, which need an engine and a registry."""
    kubectl = shutil.which("kubectl")
    if HELM is None or kubectl is None:
        pytest.skip("needs Helm and kubectl, whose commands the page prints: install both")
    programs = {
        "docker": "",
        "kubectl": f'[ "$1" = create ] && exec {kubectl} "$@" --dry-run=client -o json >> secrets\necho "$@" >> asked',
        "helm": f'shift\nexec {HELM} template "$@" > rendered',
    }
    for name, script in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "charts").symlink_to(CHART.parent)
    blocks = SHELL.findall((ROOT / "docs" / "kubernetes.md").read_text())
    folders = os.pathsep.join((str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**unset(os.environ), "PATH": folders}
    for block in blocks:
        command = ["bash", "-e", "-o", "pipefail", "-c", block.replace("--reuse-values", "--set image=x")]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=60)
    documents = [one for one in yaml.safe_load_all((tmp_path / "rendered").read_text()) if one]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == ["exec mq-broker-0-0 -- metamq doctor", "port-forward service/mq-console 8180"]
    assert find(documents, "StatefulSet", "mq-broker-0")["spec"]["replicas"] > 0
    assert [port["port"] for port in find(documents, "Service", "mq-console")["spec"]["ports"]] == [8180]
    secrets = {one["metadata"]["name"]: set(one["data"]) for one in _documents((tmp_path / "secrets").read_text())}
    common = {"ca.crt", "revoked.crl"}
    assert secrets == {
        "mq-brokers": common | {"brokers.crt", "brokers.key"},
        "mq-zookeeper": common | {"zookeeper.crt", "zookeeper.key"},
        "mq-console": common,
    }


def _documents(text: str) -> list[dict[str, Any]]:
    """JSON documents, one after the other."""
    found, decoder, rest = [], json.JSONDecoder(), text.strip()
    while rest:
        one, end = decoder.raw_decode(rest)
        found.append(one)
        rest = rest[end:].strip()
    return found
