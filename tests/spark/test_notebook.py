"""The notebook in examples/ runs from its first cell to its last, and shows what the flights give."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from metamq.cli.demo.flights import FILE, PACKAGE, WHOLE_NUMBERS
from metamq.testing import Cluster

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

NOTEBOOK = Path(__file__).parent.parent.parent / "examples" / "flights_spark.ipynb"
PROGRAM = """
import sys
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], 4)
NotebookClient(notebook, timeout=400, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""
DAYS, A_DAY = 30, 20


@pytest.fixture
def flights(tmp_path: Path) -> Path:
    """A stand-in for the package with the flights: for PYTHONPATH."""
    file = tmp_path / "packages" / PACKAGE / FILE
    file.parent.mkdir(parents=True)
    text = io.StringIO()
    rows = csv.DictWriter(text, [*WHOLE_NUMBERS, "carrier"])
    rows.writeheader()
    for number in range(DAYS * A_DAY):
        when = {"year": 2013, "month": 1, "day": 1 + number // A_DAY, "hour": number % A_DAY}
        rows.writerow({**dict.fromkeys(WHOLE_NUMBERS, 1), **when, "dep_delay": when["hour"], "carrier": "C"})
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("flights.csv", text.getvalue())
    metadata = tmp_path / "packages" / f"{PACKAGE}-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1\n")
    (metadata / "RECORD").write_text(f"{PACKAGE}/{FILE},,\n")
    return tmp_path / "packages"


def test_the_notebook_runs_to_its_end(running: Cluster, flights: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "METAMQ_ZOOKEEPER": running.zookeeper,
        "PYTHONPATH": str(flights),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "MASTER": "local[2,4]",
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }
    done = tmp_path / "done.ipynb"
    command = [sys.executable, "-c", PROGRAM, str(NOTEBOOK), str(done)]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    outputs = [output for cell in json.loads(done.read_text())["cells"] for output in cell.get("outputs", [])]
    shown = "".join("".join(output.get("text", "")) for output in outputs if output.get("name") == "stdout")
    assert f"|      C|{DAYS * A_DAY:>7}|       9.5|" in shown
    assert f"{DAYS * A_DAY} hours, {DAYS * A_DAY} flights" in shown
    assert any("image/png" in output.get("data", {}) for output in outputs)


def test_the_notebook_is_committed_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
