"""The image and docker-compose.yml on a real Docker engine. Where none answers, these tests say so: they are skipped,
and a run of nothing else (`./dev test --containers`) fails."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import socket
import subprocess
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from metamq import Admin, SecurityConfig
from tests.parts import wait_until

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container
    from docker.models.networks import Network

BUILD_S = 600
"""Spark is half a gigabyte to download."""
ENGINE_S = 180
"""So long the engine may say nothing."""
CONTAINERS = [pytest.mark.containers, pytest.mark.timeout(2 * BUILD_S)]
"""The marks of all these tests: whichever comes first may have to wait for an image to be built from nothing."""
ROOT = Path(__file__).parent.parent.parent
TAG = "metamq-test"
ZOOKEEPER_PORT = 2181
REPLICAS = {"broker-0": (0, 0), "broker-0-slave": (0, 1), "broker-1": (1, 0), "broker-1-slave": (1, 1)}
"""Broker id and number of what docker-compose.yml starts."""
ZOOKEEPERS = ("zookeeper", "zookeeper-2", "zookeeper-3")
"""What the profile `ensemble` starts, on this port and the next two."""
PORTS = (*range(ZOOKEEPER_PORT, ZOOKEEPER_PORT + len(ZOOKEEPERS)), 8120, 8123, 8130, 8133, 8140, 8143, 8150, 8153, 8180)


def _cannot_run(request: pytest.FixtureRequest, reason: str) -> NoReturn:
    if request.config.option.markexpr == "containers":
        pytest.exit(reason, returncode=1)  # who asked for these is not to take silence for success
    pytest.skip(reason)


@pytest.fixture(scope="session")
def engine(request: pytest.FixtureRequest) -> Iterator[DockerClient]:
    """The engine that DOCKER_HOST names, or the one at the default socket."""
    import docker.errors

    reason = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # docker leaves the socket of a failed attempt unclosed
        try:
            client = docker.from_env(timeout=ENGINE_S)
        except docker.errors.DockerException as error:
            reason = str(error)
        gc.collect()
    if reason:
        _cannot_run(request, f"no Docker engine answers; start one, or point DOCKER_HOST at one ({reason})")
    try:
        yield client
    finally:
        client.close()


@pytest.fixture(scope="session")
def compose_command(request: pytest.FixtureRequest) -> list[str]:
    """Compose 2, a plug-in of docker, or Compose 1, a program of its own."""
    docker = shutil.which("docker")
    if docker and subprocess.run([docker, "compose", "version"], capture_output=True).returncode == 0:
        return [docker, "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    _cannot_run(request, "there is neither `docker compose` nor `docker-compose`")


@pytest.fixture(scope="session")
def image(engine: DockerClient, compose_command: list[str]) -> str:
    """The tag of an image built from this checkout."""
    return build(compose_command, "zookeeper", TAG)


@pytest.fixture(scope="session")
def spark_image(compose_command: list[str], image: str) -> str:
    """The image with Spark, which is the other one and Spark."""
    build(compose_command, "spark", image)
    return f"{image}-spark"


def build(compose_command: list[str], service: str, tag: str) -> str:
    """Builds the image of a service as docker-compose.yml has it."""
    done = subprocess.run(
        [*compose_command, "--profile", "spark", "-f", str(ROOT / "docker-compose.yml"), "build", service],
        env={**os.environ, "METAMQ_IMAGE": tag},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_S,
    )
    if done.returncode:
        pytest.fail(f"the image cannot be built:\n{done.stdout[-3000:]}")
    return tag


def free_address() -> str:
    """Where to publish the ports: as docker-compose.yml does, or on another loopback address where they are taken."""
    for address in ("127.0.0.1", "127.0.81.23", "127.0.81.24"):
        if all(_is_free(address, port) for port in PORTS):
            return address
    pytest.fail(
        "the ports of docker-compose.yml are taken on this machine. Remove what an interrupted run left: "
        "docker rm --force $(docker ps --all --quiet --filter name=metamq-test-)"
    )


def _is_free(address: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


class Composition:
    """What docker-compose.yml starts, under a project name of its own: with security, or an ensemble without it."""

    def __init__(
        self, engine: DockerClient, compose_command: list[str], image: str, *, with_ensemble: bool = False
    ) -> None:
        self.security = SecurityConfig()
        """That of clients, as the administrator."""
        self.engine = engine
        self.image = image
        self.project = f"metamq-test-{uuid.uuid4().hex[:8]}"
        self.address = free_address()
        ports = range(ZOOKEEPER_PORT, ZOOKEEPER_PORT + (len(ZOOKEEPERS) if with_ensemble else 1))
        self.zookeeper = ",".join(f"{self.address}:{port}" for port in ports)
        self._command = [*compose_command, "-p", self.project, "-f", str(ROOT / "docker-compose.yml")]
        self._settings = {"METAMQ_IMAGE": self.image}
        published = ("METAMQ_PUBLISH", "METAMQ_PUBLISH_METRICS", "METAMQ_PUBLISH_CONSOLE", "METAMQ_ADVERTISE")
        self._settings |= dict.fromkeys(published, self.address)
        if with_ensemble:
            self._command += ["--profile", "ensemble"]
            self._settings |= {"METAMQ_ENSEMBLE": ",".join(ZOOKEEPERS), "METAMQ_CERTIFICATES": ""}

    def compose(self, *arguments: str) -> bytes:
        """Runs a command of Compose; returns its output, or fails with what it said."""
        environment = {**os.environ, **self._settings}
        done = subprocess.run([*self._command, *arguments], env=environment, capture_output=True, timeout=300)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout

    def up(self, folder: Path | None = None) -> None:
        """Starts all; returns once every slave is in sync. `folder` takes the administrator's certificate."""
        self.compose("up", "-d", "--no-build")
        if folder is not None:
            self.take_certificate(folder)
        for service in REPLICAS:
            self.wait_ready(service)
        with self.admin() as admin:
            for broker_id in (0, 1):
                self.wait_in_sync(admin, broker_id)

    def take_certificate(self, folder: Path) -> None:
        """Takes the administrator's certificate as the head of docker-compose.yml says."""
        files = ("ca.crt", "revoked.crl", "admin.crt", "admin.key")
        packed = self.compose("run", "--rm", "-T", "--entrypoint", "tar", "admin", "-c", *files)
        subprocess.run(["tar", "-x", "-C", str(folder)], input=packed, check=True)
        self.security = SecurityConfig(dir=str(folder), role="admin")

    def environment(self) -> dict[str, str]:
        """The variables of a client on this machine."""
        return {
            "METAMQ_ZOOKEEPER": self.zookeeper,
            "METAMQ_SECURITY_DIR": self.security.dir,
            "METAMQ_SECURITY_ROLE": self.security.role,
        }

    def admin(self) -> Admin:
        """The administration of the cluster."""
        return Admin(self.zookeeper, security=self.security)

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

    def wait_ready(self, service: str) -> None:
        """Returns once the broker is registered and serves."""
        wait_until(
            lambda: self.state(service)["Status"] == "running" and self.check_health(service), 120, f"a ready {service}"
        )

    def wait_in_sync(self, admin: Admin, broker_id: int) -> None:
        """Returns once both replicas are there and in sync."""
        wait_until(lambda: self._all_in_sync(admin, broker_id), 120, f"all of broker {broker_id} in sync")

    def _all_in_sync(self, admin: Admin, broker_id: int) -> bool:
        found = admin.replicas().get(broker_id)
        replicas = found.replicas if found is not None else ()
        return len(replicas) == 2 and all(one.holds_all for one in replicas)

    def roles(self, admin: Admin, broker_id: int) -> dict[str, str]:
        """The services that are now the master and the slave of a broker."""
        names = {place: service for service, place in REPLICAS.items()}
        return {one.role: names[broker_id, one.replica] for one in admin.replicas()[broker_id].replicas}

    def network(self) -> Network:
        """The network of all containers."""
        (found,) = self.engine.networks.list(names=[f"{self.project}_default"])
        return found

    def down(self) -> None:
        """Removes all, with the data."""
        self.compose("--profile", "spark", "--profile", "admin", "down", "--volumes", "--timeout", "2")


def freeze(container: Container) -> None:
    """Stops all processes of a container until unpause().

    The kernel freezes no process that waits for its disk, and runc then gives up within a moment: asked again, it does.
    """

    from docker.errors import APIError

    def is_frozen() -> bool:
        with contextlib.suppress(APIError):
            container.pause()
            return True
        return False

    wait_until(is_frozen, what=f"a frozen {container.name}")


@pytest.fixture(scope="session")
def composition(
    engine: DockerClient, compose_command: list[str], image: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Composition]:
    """docker-compose.yml, running, for all tests; gone with its data after them. Roles change: ask for them."""
    composition = Composition(engine, compose_command, image)
    try:
        composition.up(tmp_path_factory.mktemp("certificate"))
        yield composition
    finally:
        composition.down()


@pytest.fixture(scope="session")
def with_ensemble(engine: DockerClient, compose_command: list[str], image: str) -> Iterator[Composition]:
    """The same with an ensemble of ZooKeeper servers, and without security."""
    composition = Composition(engine, compose_command, image, with_ensemble=True)
    try:
        composition.up()
        yield composition
    finally:
        composition.down()
