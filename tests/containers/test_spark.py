"""The Spark services of docker-compose.yml: the example runs on the cluster of a master and a worker."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, cast

from tests.containers.conftest import CONTAINERS, ROOT, Composition
from tests.parts import wait_until

pytestmark = CONTAINERS

EXAMPLE = ROOT / "examples" / "count_spark.py"
ALIVE = """
import json, urllib.request
print(json.load(urllib.request.urlopen("http://spark:8080/json/"))["aliveworkers"])
"""


def expected() -> Counter[str]:
    """The example's words, from its own source."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import count_spark as one; print(*one.WORDS)"
    command = [sys.executable, "-c", code, str(Path(EXAMPLE).parent)]
    return Counter(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_the_example_runs_on_the_master_and_the_worker(composition: Composition, spark_image: str) -> None:
    composition.compose("--profile", "spark", "up", "-d", "--no-build", "spark", "spark-worker")
    container = cast("Any", composition.container("spark"))
    for service in ("spark", "spark-worker"):
        assert composition.container(service).attrs["Config"]["Image"] == spark_image
    wait_until(lambda: container.exec_run(["python", "-c", ALIVE]).output.strip() == b"1", 240, "the worker")
    done = container.exec_run(["python", "-W", "ignore", "-c", EXAMPLE.read_text()], demux=True)
    assert done.exit_code == 0, done.output[1].decode()[-3000:]
    counts, copies, master = done.output[0].decode().splitlines()
    words = expected()
    assert json.loads(counts) == words
    assert copies == f"{words.total()} messages in the other topic"
    assert master == "on spark://spark:7077"
