"""Every Python snippet of the README and the guides runs as printed, against a real cluster."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from metamq.testing import Cluster, cluster

ROOT = Path(__file__).parent.parent
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DOCUMENTS = ("README.md", "docs/producing.md", "docs/consuming.md", "docs/administering.md")


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with cluster() as one:
        yield one


def fill_orders(running: Cluster) -> None:
    """What docs/producing.md leaves behind, made here when it did not run before."""
    with running.admin() as admin:
        if "orders" not in admin.topics():
            admin.create_topic("orders", partitions=4)
    with running.producer() as producer:
        producer.send_many("orders", [b"%d" % number for number in range(1000)])


def snippets(document: str) -> list[str]:
    return SNIPPET.findall((ROOT / document).read_text())


@pytest.mark.parametrize("document", DOCUMENTS)
def test_snippets_run_as_printed(document: str, running: Cluster, tmp_path: Path) -> None:
    found = snippets(document)
    assert found, f"{document} has no snippet"
    if document == "docs/consuming.md":
        fill_orders(running)
    environment = {**os.environ, "METAMQ_ZOOKEEPER": running.zookeeper, "PYTHONWARNINGS": "error"}
    for number, snippet in enumerate(found, 1):
        done = subprocess.run(
            [sys.executable, "-c", snippet], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{document}, snippet {number}:\n{snippet}\n{done.stderr}"


def test_the_readme_prints_what_it_sent(running: Cluster, tmp_path: Path) -> None:
    """The ten lines: what the producer stored is what the consumer prints."""
    (snippet,) = snippets("README.md")
    snippet = snippet.replace('"greetings"', '"greetings-again"').replace('"readers"', '"readers-again"')
    environment = {**os.environ, "METAMQ_ZOOKEEPER": running.zookeeper}
    done = subprocess.run(
        [sys.executable, "-c", snippet], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    sent, received = done.stdout.splitlines()
    assert received == f"{sent} b'hello'"
