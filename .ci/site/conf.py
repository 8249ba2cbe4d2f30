"""Settings of Sphinx for the site; `.ci/docs.py` prepares the pages and runs it."""

from __future__ import annotations

import re
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
python_use_unqualified_type_names = True
suppress_warnings = [
    "misc.highlighting_failure",  # shell lines with placeholders
    "ref.python",  # the type of a signature that both APIs have
    "myst.header",
]

_UNDERSCORE = re.compile(r"(?<=\w)_(?=\W|$)")


def setup(app: Any) -> None:
    """Docstrings here are plain text: paragraphs, and indented lines that stay as they are."""
    app.connect("autodoc-process-docstring", _as_rst)


def _as_rst(_app: Any, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    found: list[str] = []
    is_block = False
    for line in lines:
        starts_block = line.startswith("  ") and line.strip() != ""
        if starts_block and not is_block:
            found += ["", "::", ""]
        elif is_block and line.strip() and not starts_block:
            found.append("")
        is_block = starts_block or (is_block and not line.strip())
        found.append(line if is_block else _escaped(line))
    lines[:] = found


def _escaped(line: str) -> str:
    """Escapes what RST would take for markup; text in backticks stays."""
    parts = line.split("`")
    parts[::2] = [
        _UNDERSCORE.sub(r"\\_", part.replace("\\", "\\\\").replace("*", r"\*").replace("|", r"\|"))
        for part in parts[::2]
    ]
    return "`".join(parts)
