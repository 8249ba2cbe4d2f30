"""Checks the public API with pyright, as a user sees it; part of `./dev lint`, runs in .venv/typing.

1. Every public name has declared types, with all arguments and results: `pyright --verifytypes`. Only names that users
   import count. Pyright calls types ambiguous that mypy infers.
2. A user's program, tests/typed_user.py, has no errors in pyright's strict mode.

    python .ci/public_types.py PYRIGHT PROGRAM      prints the faults; then ends with status 1
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

PUBLIC = ("metamq", "metamq.aio", "metamq.errors", "metamq.testing", "metamq.types")


def homes() -> Iterator[str]:
    """Yields the full name of each public class or function, and of the base classes."""
    for name in PUBLIC:
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]:
            found = getattr(module, public)
            for one in getattr(found, "__mro__", (found,)):
                name = f"{getattr(one, '__module__', '')}.{getattr(one, '__qualname__', '<none>')}"
                if name.startswith("metamq.") and "<" not in name:
                    yield name


def asked(pyright: str, *arguments: str) -> dict[str, Any]:
    """Returns pyright's answer. Raises SystemExit if the answer is not JSON."""
    done = subprocess.run([pyright, "--outputjson", *arguments], capture_output=True, text=True, check=False)
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise SystemExit(f"pyright ended with status {done.returncode}: {done.stdout}{done.stderr}") from None
    return answer


def shown(finding: dict[str, Any]) -> str:
    """Returns a finding on one line, with the real file's name."""
    file = re.sub(r"^metamq/(?=\w+/)", "", finding["file"].removeprefix(f"{os.getcwd()}/"))
    place = f"{file}:{finding['range']['start']['line'] + 1}" if file else "elsewhere"
    return f"{place}: {' '.join(finding['message'].split())}"


def incomplete(pyright: str, python: str) -> list[str]:
    """Returns the public symbols without a known type."""
    report = asked(pyright, "--pythonpath", python, "--verifytypes", "metamq", "--ignoreexternal")
    symbols = report["typeCompleteness"]["symbols"]
    known = {one["name"] for one in symbols if one["isTypeKnown"] and not one["isTypeAmbiguous"]}
    public = set(homes())
    unseen = sorted(public - {one["name"] for one in symbols})
    ours = [one for one in symbols if f"{one['name']}.".startswith(tuple(f"{home}." for home in public))]
    wrong = [one for one in ours if one["name"] not in known]
    said = [line for one in wrong for line in map(shown, one["diagnostics"])] or [one["name"] for one in wrong]
    return [f"{name}: pyright does not see it" for name in unseen] + said


def misunderstood(pyright: str, python: str, program: str) -> list[str]:
    """Returns the errors in a user's program."""
    return [shown(one) for one in asked(pyright, "--pythonpath", python, program)["generalDiagnostics"]]


def main() -> int:
    pyright, program = sys.argv[1:3]
    wrong = incomplete(pyright, sys.executable) + misunderstood(pyright, sys.executable, program)
    print("\n".join(dict.fromkeys(wrong)))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
