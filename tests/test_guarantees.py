"""What docs/guarantees.md and docs/original-faults.md promise is held by tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DOCUMENTS = ("guarantees.md", "original-faults.md")
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


@cache
def names_in(file: str) -> frozenset[str]:
    path = TESTS / file
    if not path.is_file():
        return frozenset()
    defined = ast.parse(path.read_text()).body
    functions = [node.name for node in defined if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return frozenset(name for name in functions if name.startswith("test_"))


def rows(document: str) -> list[str]:
    """The rows of its tables, without their heads."""
    lines = (TESTS.parent / "docs" / document).read_text().splitlines()
    heads = [number - 1 for number, line in enumerate(lines) if line.startswith("|---")]
    return [line for number, line in enumerate(lines) if line.startswith("| ") and number not in heads]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_line_names_tests_that_exist(document: str) -> None:
    found = rows(document)
    assert len(found) > 20
    assert [line for line in found if not NAMED.search(line)] == []
    missing = [name for line in found for name in NAMED.findall(line) if name[1] not in names_in(name[0])]
    assert missing == []
