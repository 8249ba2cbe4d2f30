"""Every Python snippet of the README and the guides runs as printed, against a real cluster."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from metamq.testing import Cluster, cluster

ROOT = Path(__file__).parent.parent
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
AT_ONCE = {"docs/producing.md": 1, "docs/administering.md": 1, "docs/consuming.md": 8}
"""How many snippets of a guide run side by side. Those that consume wait for the end of the topic, most of the time."""


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


def run(snippet: str, running: Cluster, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "METAMQ_ZOOKEEPER": running.zookeeper, "PYTHONWARNINGS": "error"}
    return subprocess.run(
        [sys.executable, "-c", snippet], env=environment, cwd=folder, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("document", AT_ONCE)
def test_snippets_run_as_printed(document: str, running: Cluster, tmp_path: Path) -> None:
    found = snippets(document)
    assert found, f"{document} has no snippet"
    if document == "docs/consuming.md":
        fill_orders(running)
    with ThreadPoolExecutor(AT_ONCE[document]) as pool:
        ended = pool.map(lambda snippet: run(snippet, running, tmp_path), found)
    for number, (snippet, done) in enumerate(zip(found, ended, strict=True), 1):
        assert done.returncode == 0, f"{document}, snippet {number}:\n{snippet}\n{done.stderr}"


def test_the_readme_prints_what_it_sent(running: Cluster, tmp_path: Path) -> None:
    """The ten lines: what the producer stored is what the consumer prints."""
    (snippet,) = snippets("README.md")
    done = run(snippet, running, tmp_path)
    assert done.returncode == 0, done.stderr
    sent, received = done.stdout.splitlines()
    assert received == f"{sent} b'hello'"
