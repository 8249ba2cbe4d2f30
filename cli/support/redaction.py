"""The filter of a bundle: every text passes it, so that no secret leaves with one.

It is the second line of defence. The parts themselves take only known fields, see their modules. The filter removes

    known secrets     passwords, tokens, keys that files and variables of this machine have, wherever they appear
    forms of secrets  private keys, passwords in addresses, tokens of the web, "password: ..." and the like
    nodes             the content of a damaged node in ZooKeeper, and a wrong setting of a topic, which errors quote

A secret of less than four characters is not recognised: it would be a part of many words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

REMOVED = "(removed)"
SECRET_CHARS_MIN = 4
FILE_BYTES_MAX = 1 << 20
_WORDS = (
    r"pass(?:word|wd|phrase)?|pw|pwd|secret|token|credentials?|api[_-]?key|access[_-]?key|private[_-]?key|authorization"
)
SECRET_NAME = re.compile(rf"(?:^|[_.-])(?:{_WORDS})(?:$|[_.-](?!file$))|password$", re.IGNORECASE)
"""A name of a variable or a setting whose value is a secret."""
_VALUE = r"(?!\(removed\))(\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'|(?:[^\s,;&\"')}\]]|,(?=\S))+)"
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_RULES = (
    (re.compile(r"(?<=://)[^/\s\"']*@"), f"{REMOVED}@"),
    (re.compile(r"\beyJ[\w-]{6,}\.[\w-]+\.[\w-]*"), REMOVED),
    (re.compile(r"\b([Bb]earer|Basic) +[\w.~+/=-]{8,}"), rf"\1 {REMOVED}"),
    (re.compile(rf"(?<!-)(--[\w-]*(?:{_WORDS})[ =]){_VALUE}", re.IGNORECASE), rf"\1{REMOVED}"),
    (re.compile(rf"(?<![\w.-])([\w.-]*(?:{_WORDS})[\"']?\s*[:=]\s*){_VALUE}", re.IGNORECASE), rf"\1{REMOVED}"),
    (re.compile(r"(refused as the user )(?:'[^'\n]*'|\"[^\"\n]*\")"), rf"\1{REMOVED}"),
    (re.compile(r"(\btopic '[^'\n]*': [\w .:]+ is )(?!-?\d+\b|\(removed\)).*"), rf"\1{REMOVED}"),
    (re.compile(r"( in ZooKeeper \(/[^)\n]*\): )(?!\(removed\)).*"), rf"\1{REMOVED}"),
    (re.compile(r"( has format )(?!\d+\b|\(removed\)).*"), rf"\1{REMOVED}"),
    (re.compile(r"( in ZooKeeper\b.{0,300}? is damaged: (?:\w+: )?+)(?!\(removed\)).*"), rf"\1{REMOVED}"),
)
"""Forms of secrets in a line, and their replacements, which have none of the forms. A person may type a password as
the name of a user."""
_SIGNS = (
    "pass", "pw", "secret", "token", "credential", "key", "authorization", "://", "eyj", "bearer", "basic",
    "refused as", "topic '", "in zookeeper", "has format",
)  # fmt: skip
"""A line without any of them, in lower case, has none of these forms: most lines are passed over so."""


class Redaction:
    """Removes secrets from texts. Call hide() before the other methods."""

    def __init__(self) -> None:
        self._secrets: set[str] = set()
        self._known: list[str] = []

    def hide(self, secrets: Iterable[str]) -> None:
        """Adds secrets."""
        self._secrets |= {one for secret in secrets if len(one := secret.strip()) >= SECRET_CHARS_MIN}
        forms = {form for secret in self._secrets for form in _forms(secret)}
        self._known = sorted(forms, key=len, reverse=True)

    def hide_file(self, path: str | Path) -> None:
        """Adds each line of a file with a secret. A file that cannot be read shows no secret either."""
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                lines = file.read(FILE_BYTES_MAX).splitlines()
        except OSError:
            return
        self.hide(line for line in lines if not line.startswith("-----"))

    def text(self, text: str) -> str:
        """Returns the text without secrets."""
        for secret in self._known:
            text = text.replace(secret, REMOVED)
        if signs := signs_in(text):
            text = _PRIVATE_KEY.sub(REMOVED, text)
            text = "".join(_without_forms(line, signs) for line in text.splitlines(keepends=True))
        return text

    def document(self, value: Any) -> str:
        """Returns a value as JSON, without secrets in its texts."""
        return json.dumps(self._value(value), indent=1, ensure_ascii=False, default=str) + "\n"

    def line(self, value: Mapping[str, Any]) -> str:
        """Returns an object as JSON on one line, without secrets in its texts."""
        return json.dumps(self._value(value), ensure_ascii=False, default=str)

    def _value(self, value: Any) -> Any:
        if is_dataclass(value) and not isinstance(value, type):
            value = asdict(value)
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(name)): self._named(str(name), one) for name, one in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [self._value(one) for one in value]
        return value

    def _named(self, name: str, value: Any) -> Any:
        return REMOVED if isinstance(value, str) and value and SECRET_NAME.search(name) else self._value(value)


def signs_in(text: str) -> list[str]:
    """Returns the signs of secrets that a text has."""
    lower = text.lower()
    return [sign for sign in _SIGNS if sign in lower]


def _without_forms(line: str, signs: Sequence[str]) -> str:
    lower = line.lower()
    for sign in signs:
        if sign in lower:
            break
    else:
        return line
    for form, replacement in _RULES:
        line = form.sub(replacement, line)
    return line


def _forms(secret: str) -> set[str]:
    """Returns a secret as it is, and as JSON, Python and an address write it."""
    escaped = {json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], repr(secret)[1:-1]}
    return {secret, quote(secret, safe=""), *escaped}
