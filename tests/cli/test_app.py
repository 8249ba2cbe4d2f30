"""What all commands share: help, options, the ends of a command, what goes where."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from metamq.broker.config import BrokerConfig
from metamq.cli.app import COMMANDS
from metamq.cli.app import metamq as root_command
from metamq.cli.commands.servers import broker
from tests.cli.conftest import but_for_closing

Metamq = Callable[..., Any]
Start = Callable[..., "subprocess.Popen[bytes]"]


def all_commands() -> list[list[str]]:
    found = []
    context = click.Context(root_command)
    for name in COMMANDS:
        command = root_command.get_command(context, name)
        found.append([name])
        if isinstance(command, click.Group):
            found += [[name, below] for below in command.commands]
    return found


def test_help_names_every_command_and_loads_none() -> None:
    program = (
        "import sys; from metamq.cli.app import run; status = run(['--help']);"
        "heavy = {'kazoo', 'rich', 'asyncio', 'metamq.cli.commands.topic', 'metamq.client.producer.producer'};"
        "heavy &= set(sys.modules);"
        "sys.exit(f'loaded {heavy}' if heavy else status)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for name in COMMANDS:
        assert f"\n  {name} " in done.stdout


@pytest.mark.parametrize("command", all_commands(), ids=" ".join)
def test_every_command_has_help_with_an_example(offline: Metamq, command: list[str]) -> None:
    shown = offline(*command, "--help")
    assert (shown.status, shown.talk) == (0, "")
    name = " ".join(command)
    is_group = len(command) == 1 and command[0] in ("topic", "group", "log")
    assert is_group or command == ["demo"] or f"\n  metamq {name}" in shown.text or f"| metamq {name}" in shown.text
    assert "--zookeeper" in shown.text


@pytest.mark.parametrize("command", all_commands(), ids=" ".join)
def test_every_command_can_print_json(command: list[str]) -> None:
    context = click.Context(root_command)
    found = root_command.get_command(context, command[0])
    for name in command[1:]:
        assert isinstance(found, click.Group)
        found = found.commands[name]
    assert found is not None
    if isinstance(found, click.Group) or command == ["demo"]:
        return
    outputs = [parameter.type for parameter in found.params if parameter.name == "output"]
    assert [isinstance(kind, click.Choice) and "json" in kind.choices for kind in outputs] == [True]


def test_every_broker_setting_is_a_flag() -> None:
    flags = {parameter.name for parameter in broker.params}
    assert set(BrokerConfig.__dataclass_fields__) <= flags


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tpic"], "No such command 'tpic'. Did you mean 'topic'?"),
        (["topic", "lst"], "No such command 'lst'. Did you mean 'list'?"),
        (["xyzzy"], "No such command 'xyzzy'."),
        (["topic", "create"], "Missing argument 'NAME'. Write it like: metamq topic create flights"),
        (["ha", "promote", "0", "1"], "option '--slave'. Write it like: metamq ha promote --broker 0 --slave 1"),
        (["ha", "promote", "--slave", "1", "0"], "(0) Write it like: metamq ha promote --broker 0 --slave 1"),
        (["group", "reset"], "'NAME'. Write it like: metamq group reset etl flights --to earliest"),
        (["up", "7"], "unexpected extra argument (7) Write it like: metamq up"),
        (["topic", "create", "a b"], "has ' ' at character 2"),
        (["topic", "create", "x", "--retention", "soon"], "write it like 500ms"),
        (["topic", "create", "x", "--flush", "often"], "is not a flush policy"),
        (["topic", "list", "-o", "xml"], "'xml' is not one of"),
        (["topic", "alter", "x"], "give a setting to change"),
        (["produce", "x", "-k", "a", "-K", ":"], "give one of them"),
        (["produce", "x", "-H", "nonsense"], "is not NAME=VALUE"),
        (["consume", "x", "--from", "yesterday"], "is not a place in a log"),
        (["consume", "x", "--format", "%q"], "%q is unknown in a format"),
        (["consume", "x", "--group", "g", "--from", "7"], "a group begins at its committed offsets"),
        (["consume", "x", "--group", "g", "--until", "7"], "a group begins at its committed offsets"),
        (["consume", "x", "--partition", "3"], "is not a broker id, a '-' and an index"),
        (["consume", "x", "--where", "id = 7"], "is not a condition: write it like"),
        (["produce", "x", "-D", ""], "an empty text separates nothing"),
        (["produce", "x", "--json", "-k", "a"], "--json has the key and the headers in each record"),
        (["group", "reset", "g", "x"], "give either --to, --shift-by or --partition"),
        (["up", "--ephemeral", "--data", "x"], "give one of them"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_ends_with_2(offline: Metamq, arguments: list[str], words: str) -> None:
    ended = offline(*arguments)
    assert (ended.status, ended.data) == (2, b"")
    assert words in " ".join(ended.talk.split())
    assert ("Write it like: " in ended.talk) == ("Write it like: " in words)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["broker", "--disk-reserve", "20MB"],
            "--disk-reserve must be a whole number of bytes from 32 MiB to 1 PiB, not 20MB\n",
        ),
        (
            ["broker", "--session-timeout", "1.5ms"],
            "metamq: --session-timeout must be a whole number of milliseconds from 1,000 to 600,000, not 1.5ms\n",
        ),
        (
            ["broker", "--retention-check", "1ms"],
            "metamq: --retention-check must be a number of seconds from 0.1 to 3,600, not 1ms\n",
        ),
        (
            ["broker", "--drain-timeout", "2h", "--data", "x"],
            "metamq: --drain-timeout must be a number of seconds from 0 to 3,600, not 2h\n",
        ),
        (["broker", "--id", "70000"], "metamq: --id must be a whole number from 0 to 65,535, not 70000\n"),
        (["topic", "list", "--zookeeper", "http://foo"], "ZooKeeper address 'http://foo' is a URL\n  Write host and"),
    ],
)
def test_wrong_values_are_named_in_words(offline: Metamq, arguments: list[str], said: str) -> None:
    ended = offline(*arguments)
    assert (ended.status, ended.data) == (1, b"")
    assert said in ended.talk


def test_nobody_there_ends_with_3_at_once(offline: Metamq) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: refused
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for command in (["topic", "list"], ["consume", "x"], ["produce", "x", "y"], ["group", "list"], ["bench"]):
            ended = offline(*command, "--zookeeper", address)
            assert (ended.status, ended.data) == (3, b"")
            first, second = ended.talk.splitlines()
            # Else it would say for how long it was tried.
            assert first == f"metamq: no connection to ZooKeeper at {address}: connection refused"
            assert "metamq up" in second


@pytest.mark.slow
def test_a_broker_is_not_taken_for_a_zookeeper(offline: Metamq, running: Any) -> None:
    broker = f"127.0.0.1:{running.broker.port}"
    began = time.monotonic()
    ended = offline("topic", "list", "--zookeeper", broker)
    assert (ended.status, ended.talk) == (
        3,
        f"metamq: no connection to ZooKeeper at {broker}: {broker} is a metamq broker\n"
        "  Give ZooKeeper's address: brokers are found through it.\n",
    )
    assert time.monotonic() - began < 9  # of 10
    assert f"{broker} is a metamq broker" in offline("doctor", "--zookeeper", broker).text


def test_a_zookeeper_that_answers_nothing_is_told_of_after_a_second(process: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        child = process("topic", "list", "--zookeeper", address)
        assert child.stderr is not None
        line = child.stderr.readline().decode()
        assert f"waiting for ZooKeeper at {address}: no answer" in line


def test_errors_are_two_lines_without_a_traceback(metamq: Metamq, topic: str) -> None:
    ended = metamq("topic", "describe", topic[:-1])
    assert (ended.status, ended.data) == (1, b"")
    assert ended.talk == f"metamq: topic {topic[:-1]!r} does not exist\n  Did you mean {topic!r}?\n"
    assert "Traceback" in metamq("topic", "describe", topic[:-1], "--debug").talk


def test_global_options_stand_before_or_behind(offline: Metamq, running: Any) -> None:
    assert offline("--zookeeper", running.zookeeper, "topic", "list").status == 0
    assert offline("topic", "--zookeeper", running.zookeeper, "list").status == 0
    assert offline("--zookeeper", "nowhere.invalid:1", "topic", "list", "--zookeeper", running.zookeeper).status == 0


def test_settings_come_from_file_environment_and_options(
    offline: Metamq, running: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "metamq.toml"
    file.write_text(f'zookeeper = "{running.zookeeper}"\n')
    assert offline("topic", "list", "--config", file).status == 0
    monkeypatch.setenv("METAMQ_CONFIG", str(file))
    assert offline("topic", "list").status == 0
    monkeypatch.setenv("METAMQ_ZOOKEEPER", "no address")
    assert "is not a host and a port" in offline("topic", "list").talk
    assert offline("topic", "list", "--zookeeper", running.zookeeper).status == 0


@pytest.mark.parametrize(
    ("text", "command", "words"),
    [
        ("zookeper = 'x'", ["topic", "list"], "unknown setting 'zookeper' in {file} Did you mean 'zookeeper'?"),
        ("[broker]\nprot = 1", ["broker"], "unknown setting 'prot' in [broker] of {file} Did you mean 'port'?"),
        ("[broker]\nport = 'x'", ["broker"], "port in [broker] of {file} must be a whole number, not 'x'"),
        ("[producer]\nlinger = 1", ["produce", "x", "y"], "unknown setting 'linger' in [producer] of {file}"),
        ("[consumer]\nfetch_wait_ms = -1", ["consume", "x"], "the consumer's `fetch_wait_ms` must be a whole number"),
        ("[consumer]\nfetch_wait_ms = -1", ["bench"], "the consumer's `fetch_wait_ms` must be a whole number"),
        ("[", ["topic", "list"], "{file} is not TOML"),
        (None, ["topic", "list"], "cannot read the configuration file {file}: No such file"),
    ],
)
def test_a_wrong_file_is_named(
    offline: Metamq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, command: list[str], words: str
) -> None:
    file = tmp_path / "metamq.toml"
    if text is not None:
        file.write_text(text)
    for given in (["--config", str(file)], []):
        ended = offline(*command, *given)
        assert ended.status == 1
        assert words.format(file=file) in " ".join(ended.talk.split())
        monkeypatch.setenv("METAMQ_CONFIG", str(file))


@pytest.mark.parametrize(
    ("name", "command", "meant"),
    [
        ("METAMQ_ZOOKEPER", ["topic", "list"], "METAMQ_ZOOKEEPER"),
        ("METAMQ_PRODUCER_COMPRESION", ["produce", "x", "y"], "METAMQ_PRODUCER_COMPRESSION"),
        ("METAMQ_BROKER_PROT", ["broker"], "METAMQ_BROKER_PORT"),
        ("METAMQ_BROKER_PROT", ["up", "--ephemeral"], "METAMQ_BROKER_PORT"),
    ],
)
def test_a_misspelt_variable_is_named(
    metamq: Metamq, monkeypatch: pytest.MonkeyPatch, name: str, command: list[str], meant: str
) -> None:
    monkeypatch.setenv(name, "x")
    ended = metamq(*command)
    assert (ended.status, ended.data) == (1, b"")
    assert ended.talk == f"metamq: unknown setting {name!r} in the environment\n  Did you mean {meant!r}?\n"


def test_a_root_where_nothing_is_says_so_with_what_is_there(
    metamq: Metamq, topic: str, running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert topic in metamq("topic", "list", "--root", "/meta").text
    for command in (["topic", "list"], ["group", "list"], ["consume", topic], ["produce", topic, "x"], ["bench"]):
        ended = metamq(*command, "--root", "/elsewhere")
        assert (ended.status, ended.data) == (1, b"")
        first, second = ended.talk.splitlines()
        assert first == f"metamq: there is no /elsewhere in ZooKeeper at {running.zookeeper}"
        assert second.startswith("  Beside it: /meta. Choose with --root or METAMQ_ROOT")
    monkeypatch.setenv("METAMQ_ROOT", "/elsewhere/deep")
    assert "there is no /elsewhere/deep in ZooKeeper" in metamq("topic", "list").talk
    looked = metamq("doctor")
    assert looked.status == 1
    assert "problem  root: there is no /elsewhere/deep in ZooKeeper" in looked.text
    assert "does not start with '/'" in metamq("topic", "list", "--root", "elsewhere").talk


def test_a_chroot_that_is_misspelt_is_named_and_not_made(metamq: Metamq, topic: str, running: Any) -> None:
    for command in (["topic", "list"], ["topic", "create", "t"], ["consume", topic], ["doctor"]):
        ended = metamq(*command, "--zookeeper", f"{running.zookeeper}/chrot")
        assert ended.status == 1
        said = " ".join((ended.talk + ended.text).split())
        assert f"there is no /chrot in ZooKeeper at {running.zookeeper} Beside it: /meta." in said
        assert "It is the end of the ZooKeeper address: correct it" in said
    assert "/chrot" not in metamq("topic", "list", "--root", "/elsewhere").talk


def test_no_colours_in_a_pipe(metamq: Metamq, topic: str) -> None:
    assert b"\x1b" not in metamq("topic", "describe", topic).data
    assert "\x1b" not in metamq("topic", "delete", topic).talk


def test_a_reader_that_leaves_is_no_error(process: Start, topic: str, metamq: Metamq) -> None:
    assert metamq("produce", topic, stdin=b"line\n" * 200_000).status == 0
    child = process("consume", topic, "-e")
    assert child.stdout is not None
    assert child.stdout.read(10) == b"line\nline\n"
    child.stdout.close()
    child.stdout = None
    _, talk = child.communicate(timeout=90)
    assert (child.returncode, but_for_closing(talk)) == (0, b"")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["consume", "TOPIC", "-e"], ["topic", "list"]])
def test_a_full_disk_below_the_output_is_one_line(
    process: Start, topic: str, metamq: Metamq, arguments: list[str]
) -> None:
    assert metamq("produce", topic, stdin=b"line\n").status == 0
    with open("/dev/full", "wb") as full:
        settings = {"stdout": full, "env": {"PYTHONUNBUFFERED": ""}}
        running = process(*(topic if one == "TOPIC" else one for one in arguments), **settings)
    _out, err = running.communicate(timeout=60)
    assert running.returncode == 1
    assert err.decode().splitlines() == ["metamq: standard output: No space left on device"]
