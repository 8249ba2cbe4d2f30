"""Plain English in all that people read, as far as a machine can hold it: words, first words, length of sentences.

Looks at docstrings, comments and messages of the product, and at the text of the documents. Code, in backticks or
fences, is left out.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_style import ROOT, text_files

pytestmark = pytest.mark.lint

INSTEAD_OF = {
    r"told|tells? of": "reports, notifies, says",
    r"anew": "again, from scratch",
    r"for ever": "without end, permanently",
    r"lets? (?:\w+ )?go|letting (?:\w+ )?go": "releases, drops",
    r"as ever": "as usual",
    r"to and fro": "back and forth",
    r"be it": "however",
    r"lies?|lay|lain|lying": "is",
    r"somebody|someone|everybody": "the name of the process or the person",
    r"besides": "also",
    r"thereby|thereof|therein|whereof|whereby|wherein|hence|whence": "by this, of it, therefore",
    r"(?:are|is|was|were) to be": "must be",
    r"(?:that|which|who) (?:is|are) none": "if there is no such",
    r"needs? not": "does not need to",
    r"to be had": "available",
    r"lanes?": "pooled connection",
    r"faces?": "API",
    r"in hand": "in flight",
    r"leftovers?": "orphans",
    r"in pieces": "in pages",
    r"comes? to nothing": "fails, has no effect",
}
FIRST_WORDS = ["What", "Whether", "Of", "Who", "Whoever", "Whose", "How", "Where", "When", "Which", "Why", "Those"]
WORDS_MAX = 35

_INSTEAD_OF = [(re.compile(rf"\b(?:{words})\b", re.IGNORECASE), instead) for words, instead in INSTEAD_OF.items()]
_ANY_OF_THEM = re.compile(rf"\b(?:{'|'.join(INSTEAD_OF)})\b", re.IGNORECASE)
_CODE = re.compile(r"```.*?```|``[^`]*``|`[^`\n]*`", re.DOTALL)
_TABLE_LINE = re.compile(r"^.*\S(?:  | ├).*$", re.MULTILINE)
_PARAGRAPH = re.compile(r"\n\s*\n|\n\s*(?=[-*|#>] |\d+\. )|\|")
_SENTENCE = re.compile(r"(?<=[.!?:;])\s+")


def problems(text: str) -> Iterator[str]:
    """Yields what a text has that readers have to read twice."""
    text = _CODE.sub("x", text)
    for pattern, instead in _INSTEAD_OF if _ANY_OF_THEM.search(text) else ():
        for found in pattern.finditer(text):
            yield f"'{found[0]}': write {instead}"
    for paragraph in _PARAGRAPH.split(_TABLE_LINE.sub("", text)):
        for sentence in _SENTENCE.split(paragraph):
            count = len(re.findall(r"[A-Za-z][\w'-]*", sentence))
            if count > WORDS_MAX and not sentence.startswith("CREATE TABLE"):
                yield f"{count} words in one sentence: {' '.join(sentence.split())[:60]}..."


def texts_of_python(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yields (line, text, is a docstring): docstrings, comments, and literals."""
    docstrings, parts = set[int](), set[int]()
    for node in ast.walk(ast.parse(source)):  # outer nodes come before inner ones
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                docstrings.add(id(child.value))
        if isinstance(node, ast.JoinedStr):
            parts.update(map(id, node.values))
            yield node.lineno, "".join(str(v.value) if isinstance(v, ast.Constant) else "x" for v in node.values), False
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.lineno, node.value, id(node) in docstrings
    line, comment = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != line + 1:
                yield line, "\n".join(comment), False
                comment = []
            line = token.start[0]
            comment.append(token.string.lstrip("# "))
    yield line, "\n".join(comment), False


def read(path: Path) -> Iterator[str]:
    """Yields the problems of a file, each with its place."""
    text = path.read_text()
    parts = [(1, text, False)] if path.suffix == ".md" else texts_of_python(text)
    for line, part, is_docstring in parts:
        first, _, _ = part.lstrip().partition(" ")
        if is_docstring and first in FIRST_WORDS:
            yield f"{path}:{line}: a docstring begins with '{first}': begin with a noun or a verb"
        yield from (f"{path}:{line}: {problem}" for problem in problems(part))


def test_texts_are_read_once() -> None:
    files = [path for path in text_files() if path.suffix in (".md", ".py") and path.parts[len(ROOT.parts)] != "tests"]
    assert len(files) > 300
    found = [problem for path in files for problem in read(path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        '"""Whether it is there."""',
        'def f():\n    """Returns the offset.\n\n    It is told anew."""',
        "x = 1  # for ever",
        'raise ValueError(f"{x} is to be a number")',
        f'"""{"word " * 36}."""',
    ],
)
def test_what_has_to_be_read_twice_is_found(source: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    assert list(read(path))
