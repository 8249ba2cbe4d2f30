"""Links the folders at the root as the packages metamq.<folder>, in .venv/typing/metamq; `./dev setup` runs it.

A running Python knows these packages from the editable install. Editors and static tools do not: they read the links.
A link that is right stays, because another program may read it now.

    .venv/bin/python .ci/link_packages.py
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VIEW = ROOT / ".venv" / "typing" / "metamq"


def wanted() -> dict[str, Path]:
    """The place of each package and module directly below metamq."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        folders = tomllib.load(file)["tool"]["setuptools"]["package-dir"]
    places = {name.removeprefix("metamq."): ROOT / path for name, path in folders.items() if name.count(".") == 1}
    modules = {path.name: path for path in (ROOT / "metamq").iterdir() if path.suffix in (".py", ".typed")}
    return places | modules


def link() -> None:
    """Makes the missing links, and removes the others."""
    VIEW.mkdir(parents=True, exist_ok=True)
    links = {name: os.path.relpath(path, VIEW) for name, path in wanted().items()}
    for old in VIEW.iterdir():
        if not old.is_symlink() or os.readlink(old) != links.get(old.name):
            old.unlink()
    for name in links.keys() - {one.name for one in VIEW.iterdir()}:
        (VIEW / name).symlink_to(links[name])


if __name__ == "__main__":
    link()
