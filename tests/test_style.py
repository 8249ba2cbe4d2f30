"""The habits of this code that no linter checks."""

from __future__ import annotations

import ast
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.lint

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES_MAX, FUNCTION_LINES_MAX = 597, 56
TEST_FILE_LINES_MAX, TEST_FUNCTION_LINES_MAX = 600, 70
FOLDER_FILES_MAX = 15

GENERATED = {"build", "dist", "__pycache__", "metamq-data", "results"}
TEXT_SUFFIXES = {"", ".in", ".md", ".py", ".sh", ".toml", ".yaml", ".yml"}

# In pieces, or these lines would be found themselves.
REMINDER = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")
HOMES = ("root", "home", "Users", "work", "workspace")
MACHINE_PATH = re.compile(rf"(?<![\w.~$}}<-])/({'|'.join(HOMES)})/[\w.-]|{re.escape(str(ROOT))}/")


def is_written_by_hand(name: str) -> bool:
    return (name == ".ci" or not name.startswith(".")) and name not in GENERATED and not name.endswith(".egg-info")


def text_files() -> Iterator[Path]:
    for folder, folders, names in os.walk(ROOT):
        folders[:] = sorted(filter(is_written_by_hand, folders))
        for path in sorted(Path(folder, name) for name in names if is_written_by_hand(name)):
            if path.suffix in TEXT_SUFFIXES and path.is_file():
                yield path


@cache  # not at the import: each worker of pytest-xdist imports each module
def files() -> dict[str, str]:
    return {str(path.relative_to(ROOT)): path.read_text() for path in text_files()}


@dataclass
class Module:
    """What the tests here ask about a file. Its tree is dropped: hundreds of them slow the garbage collector."""

    has_docstring: bool
    classes: list[str] = field(default_factory=list)
    functions: dict[str, int] = field(default_factory=dict)
    """The lines of code of each."""


@cache
def modules() -> dict[str, Module]:
    return {name: parsed(name, text) for name, text in files().items() if name.endswith(".py")}


def parsed(name: str, text: str) -> Module:
    tree = ast.parse(text, name)
    module = Module(ast.get_docstring(tree) is not None)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            module.classes.append(node.name)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            module.functions[f"{name}:{node.lineno} {node.name}"] = code_lines(node)
    return module


PACKAGES = {path.parent.name for path in ROOT.glob("*/__init__.py")}


def lines_with(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{name}:{number}: {line.strip()}"
        for name, text in files().items()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines from `def` to the end, without the docstring."""
    total = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function, clean=False) is None:
        return total
    docstring = function.body[0]
    return total - ((docstring.end_lineno or docstring.lineno) - docstring.lineno + 1)


def test_the_tree_was_found() -> None:
    assert {"dev", "pyproject.toml", "metamq/errors.py", "tests/test_style.py"} <= files().keys()


def test_folders_of_the_product_have_few_files() -> None:
    folders = Counter(str(Path(name).parent) for name in modules() if not name.endswith("/__init__.py"))
    packages = {folder: files for folder, files in folders.items() if folder.split("/")[0] in PACKAGES}
    assert packages["client/net"] > 5
    assert {folder: files for folder, files in packages.items() if files > FOLDER_FILES_MAX} == {}


def test_a_class_name_means_one_thing() -> None:
    """The blocking and the asyncio API have the same names, in files of which one begins with `aio_`."""
    names = Counter(
        class_name
        for name, module in modules().items()
        if name.split("/")[0] in PACKAGES and not Path(name).name.startswith("aio_")
        for class_name in module.classes
    )
    assert names["Partition"] == 1
    assert {name: count for name, count in names.items() if count > 1} == {}


def limit(name: str, of_the_product: int, of_tests: int) -> int:
    return (
        of_the_product if name.split("/")[0] not in ("tests", "bench", "examples", ".ci", "integrations") else of_tests
    )


def test_files_are_short() -> None:
    lengths = {name: files()[name].count("\n") for name in modules()}
    assert {
        name: lines for name, lines in lengths.items() if lines > limit(name, FILE_LINES_MAX, TEST_FILE_LINES_MAX)
    } == {}


def test_functions_are_short() -> None:
    lengths = {name: lines for module in modules().values() for name, lines in module.functions.items()}
    assert len(lengths) > 5_000
    assert {
        name: lines
        for name, lines in lengths.items()
        if lines > limit(name, FUNCTION_LINES_MAX, TEST_FUNCTION_LINES_MAX)
    } == {}


def test_every_module_says_what_it_owns() -> None:
    silent = [name for name, module in modules().items() if name.split("/")[0] in PACKAGES and not module.has_docstring]
    assert silent == []


def test_nothing_is_left_for_later() -> None:
    assert lines_with(REMINDER) == []


def test_no_paths_of_one_machine() -> None:
    assert lines_with(MACHINE_PATH) == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("see /home" + "/ann/metamq", True),
        ("open('/root" + "/x')", True),
        (f"{ROOT}/zk/paths.py", True),
        ("https://example.org/home/ann", False),
        ("/var/lib/metamq and ~/work/metamq", False),
        ("./root/x and $HOME/work/x", False),
    ],
)
def test_machine_paths_are_told_from_others(line: str, found: bool) -> None:
    assert bool(MACHINE_PATH.search(line)) == found


def test_nobody_waits_with_wait_for() -> None:
    """In Python 3.11 it loses a cancellation that comes together with the result; `asyncio.timeout` does not."""
    product = re.compile(r"asyncio\.wait_for\(")
    assert [line for line in lines_with(product) if not line.startswith("tests/")] == []
