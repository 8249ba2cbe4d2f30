"""docs/house.md is the picture of the code as it is."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent


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
