"""Builds the site of the documentation in `site/`: `./dev docs`. Warnings are errors.

The pages are those of `docs/`, and the reference comes from docstrings and from the help of the commands. NAV is the
order of the pages: a new page of `docs/` needs a line there.
"""

from __future__ import annotations

import ast
import html
import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from metamq.cli.app import metamq

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / ".venv" / "site"
SITE = ROOT / "site"

NAV = {
    "Start": ["start", "tutorial"],
    "Tasks": [
        "producing", "consuming", "typed", "scan", "transactions", "spark", "testing", "fastapi", "shop",
        "administering", "console",
    ],
    "In production": [
        "in-production", "operating", "scaling", "kubernetes", "security", "monitoring", "replication", "runbook",
        "releases",
    ],
    "Coming from": ["coming-from-kafka", "coming-from-rocketmq", "coming-from-celery"],
    "Explanation": [
        "architecture", "guarantees", "performance", "original-faults", "glossary", "house", "contributing",
    ],
    "Reference": [
        "api", "api-aio", "api-types", "api-tx", "api-others", "errors", "commands", "wire-protocol", "log-format",
        "journal-format", "changelog",
    ],
}  # fmt: skip
FROM_ROOT = {
    "README": "start",
    "ARCHITECTURE": "architecture",
    "CONTRIBUTING": "contributing",
    "CHANGELOG": "changelog",
}
MODULES = {
    "api": ("The API", ["metamq"]),
    "api-aio": ("The API for asyncio", ["metamq.aio"]),
    "api-types": ("Types of results and settings", ["metamq.types"]),
    "api-tx": ("Transactions", ["metamq.tx", "metamq.tx.aio"]),
    "api-others": ("Tests, metrics, traces", ["metamq.testing", "metamq.prometheus", "metamq.otel"]),
}  # fmt: skip
"""Spark's names are in docs/spark.md: their modules need pyspark."""
DOWNLOADS = (
    "monitoring/alerts.yml", "monitoring/grafana.json", "charts/metamq", "Dockerfile", "docker-compose.yml",
    "examples/orders_postgresql.py", "examples/count_spark.py", "examples/flights_spark.ipynb",
)  # fmt: skip
"""Files of the checkout that the site has, too; a folder becomes an archive."""
NO_MEMBERS = {"metamq.Message"}
"""Named tuples: their fields are in the docstring."""
UNREADABLE = re.compile(
    r".*(?:Alias for field number|<(?:object|function|factory)|= lambda|~(?:metamq|collections|typing)\."
    r"|metamq\.(?:client|zk|wire|tx\.app|tx\.database)\.).*"
)
"""Output of autodoc for a default, a field or a path that users cannot import."""


def main() -> None:
    """Builds the site. The exit status is that of Sphinx."""
    shutil.rmtree(PAGES, ignore_errors=True)
    PAGES.mkdir(parents=True)
    write_pages()
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-j", "auto", "-E", "-b", "html"]
    status = subprocess.run([*command, "-c", ROOT / ".ci" / "site", PAGES, SITE], check=False).returncode
    if not status:
        copy_downloads()
        check()
        (SITE / "llms.txt").write_text(llms())
        (SITE / "llms-full.txt").write_text("\n".join(one.read_text() for one in sources() if one.suffix == ".md"))
        print(SITE / "index.html")
    sys.exit(status)


def check() -> None:
    """Ends with an error if the pages load something of another host, or a public name has no entry."""
    pages = {path.stem: path.read_text() for path in SITE.glob("*.html")}
    for name, text in pages.items():
        if loaded := re.findall(r'<(?:script|img|link|iframe)[^>]*(?:src|href)="((?:https?:)?//[^"]+)"', text):
            sys.exit(f"{name}.html loads {', '.join(loaded)}")
    entries = {entry for text in pages.values() for entry in re.findall(r'id="(metamq\.[\w.]+)"', text)}
    for modules in (found for _title, found in MODULES.values()):
        for module in modules:
            for name in public_names(module):
                home = first_home(module, name)
                if f"{home}.{name}" not in entries:
                    sys.exit(f"the site has no entry for {home}.{name}")
    links = {link for text in pages.values() for link in re.findall(r'href="(downloads/[^"]+)"', text)}
    if missing := [link for link in links if not (SITE / link).is_file()] or not links:
        sys.exit(f"the site has no {missing}")
    faults = [fault for page in MODULES for fault in unreadable(page, pages[page], entries)]
    if faults:
        sys.exit("\n".join(faults))


