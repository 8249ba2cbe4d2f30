"""The image: an ordinary user, and everything in it, ZooKeeper's jars too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.containers.conftest import CONTAINERS
from tests.parts import wait_until

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

pytestmark = CONTAINERS


@contextmanager
def started(engine: DockerClient, image: str, *command: str, **settings: Any) -> Iterator[Container]:
    container = engine.containers.run(image, list(command), detach=True, **settings)
    try:
        yield container
    finally:
        container.remove(v=True, force=True)


def test_the_image_lists_its_software(engine: DockerClient, image: str) -> None:
    shown = engine.containers.run(image, ["/opt/metamq/sbom.cdx.json"], entrypoint="cat", remove=True)
    components = {one["purl"].partition("@")[0]: one for one in json.loads(shown)["components"]}
    assert {"pkg:pypi/metamq", "pkg:pypi/cryptography", "pkg:maven/org.apache.zookeeper/zookeeper"} <= {*components}
    assert components["pkg:maven/io.netty/netty-handler"]["hashes"]


def test_zookeeper_starts_without_any_network_as_an_ordinary_user(engine: DockerClient, image: str) -> None:
    with started(engine, image, "zookeeper", "--data", "zookeeper", network_mode="none") as zookeeper:
        wait_until(lambda: b"ZooKeeper serves" in zookeeper.logs(), what="a serving ZooKeeper")
        assert zookeeper.exec_run(["id", "-un"]).output == b"metamq\n"
        zookeeper.stop(timeout=60)
        assert zookeeper.wait()["StatusCode"] == 0
