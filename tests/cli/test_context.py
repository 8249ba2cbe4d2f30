"""`metamq context`: named clusters, and which of them a command works on."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from metamq.cli.contexts import contexts_file
from tests.cli.conftest import Metamq


def shown(metamq: Metamq, *options: str) -> tuple[Any, ...]:
    found = metamq("context", "show", *options, "-o", "json").json
    return found["context"], found["zookeeper"], found["chosen_by"]


def test_a_command_works_on_the_context_in_use(offline: Metamq, running: Any) -> None:
    assert offline("context", "add", "here", "--zookeeper", running.zookeeper).status == 0
    assert offline("topic", "list", "--context", "here").status == 0
    used = offline("context", "use", "here")
    assert (used.status, used.talk) == (0, "Context here is in use.\n")
    assert offline("topic", "list").status == 0
    assert "context here" in offline("doctor").text
    lines = offline("context", "list").text.splitlines()
    assert lines[1].split() == ["*", "here", running.zookeeper, "-", "-"]
    assert offline("context", "use", "--none").status == 0
    assert offline("context", "list", "-o", "json").json == [
        {"name": "here", "in_use": False, "zookeeper": running.zookeeper, "root": "", "config": ""}
    ]
    assert offline("context", "remove", "here").status == 0
    assert offline("context", "list", "-o", "json").json == []


def test_options_come_before_variables_and_variables_before_the_context_in_use(
    offline: Metamq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shown(offline) == (None, "127.0.0.1:2181", "the default")
    for name in ("one", "two"):
        offline("context", "add", name, "--zookeeper", f"{name}:1", "--root", f"/{name}")
    offline("context", "use", "one")
    assert shown(offline) == ("one", "one:1", "`metamq context use`")
    monkeypatch.setenv("METAMQ_CONTEXT", "two")
    assert shown(offline) == ("two", "two:1", "METAMQ_CONTEXT")
    file = tmp_path / "settings.toml"
    file.write_text('zookeeper = "file:1"\n')
    assert shown(offline, "--config", str(file)) == (None, "file:1", "the settings file")
    monkeypatch.setenv("METAMQ_ZOOKEEPER", "variable:1")
    assert shown(offline) == (None, "variable:1", "METAMQ_ZOOKEEPER")
    assert shown(offline, "--context", "one") == ("one", "one:1", "--context")
    assert shown(offline, "--zookeeper", "option:1") == (None, "option:1", "--zookeeper")
    assert offline("context", "show", "--context", "one", "-o", "json").json["root"] == "/one"
    assert offline("context", "show", "--context", "one", "--root", "/x", "-o", "json").json["root"] == "/x"
    used = offline("context", "use", "one").talk
    assert "But commands in this shell work on variable:1: METAMQ_ZOOKEEPER wins." in used
    both = offline("context", "show", "--context", "one", "--zookeeper", "option:1")
    assert (both.status, "--zookeeper and --context both name a cluster" in both.talk) == (1, True)


def test_a_context_brings_its_settings_file(offline: Metamq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prod.toml").write_text('zookeeper = "zk:1"\nroot = "/p"\n[consumer]\nsession_timeout_ms = 1\n')
    monkeypatch.chdir(tmp_path)
    assert offline("context", "add", "prod", "--config", "prod.toml").status == 0
    monkeypatch.chdir("/")
    found = offline("context", "show", "--context", "prod", "-o", "json").json
    assert (found["zookeeper"], found["root"], found["config"]) == ("zk:1", "/p", str(tmp_path / "prod.toml"))
    ended = offline("consume", "t", "--context", "prod")
    assert "`session_timeout_ms`" in ended.talk
    lines = offline("context", "show", "--context", "prod").text.splitlines()
    assert lines[1].split() == ["Context", "prod"]


def test_only_the_owner_may_read_the_contexts(offline: Metamq) -> None:
    offline("context", "add", "one", "--zookeeper", "one:1")
    assert stat.S_IMODE(contexts_file().stat().st_mode) == 0o600


def test_a_broker_does_not_join_the_cluster_of_the_context_in_use(offline: Metamq, tmp_path: Path) -> None:
    offline("context", "add", "away", "--zookeeper", "http://away")
    offline("context", "use", "away")
    assert "http://away" in offline("topic", "list").talk
    assert "http://away" in offline("broker", "--data", tmp_path, "--port", 0, "--context", "away").talk
    assert "http://away" not in offline("broker", "--data", tmp_path, "--port", 0, "--root", "wrong").talk


def test_a_broker_takes_its_settings_from_the_file_of_its_context(offline: Metamq, tmp_path: Path) -> None:
    (tmp_path / "prod.toml").write_text('zookeeper = "127.0.0.1:1"\n[broker]\nport = "many"\n')
    offline("context", "add", "prod", "--config", tmp_path / "prod.toml")
    ended = offline("broker", "--data", tmp_path / "data", "--context", "prod")
    assert ended.status == 1
    assert f"port in [broker] of {tmp_path / 'prod.toml'} must be a whole number, not 'many'" in ended.talk


def test_the_choice_is_shown_with_the_fields_words(offline: Metamq) -> None:
    shown = offline("context", "show", "--zookeeper", "127.0.0.1:1").text
    assert [line.split("  ")[0] for line in shown.splitlines()[1:]] == [
        "Context", "Chosen by", "ZooKeeper", "Root", "Settings file", "TLS", "Contexts in",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["context", "use", "pord"], "there is no context 'pord' (metamq context use) Did you mean 'prod'?"),
        (["topic", "list", "--context", "x"], "there is no context 'x' (--context) There are: prod."),
        (["context", "remove", "x"], "there is no context 'x' (metamq context remove)"),
        (["context", "add", "x"], "the context names no cluster Give --zookeeper, or --config"),
        (["context", "add", "x", "--zookeeper", "a:1", "--config", "no.toml"], "cannot read the configuration file"),
    ],
)
def test_what_is_wrong_is_named(offline: Metamq, arguments: list[str], words: str) -> None:
    offline("context", "add", "prod", "--zookeeper", "zk:1")
    ended = offline(*arguments)
    assert (ended.status, ended.data) == (1, b"")
    assert words in " ".join(ended.talk.split())


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "current = 1",
        "contexts = 1",
        "[contexts]\na = 1",
        '[contexts.a]\npassword = "x"',
        "[contexts.a]\nroot = 1",
        '[contexts."eu.prod"]\nzookeeper = "a:1"',
    ],
)
def test_a_damaged_file_is_named(offline: Metamq, text: str) -> None:
    contexts_file().parent.mkdir(parents=True)
    contexts_file().write_text(text)
    ended = offline("topic", "list")
    assert ended.status == 1
    assert f"{contexts_file()} has no contexts: " in ended.talk


def test_names(offline: Metamq) -> None:
    ended = offline("context", "add", "a.b", "--zookeeper", "a:1")
    assert (ended.status, "is not a name for a context" in ended.talk) == (2, True)
    assert offline("context", "use").status == 2


def test_a_context_does_not_take_the_settings_file_of_the_variable(
    offline: Metamq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have the certificates and the user of another cluster."""
    offline("context", "add", "test", "--zookeeper", "test:1")
    file = tmp_path / "prod.toml"
    file.write_text('[security]\nca = "prod-ca.crt"\n')
    monkeypatch.setenv("METAMQ_CONFIG", str(file))
    found = offline("context", "show", "--context", "test", "-o", "json").json
    assert (found["config"], found["tls"]) == (None, False)


def test_any_path_is_written_so_that_it_can_be_read(offline: Metamq, tmp_path: Path) -> None:
    file = tmp_path / "\N{GRINNING FACE}é.toml"
    file.write_text('root = "/x"\n')
    assert offline("context", "add", "odd", "--zookeeper", "a:1", "--config", str(file)).status == 0
    assert offline("context", "show", "--context", "odd", "-o", "json").json["config"] == str(file)