def unreadable(page: str, text: str, entries: set[str]) -> Iterator[str]:
    """Yields what a reader of a page of the API cannot use: text in code blocks, objects, private paths and types."""
    for block in re.findall(r'<div class="highlight[^>]*><pre>(.*?)</pre>', text, re.DOTALL):
        try:
            ast.parse(plain(block))
        except SyntaxError:
            yield f"{page}: a code block has text: {plain(block):.80}"
    for found in UNREADABLE.findall(plain(text)):
        yield f"{page}: {found}"
    public = {entry.rpartition(".")[2] for entry in entries}
    ours = {name for module in list(sys.modules.values()) for name in our_classes(module)} - public
    for signature in re.findall(r'<span class="sig-return-typehint">(.*?)</dt>', text, re.DOTALL):
        for name in sorted(ours & set(re.findall(r'<span class="pre">([A-Z]\w+)</span>', signature))):
            yield f"{page}: a result is of the type {name}, which has no entry"


def plain(text: str) -> str:
    """Returns the text of HTML."""
    return html.unescape(re.sub(r"<[^>]*>", "", text))


def our_classes(module: object) -> list[str]:
    """Returns the names of the classes in a module of metamq."""
    return [name for name, one in vars(module).items() if str(getattr(one, "__module__", "")).startswith("metamq.")]


def public_names(module: str) -> list[str]:
    """Returns the public names of a module, but for modules in it."""
    return [
        name
        for name in importlib.import_module(module).__all__
        if name not in ("aio", "errors", "types", "__version__")
    ]


def first_home(module: str, name: str) -> str:
    """Returns the first module that has this object: the asyncio modules share names with the others."""
    thing = getattr(importlib.import_module(module), name)
    homes = ("metamq", "metamq.tx")
    return next((one for one in homes if getattr(importlib.import_module(one), name, None) is thing), module)


def write_pages() -> None:
    """Writes the source of each page."""
    for path in (ROOT / "docs").glob("*.md"):
        (PAGES / path.name).write_text(linked(path.read_text()))
    for path in (ROOT / "docs").glob("*.svg"):
        shutil.copy(path, PAGES)
    for name, page in FROM_ROOT.items():
        (PAGES / f"{page}.md").write_text(linked((ROOT / f"{name}.md").read_text()))
    for page, (title, modules) in MODULES.items():
        (PAGES / f"{page}.rst").write_text(reference(title, modules))
    (PAGES / "errors.rst").write_text(errors())
    (PAGES / "commands.md").write_text(
        "# Commands\n\n" + "\n".join(helps(metamq, click.Context(metamq, info_name="metamq")))
    )
    (PAGES / "index.md").write_text(index())
    given = {path.stem for path in PAGES.glob("*") if path.suffix in (".md", ".rst")} - {"index"}
    missing = given ^ {name for names in NAV.values() for name in names}
    if missing:
        sys.exit(f"NAV in .ci/docs.py and the pages differ: {', '.join(sorted(missing))}")


def download(name: str) -> str:
    """Returns the path of a download in the site."""
    return f"downloads/{name.replace('/', '-')}{'.zip' * (ROOT / name).is_dir()}"


def copy_downloads() -> None:
    """Copies the files that pages link to."""
    (SITE / "downloads").mkdir(exist_ok=True)
    for name in DOWNLOADS:
        target = SITE / download(name)
        if (ROOT / name).is_dir():
            shutil.make_archive(str(target.with_suffix("")), "zip", (ROOT / name).parent, Path(name).name)
        else:
            shutil.copy(ROOT / name, target)


