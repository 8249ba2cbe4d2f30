"""Settings of Sphinx for the site; `.ci/docs.py` prepares the pages and runs it."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import groupby
from typing import Any

import metamq

project = "metamq"
release = version = metamq.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = f"metamq {release}"
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"footer_icons": []}
myst_heading_anchors = 4
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
suppress_warnings = [
    "misc.highlighting_failure",  # shell lines with placeholders
    "ref.python",  # the type of a signature that both APIs have
    "myst.header",
]

_UNDERSCORE = re.compile(r"(?<=\w)_(?=\W|$)")
_ARGUMENT = re.compile(r"(\w+(?:, \w+)*):\s+(\S.*)")
_DEFAULTS = re.compile(r"<factory>|NOT_GIVEN|lambda *\w*: [\w.]+")
"""Defaults that mean nothing to a reader."""


def setup(app: Any) -> None:
    """Docstrings here are plain text: paragraphs, lists of arguments, and indented lines that stay as they are."""
    app.connect("autodoc-process-docstring", _as_rst)
    app.connect("autodoc-process-signature", _readable)


def _readable(
    _app: Any, _what: str, _name: str, _object: Any, _options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    return signature and _DEFAULTS.sub("...", signature), returns


def _as_rst(_app: Any, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    if lines and lines[0].startswith("Alias for field number"):  # the fields of a named tuple are in its docstring
        lines.clear()
    found: list[str] = []
    for paragraph in _runs(lines, lambda line: not line.strip()):
        found += _paragraph(paragraph) if paragraph[0].strip() else paragraph
    lines[:] = found


def _runs(lines: list[str], key: Callable[[str], bool]) -> list[list[str]]:
    return [list(group) for _, group in groupby(lines, key)]


def _paragraph(lines: list[str]) -> list[str]:
    """Returns the RST of lines without a blank one between them."""
    if _ARGUMENT.match(lines[0]) and all(line.startswith("  ") or _ARGUMENT.match(line) for line in lines):
        return [piece for line in lines for piece in _argument(line)]
    found: list[str] = []
    for run in _runs(lines, lambda line: line.startswith("  ")):
        found += ["", "::", "", *run, ""] if run[0].startswith("  ") else map(_escaped, run)
    return found


def _argument(line: str) -> list[str]:
    """Returns the term of a definition list with the first line of its text, or a further line."""
    argument = _ARGUMENT.match(line)
    return ["", f"``{argument[1]}``", f"    {_escaped(argument[2])}"] if argument else [f"    {_escaped(line.strip())}"]


def _escaped(line: str) -> str:
    """Escapes what RST would take for markup; text in backticks stays."""
    parts = line.split("`")
    parts[::2] = [
        _UNDERSCORE.sub(r"\\_", part.replace("\\", "\\\\").replace("*", r"\*").replace("|", r"\|"))
        for part in parts[::2]
    ]
    return "`".join(parts)
