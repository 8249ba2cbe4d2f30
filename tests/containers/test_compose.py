"""docker-compose.yml keeps its promises: programs reach it; a stop loses nothing, a crash nothing acknowledged."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from base64 import b64encode
from typing import Any, cast

import pytest

from metamq import Producer, SecurityConfig
from metamq.errors import AuthenticationFailed, DeliveryTimeout
from tests.containers.conftest import CONTAINERS, Composition
from tests.containers.under_load import UnderLoad
from tests.parts import wait_until
from tests.test_docs import snippets

pytestmark = CONTAINERS


def ten_lines() -> str:
    (snippet,) = snippets("README.md")
    return snippet


def assert_greeted(output: str) -> None:
    """The first message of the topic is the one that this run sent, or an earlier run did."""
    sent, *received = output.splitlines()
    assert f"{sent} b'hello'" in received


def test_the_readmes_ten_lines_run_outside_the_containers(composition: Composition) -> None:
    environment = {**os.environ, **composition.environment()}
    done = subprocess.run(
        [sys.executable, "-c", ten_lines()], env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    assert_greeted(done.stdout)


def test_the_readmes_ten_lines_run_in_another_container(composition: Composition) -> None:
    output = composition.engine.containers.run(
        composition.image,
        entrypoint=["python", "-c", ten_lines().replace('"readers"', '"inside"')],
        environment={
            "METAMQ_ZOOKEEPER": "zookeeper:2181",
            "METAMQ_SECURITY_DIR": "/var/lib/metamq",
            "METAMQ_SECURITY_ROLE": "admin",
        },
        volumes={f"{composition.project}_authority": {"bind": "/var/lib/metamq", "mode": "ro"}},
        network=f"{composition.project}_default",
        remove=True,
    )
    assert_greeted(output.decode())


def test_without_a_certificate_nothing_is_allowed(composition: Composition) -> None:
    known = SecurityConfig(ca=f"{composition.security.dir}/ca.crt")
    with (
        pytest.raises((AuthenticationFailed, DeliveryTimeout), match="it requires a user"),
        Producer(composition.zookeeper, security=known, delivery_timeout_s=5) as producer,
    ):
        producer.send("greetings", b"x").result(60)


def test_a_container_has_only_the_certificates_that_it_needs(composition: Composition) -> None:
    for service, name in (("broker-0", "brokers"), ("broker-1-slave", "brokers"), ("zookeeper", "zookeeper")):
        container = cast("Any", composition.container(service))
        found = set(container.exec_run(["ls", "/etc/metamq/security"]).output.decode().split())
        assert found == {"ca.crt", "revoked.crl", f"{name}.crt", f"{name}.key"}
    assert "brokers" in composition.compose("run", "--rm", "-T", "admin", "security", "list").decode()
    assert composition.compose("run", "--rm", "-T", "admin", "topic", "list").decode().startswith("TOPIC")


def test_the_console_shows_the_cluster_to_a_user_with_a_password(composition: Composition) -> None:
    with composition.admin() as admin:
        admin.set_user("anna", "a password")
        admin.add_rules("allow", "anna", "describe", "cluster")
    status = f"http://{composition.address}:8120/"
    with urllib.request.urlopen(status, timeout=60) as page:
        (console,) = re.findall(r'href="(http://[^"]+)"', page.read().decode())
    wait_until(lambda: composition.check_health("console"), what="the console")
    login = {"Authorization": f"Basic {b64encode(b'anna:a password').decode()}"}

    def shown(**headers: str) -> tuple[int, str]:
        request = urllib.request.Request(f"{console}brokers", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as page:
                return page.status, page.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, ""

    assert shown() == (401, "")
    # until the broker knows the user and its rule
    wait_until(lambda: "master" in shown(**login)[1], what="the brokers' roles on the page")


def test_the_health_check_follows_the_broker(composition: Composition) -> None:
    service = "broker-1-slave"
    wait_until(lambda: composition.state(service)["Health"]["Status"] == "healthy", what="the engine's own check")
    broker = composition.container(service)
    # As any user of a container: all its processes but the first, which only starts and reaps the broker.
    assert broker.exec_run(["sh", "-c", "kill -STOP -1"]).exit_code == 0
    assert not composition.check_health(service)
    assert broker.exec_run(["sh", "-c", "kill -CONT -1"]).exit_code == 0
    wait_until(lambda: composition.check_health(service), what="a ready broker")


def test_a_container_has_no_rights_and_writes_to_its_volume_only(composition: Composition) -> None:
    for service in ("zookeeper", "broker-0", "broker-0-slave", "console"):
        settings = composition.container(service).attrs["HostConfig"]
        assert (settings["ReadonlyRootfs"], settings["CapDrop"]) == (True, ["ALL"])
        assert settings["SecurityOpt"] == ["no-new-privileges:true"]
    assert composition.container("broker-0").exec_run(["touch", "/opt/metamq/x"]).exit_code != 0


def test_sigterm_under_load_drains_in_time_and_loses_nothing(composition: Composition) -> None:
    with UnderLoad(composition, "stopped") as load:
        composition.compose("stop", load.master)
        state = composition.state(load.master)
        # 137 would be the engine's SIGKILL after the time given in docker-compose.yml.
        assert (state["Status"], state["ExitCode"]) == ("exited", 0)
        composition.compose("start", load.master)
        load.wait_for_more()


def test_after_kill_9_under_load_it_comes_back_with_what_was_acknowledged(composition: Composition) -> None:
    with UnderLoad(composition, "crashed") as load:
        started = composition.state(load.master)["StartedAt"]
        # From inside, as a crash: the engine does not restart what was killed through it.
        composition.container(load.master).exec_run(["sh", "-c", "kill -KILL -1"])
        wait_until(lambda: composition.state(load.master)["StartedAt"] != started, what="the engine's restart")
        load.wait_for_more()
