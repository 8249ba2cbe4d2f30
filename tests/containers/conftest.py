"""The image and docker-compose.yml on a real Docker engine; where none answers, these tests say so and are skipped."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.parts import wait_until

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

ROOT = Path(__file__).parent.parent.parent
TAG = "metamq-test"
ZOOKEEPER_PORT, BROKER_PORT, STATUS_PORT = 2181, 8123, 8120


@pytest.fixture(scope="session")
def engine() -> Iterator[DockerClient]:
    """The engine that DOCKER_HOST names, or the one at the default socket."""
    import docker

    try:
        client = docker.from_env(timeout=120)
    except docker.errors.DockerException as error:
        pytest.skip(f"no Docker engine answers; start one, or point DOCKER_HOST at one ({error})")
    try:
        yield client
    finally:
        client.close()


@pytest.fixture(scope="session")
def image(engine: DockerClient) -> str:
    """The tag of an image built from this checkout. On the host's network, as docker-compose.yml has it."""
    import docker

    try:
        engine.images.build(path=str(ROOT), tag=TAG, network_mode="host", rm=True)
    except docker.errors.BuildError as error:
        end = "".join(line.get("stream", "") for line in error.build_log)[-3000:]
        pytest.fail(f"the image cannot be built: {error}\n{end}")
    return TAG


def compose_command() -> list[str]:
    """Compose 2, a plug-in of docker, or Compose 1, a program of its own."""
    docker = shutil.which("docker")
    if docker and subprocess.run([docker, "compose", "version"], capture_output=True).returncode == 0:
        return [docker, "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    pytest.skip("there is neither `docker compose` nor `docker-compose`")


def free_address() -> str:
    """Where to publish the ports: as docker-compose.yml does, or on another loopback address where they are taken."""
    for address in ("127.0.0.1", "127.0.81.23"):
        if all(_is_free(address, port) for port in (ZOOKEEPER_PORT, BROKER_PORT, STATUS_PORT)):
            return address
    pytest.fail("the ports of docker-compose.yml are taken on this machine")


def _is_free(address: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


class Composition:
    """What docker-compose.yml starts, under a project name of its own."""

    def __init__(self, engine: DockerClient, image: str) -> None:
        self.engine = engine
        self.image = image
        self.project = f"metamq-test-{uuid.uuid4().hex[:8]}"
        self.address = free_address()
        self.zookeeper = f"{self.address}:{ZOOKEEPER_PORT}"
        self._command = [*compose_command(), "-p", self.project, "-f", str(ROOT / "docker-compose.yml")]

    def compose(self, *arguments: str, advertise: str = "") -> None:
        """Runs a command of Compose; fails with what it said."""
        settings = {
            "METAMQ_IMAGE": self.image,
            "METAMQ_PUBLISH": self.address,
            "METAMQ_ADVERTISE": advertise or self.address,
        }
        done = subprocess.run(
            [*self._command, *arguments], env={**os.environ, **settings}, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr

    def up(self, advertise: str = "") -> None:
        """Starts all, or what changed; returns once the broker is ready."""
        self.compose("up", "-d", "--no-build", advertise=advertise)
        self.wait_ready()

    def container(self, service: str) -> Container:
        """The service's container as it is now."""
        labels = [f"com.docker.compose.project={self.project}", f"com.docker.compose.service={service}"]
        (found,) = self.engine.containers.list(all=True, filters={"label": labels})
        return found

    def state(self, service: str) -> dict[str, Any]:
        """The engine's word on the service's container: Status, ExitCode, StartedAt, Health."""
        state: dict[str, Any] = self.container(service).attrs["State"]
        return state

    def check_health(self, service: str) -> bool:
        """What the service's health check says when it is run now."""
        container = self.container(service)
        command = container.attrs["Config"]["Healthcheck"]["Test"]
        assert command[0] == "CMD"
        return bool(container.exec_run(command[1:]).exit_code == 0)

    def wait_ready(self) -> None:
        """Returns once the broker is registered and takes writes."""
        wait_until(
            lambda: self.state("broker")["Status"] == "running" and self.check_health("broker"), 60, "a ready broker"
        )


@pytest.fixture
def composition(engine: DockerClient, image: str) -> Iterator[Composition]:
    """docker-compose.yml, running; gone with its data after the test."""
    composition = Composition(engine, image)
    try:
        composition.up()
        yield composition
    finally:
        composition.compose("down", "--volumes", "--timeout", "2")