def linked(text: str) -> str:
    """Changes links between the files of the checkout to links between pages. Other files of the checkout are named."""
    for name, page in FROM_ROOT.items():
        text = text.replace(f"(../{name}.md", f"({page}.md").replace(f"({name}.md", f"({page}.md")
    text = text.replace("(docs/", "(")
    for name in DOWNLOADS:
        text = re.sub(rf"\[([^]]+)\]\((?:\.\./)?{re.escape(name)}\)", rf'<a href="{download(name)}">\1</a>', text)
    text = text.replace("```mermaid", "```text")
    return re.sub(r"\[([^]]+)\]\(\.\./[^)]+\)", r"`\1`", text)


def reference(title: str, modules: list[str]) -> str:
    """Returns the page of the public names of modules. A name that two modules share is at the first one only."""
    parts = [title, "=" * len(title), ""]
    for module in modules:
        parts += [module, "-" * len(module), ""]
        shared = []
        for name in public_names(module):
            home = first_home(module, name)
            if home == module:
                parts += directive(module, name)
            else:
                shared.append(f":class:`{home}.{name}`")
        if shared:
            parts += [f"The same as there: {', '.join(shared)}.", ""]
    return "\n".join(parts)


def directive(module: str, name: str) -> list[str]:
    """Returns the lines for one public name."""
    thing = getattr(importlib.import_module(module), name)
    kind = "class" if isinstance(thing, type) else "function"
    lines = [f".. auto{kind}:: {module}.{name}"]
    if kind == "class" and f"{module}.{name}" not in NO_MEMBERS:
        lines += ["   :members:", "   :inherited-members: tuple, int, dict, Exception, Generic, Protocol"]
    return [*lines, ""]


def errors() -> str:
    """Returns the page of the errors."""
    module = importlib.import_module("metamq.errors")
    names = [name for name, one in vars(module).items() if isinstance(one, type) and one.__module__ == module.__name__]
    lines = ["Errors", "======", "", "All are subclasses of ``MetamqError``, in ``metamq.errors``.", ""]
    for name in names:
        lines += [f".. autoclass:: metamq.errors.{name}", "   :show-inheritance:", ""]
    return "\n".join(lines)


def helps(command: click.Command, context: click.Context) -> Iterator[str]:
    """Yields a part for a command and each one below it: its `--help`."""
    yield f"## {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                yield from helps(below, click.Context(below, parent=context, info_name=name))


def index() -> str:
    """Returns the first page."""
    lines = ["# metamq", "", "A pull-style message queue for Python and Spark.", ""]
    for caption, names in NAV.items():
        lines += ["```{toctree}", f":caption: {caption}", ":maxdepth: 1", "", *names, "```", ""]
    return "\n".join(lines)


def sources() -> list[Path]:
    """Returns the sources of the pages, in their order."""
    return [next(PAGES.glob(f"{name}.*")) for names in NAV.values() for name in names]


def first_sentence(text: str) -> str:
    """Returns the first sentence after the title; "" if the page has no text."""
    for paragraph in text.split("\n\n")[1:]:
        if re.match(r"[A-Za-z`\[*]", paragraph):
            plain_text = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", " ".join(paragraph.split()))
            return re.split(r"(?<=[.:])\s", plain_text)[0].rstrip(":")
    return ""


def llms() -> str:
    """Returns llms.txt: each page with its first sentence."""
    lines = ["# metamq", "", "> A pull-style message queue for Python and Spark.", ""]
    for caption, names in NAV.items():
        lines += [f"## {caption}", ""]
        for name in names:
            text = next(PAGES.glob(f"{name}.*")).read_text()
            title = next(line.lstrip("# ") for line in text.splitlines() if line.strip())
            lines.append(f"- [{title}]({name}.html): {first_sentence(text)}".removesuffix(": "))
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
