"""What others have written is inert on a terminal, and as it is in a pipe."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from typing import Any

import pytest

from metamq.cli.app import run
from metamq.cli.commands import tx
from metamq.cli.context import Globals
from metamq.cli.show.message_format import as_json, as_raw, compile_format
from metamq.cli.show.output import folded, print_json, print_table, say, styled
from metamq.cli.show.terminal import escaped, escaped_bytes
from metamq.client.model import Message
from metamq.client.net.branches import BranchDescription
from metamq.wire.xa import Xid

EVIL = "a\x1b[2J\x9b1m\x07\u202etxt\u2066\x7f\r\u2028z"
HARMLESS = "a\\x1b[2J\\x9b1m\\x07\\u202etxt\\u2066\\x7f\\x0d\\u2028z"
MESSAGE: Message[bytes] = Message(
    "t", "0-0", 5, EVIL.encode(), EVIL.encode() + b"\xff\n", {EVIL: EVIL.encode()}, 1_000_000
)


def pretend_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as a fixture: pytest gives the test itself other streams."""
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")


def test_every_control_character_is_escaped_but_ends_of_lines_and_tabs() -> None:
    bidi = [0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x2028, 0x2029]
    for number in [*range(0x20), *range(0x7F, 0xA0), *bidi]:
        if chr(number) not in "\n\t":
            assert escaped(chr(number)) in (f"\\x{number:02x}", f"\\u{number:04x}")
    for number in [*range(0x20, 0x7F), *range(0xA0, 0x600), *range(0x3000, 0x3100)]:
        assert escaped(chr(number)) == chr(number)
    assert escaped(EVIL) == HARMLESS
    assert escaped("Grüße,\tWelt\n日本") == "Grüße,\tWelt\n日本"
    assert escaped_bytes(b"\xff\x1b") == b"\\xff\\x1b"


def test_tables_talk_and_errors_are_inert_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_terminal(monkeypatch)
    print_table(["SESSION", "N"], [[EVIL, 1]])
    say(f"broker says: {EVIL}")
    said = capsys.readouterr()
    assert HARMLESS in said.out
    assert HARMLESS in said.err
    assert "\x1b" not in said.out + said.err
    assert styled(EVIL, sys.stdout) == folded(EVIL, sys.stdout) == HARMLESS


def test_the_owner_and_the_id_of_a_transaction_are_inert_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_terminal(monkeypatch)
    found = BranchDescription(Xid(7, EVIL.encode()), 0, 1, "prepared", EVIL, 1, 1, 0, "0:1")
    monkeypatch.setattr(Globals, "admin", lambda settings: nullcontext())
    monkeypatch.setattr(tx, "_find", lambda admin, xid: ([found], []))
    assert run(["tx", "show", str(found.xid)]) == 0
    said = capsys.readouterr()
    assert f"begun by {HARMLESS}" in said.out
    assert escaped(said.out) == said.out


def test_a_pipe_gets_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    evil = EVIL.replace("\x1b[2J", "\x1b")  # click takes whole sequences out of what is piped
    print_table(["SESSION", "N"], [[evil, 1]])
    assert evil in capsys.readouterr().out
    assert as_raw(MESSAGE) == MESSAGE.value
    assert compile_format("%k %v")(MESSAGE) == EVIL.encode() + b" " + MESSAGE.value


def test_messages_are_inert_on_a_terminal_and_the_format_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_terminal(monkeypatch)
    render = compile_format("\\x1b[1m%k|%h|%K|%S\\n")
    text = HARMLESS.encode()
    lengths = b"|%d|%d" % (len(EVIL.encode()), len(MESSAGE.value))
    assert render(MESSAGE) == b"\x1b[1m" + text + b"|" + text + b"=" + text + lengths + b"\n"
    assert as_raw(MESSAGE) == text + b"\\xff\n"


def test_json_has_no_control_character_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    """Not even those that JSON allows; and it means the same."""
    odd: Any = {"name": EVIL, EVIL: ["日本"]}
    print_json(odd)
    printed = capsys.readouterr().out
    written = as_json(MESSAGE._replace(value=EVIL.encode())).decode()
    for document in (printed, written):
        assert escaped(document) == document
    assert json.loads(printed) == odd
    assert json.loads(written)["value"] == EVIL
