"""The last step of docs/tutorial.md: a picture by Spark, of what its first step has sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from metamq.testing import Cluster
from tests.test_docs import run, snippets

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def test_the_picture_of_the_tutorial(running: Cluster, tmp_path: Path) -> None:
    send, *_others, draw = snippets("docs/tutorial.md")
    for snippet in (send, draw):
        done = run(snippet, running, tmp_path, PYTHONWARNINGS="default", MPLBACKEND="agg")
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "readings.png").read_bytes().startswith(b"\x89PNG")
