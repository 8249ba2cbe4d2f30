"""Draws docs/house.md from the code: the folders, the first sentence of each, and an arrow for each import.

    .venv/bin/python .ci/draw_house.py

An arrow that follows from two others is left out.
"""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "house.md"
INTRODUCTION = """# Folders

`.ci/draw_house.py` draws this page from the code: run it after a change of folders or imports. An arrow goes from a
folder to one whose modules it imports. An arrow that follows from two others is left out. `metamq/` has the public
names and the errors; every folder may import the errors. [ARCHITECTURE.md](../ARCHITECTURE.md) has the rest.
"""
Arrows = Mapping[str, set[str]]


def packages() -> dict[str, Path]:
    """The folders by package name, without the root package."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        setuptools = tomllib.load(file)["tool"]["setuptools"]
    places = setuptools["package-dir"]
    found = {}
    for name in setuptools["packages"]:
        if name != "metamq":
            first = ".".join(name.split(".")[:2])
            found[name] = ROOT.joinpath(places[first], *name.split(".")[2:])
    return found


def owner(module: str, names: Mapping[str, Path]) -> str | None:
    """The innermost package of a module."""
    while module and module not in names:
        module = module.rpartition(".")[0]
    return module or None


def imports(path: Path) -> Iterator[str]:
    """Yields the modules that a file imports, at any place in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def arrows_of(names: Mapping[str, Path]) -> dict[str, set[str]]:
    """The packages that each package imports."""
    arrows: dict[str, set[str]] = {name: set() for name in names}
    for name, folder in names.items():
        for path in set(folder.glob("*.py")) - {folder / "__main__.py"}:
            arrows[name] |= {target for module in imports(path) if (target := owner(module, names)) not in (None, name)}
    return arrows


def reach(arrows: Arrows, start: str) -> set[str]:
    """The packages that `start` imports, directly or not."""
    seen, todo = set[str](), [start]
    while todo:
        for target in arrows[todo.pop()] - seen:
            seen.add(target)
            todo.append(target)
    return seen


def reduced(arrows: Arrows) -> dict[str, set[str]]:
    """The arrows without those that follow from two others. A pair that imports each other keeps both."""
    kept = {}
    for name, targets in arrows.items():
        indirect = {far for near in targets for far in reach(arrows, near)}
        kept[name] = {target for target in targets if target not in indirect or name in reach(arrows, target)}
    return kept


def label(name: str) -> str:
    return name.removeprefix("metamq.").replace(".", "/")


def draw() -> str:
    """Returns the page."""
    names = packages()
    by_package = defaultdict(list)
    for name in names:
        by_package[label(name).split("/")[0]].append(name)
    lines = [INTRODUCTION, "```mermaid", "flowchart TD"]
    for package, members in by_package.items():
        lines.append(f"  subgraph {package}_[{package}]")
        lines += [f'    {label(name).replace("/", "_")}["{label(name)}"]' for name in members]
        lines.append("  end")
    for name, targets in sorted(reduced(arrows_of(names)).items()):
        lines += [f"  {label(name).replace('/', '_')} --> {label(t).replace('/', '_')}" for t in sorted(targets)]
    lines += ["```", "", "| folder | owns | files |", "|---|---|---|"]
    for name, folder in names.items():
        docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        owns = docstring.partition("\n\n")[0].replace("\n", " ").partition(". ")[0].rstrip(".")
        files = sum(path.name != "__init__.py" for path in folder.glob("*.py"))
        lines.append(f"| `{label(name)}/` | {owns} | {files} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(draw())
