"""docs/house.md is the picture of the code as it is, and the house stays low: few storeys, few files in a folder."""

from __future__ import annotations

import ast
import importlib.util
import tomllib
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.lint

ROOT = Path(__file__).resolve().parent.parent
DEPTH_MAX = 14
FOLDER_FILES_MAX = 15


def drawer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_house", ROOT / ".ci" / "draw_house.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_is_up_to_date() -> None:
    assert (ROOT / "docs" / "house.md").read_text() == drawer().draw(), "run .venv/bin/python .ci/draw_house.py"


def test_arrows_that_follow_from_others_are_left_out() -> None:
    reduced = drawer().reduced
    assert reduced({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {"a": {"b"}, "b": {"c"}, "c": set()}
    assert reduced({"a": {"b"}, "b": {"a"}}) == {"a": {"b"}, "b": {"a"}}


def modules() -> dict[str, Path]:
    """The files of the product by module name."""
    folders = {"metamq": ROOT / "metamq", **drawer().packages()}
    found = {f"{name}.{path.stem}": path for name, folder in folders.items() for path in folder.glob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in found.items()}


def run_time_imports(tree: ast.AST) -> Iterator[str]:
    """The names that a file imports when it runs, at any place in it: not for types only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from run_time_imports(node)


def longest_chain() -> list[str]:
    """The longest chain of modules that import each other, the lowest first. Raises CycleError."""
    files = modules()
    graph = {}
    for name, path in files.items():
        imported = set(run_time_imports(ast.parse(path.read_text())))
        graph[name] = {one if one in files else one.rpartition(".")[0] for one in imported} & files.keys() - {name}
    chains: dict[str, list[str]] = {}
    for name in TopologicalSorter(graph).static_order():
        chains[name] = [*max((chains[one] for one in graph[name]), key=len, default=[]), name]
    return max(chains.values(), key=len)


def test_imports_form_short_chains_and_no_circles() -> None:
    chain = longest_chain()
    assert len(chain) > 5, "the modules were not found"
    assert len(chain) <= DEPTH_MAX, " <- ".join(chain)


def test_folders_have_few_files() -> None:
    folders = Counter(path.parent for path in modules().values())
    assert folders[ROOT / "broker" / "front_door"] > 5
    assert {str(folder): files for folder, files in folders.items() if files > FOLDER_FILES_MAX} == {}


def inner_modules() -> dict[str, set[str]]:
    """The modules of each inner folder that only their own folder imports, also for types."""
    files, packages = modules(), drawer().packages()
    rooms: dict[str, set[str]] = {name: set() for name in packages if name.count(".") > 1}
    imported_by: dict[str, set[str]] = {name: set() for name in files}
    for name, path in files.items():
        for one in drawer().imports(path):
            target = one if one in files else one.rpartition(".")[0]
            if target in imported_by and target != name:
                imported_by[target].add(drawer().owner(name, packages) or "metamq")
    for name, importers in imported_by.items():
        room = name.rpartition(".")[0]
        if room in rooms and name not in packages and importers <= {room}:
            rooms[room].add(name)
    return {room: found for room, found in rooms.items() if found}


def test_a_contract_protects_the_inner_modules_of_each_folder() -> None:
    with open(ROOT / "pyproject.toml", "rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    protected = {
        contract["allowed_importers"][0]: set(contract["protected_modules"])
        for contract in contracts
        if contract["type"] == "protected"
    }
    assert len(protected) > 10
    assert protected == inner_modules()
