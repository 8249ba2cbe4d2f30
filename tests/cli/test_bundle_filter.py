"""The texts and settings of `metamq bundle`: secrets are removed from them, in each form and place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from metamq.cli.support.parcel import Parcel
from metamq.cli.support.redaction import REMOVED, Redaction
from metamq.cli.support.settings_part import NO_FILE, NO_SETTING, settings_document, shown_variables

SEED = "s3cr3t-Xq9"
KEY = f"-----BEGIN PRIVATE KEY-----\nMC4CAQ{SEED}\n-----END PRIVATE KEY-----"


@pytest.fixture
def secrets() -> Redaction:
    return Redaction()


@pytest.fixture
def parcel() -> Parcel:
    return Parcel("part")


@pytest.mark.parametrize(
    "text",
    [
        f"password: {SEED}",
        f"password={SEED}",
        f"the PASSWORD = '{SEED} and more'",
        f'{{"sasl.password": "{SEED}"}}',
        f"--password {SEED}",
        f"--client-secret={SEED}",
        f"api_key: {SEED}, next",
        f"password=abc,{SEED}",
        f"pw={SEED}",
        f"postgresql://ann:p@{SEED}@db:5432/shop",
        f"Authorization: {SEED}",
        f"Bearer {SEED}.abc",
        f"postgresql://ann:{SEED}@db:5432/shop",
        f"https://{SEED}@example.org/",
        f"eyJhbGciOiJ.{SEED}.abc",
        KEY,
        KEY.partition("-----END")[0],
        f"1.2.3.4:5 is refused as the user '{SEED}': no such user",
        f'1.2.3.4:5 is refused as the user "it\'s {SEED}": no such user',
        f"the list of users in ZooKeeper (/meta/security/users) is damaged: ValueError: '{SEED}' is not an object",
        f"the plan of group 'g' in ZooKeeper is damaged: \"it's {SEED}\" is not a number",
        f"topic 'orders': cleanup is '{SEED}'",
        f"the defaults of new topics in ZooKeeper (/meta/config/topic-defaults): '{SEED}' is no setting of topics",
        f"topic 'orders': flush.ms is {{'a': [\"{SEED}'s\"]}}",
        f"the configuration of topic 'orders' has format '{SEED}', this metamq reads 1",
        f"the cluster's node in ZooKeeper is damaged: b'{SEED}' is not the id of a cluster",
    ],
)
def test_forms_of_secrets_are_removed(secrets: Redaction, text: str) -> None:
    for found in (secrets.text(text), secrets.document([text]), secrets.document({text: 1}), secrets.line({"a": text})):
        assert SEED not in found
        assert REMOVED in found
    for once in (secrets.text(text), secrets.line({"a": text, "b": "c"})):
        assert secrets.text(once) == once, "a line of JSON stays one"


@pytest.mark.parametrize(
    "text",
    [
        "password_file = /etc/metamq/password",
        "3 tokens, 17 secrets",
        "http://broker-0:8120/metrics",
        'metamq_delays_total{principal="etl"} 5.0',
        "the master node of broker 0 in ZooKeeper is here",
        "a basic check, Basic log",
        "topic 'orders': retention_ms is -5",
    ],
)
def test_other_texts_stay(secrets: Redaction, text: str) -> None:
    assert secrets.text(text) == text


def test_known_secrets_are_removed_in_each_form(secrets: Redaction, tmp_path: Path) -> None:
    odd = "a\"b\\c\u00e9'd/e"
    (tmp_path / "key").write_text(KEY)
    secrets.hide([odd, "  ", "abc"])
    secrets.hide_file(tmp_path / "key")
    secrets.hide_file(tmp_path / "missing")
    for form in (odd, json.dumps(odd), json.dumps(odd, ensure_ascii=False), repr(odd), "a%22b%5Cc%C3%A9%27d%2Fe"):
        assert REMOVED in secrets.text(f"x {form} y"), form
        assert "\u00e9" not in secrets.text(form)
    assert SEED not in secrets.text(f"MC4CAQ{SEED}")
    assert secrets.text("abc -----BEGIN PRIVATE") == "abc -----BEGIN PRIVATE", "too short, and the same in each key"
    assert json.loads(secrets.document({"a": odd, "password": "plain", "token": 5})) == {
        "a": REMOVED, "password": REMOVED, "token": 5,
    }  # fmt: skip


SETTINGS = f"""\
zookeeper = "zk1:2181"
pasword = "{SEED}-1"

[broker]
id = 3
secret = "{SEED}-2"

[security]
user = "etl"
password_file = "{SEED}-3"
key = "KEY"
dir = "FOLDER"

[security.more]
deep = ["{SEED}-4"]

[login]
name = "{SEED}-5"
"""


def test_only_settings_are_shown(secrets: Redaction, parcel: Parcel, tmp_path: Path) -> None:
    (tmp_path / "own.key").write_text(f"{SEED}-6\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "admin.key").write_text(f"{SEED}-7\n")
    file = tmp_path / "metamq.toml"
    file.write_text(SETTINGS.replace("KEY", "own.key").replace("FOLDER", "folder"))
    found = settings_document(str(file), parcel, secrets, str(tmp_path))
    assert found is not None
    assert found["settings"] == {
        "zookeeper": "zk1:2181",
        "pasword": NO_SETTING,
        "broker": {"id": 3, "secret": NO_SETTING},
        "security": {
            "user": "etl", "password_file": NO_FILE, "key": "own.key", "dir": "folder", "more": NO_SETTING,
        },
        "login": NO_SETTING,
    }  # fmt: skip
    for number in range(1, 8):
        assert SEED not in secrets.text(f"x{SEED}-{number}x"), "the filter knows them"
    assert parcel.problems == []


def test_a_file_that_is_not_toml_is_not_quoted(secrets: Redaction, parcel: Parcel, tmp_path: Path) -> None:
    file = tmp_path / "metamq.toml"
    file.write_text(f"password {SEED}")
    assert settings_document(str(file), parcel, secrets) is None
    assert settings_document(str(tmp_path / "missing.toml"), parcel, secrets) is None
    assert parcel.problems[0] == f"the settings file {file}: it is not TOML"
    assert "No such file" in parcel.problems[1]


def test_only_variables_that_are_settings_are_shown(secrets: Redaction) -> None:
    given = {
        "METAMQ_ZOOKEEPER": "zk1:2181",
        "METAMQ_BROKER_ID": "3",
        "METAMQ_SECURITY_PASSWORD_FILE": f"{SEED}-1",
        "METAMQ_PASSWORD": f"{SEED}-2",
        "METAMQ_ODD": f"{SEED}-3",
        "PGPASSWORD": f"{SEED}-4",
        "AWS_SECRET_ACCESS_KEY": f"{SEED}-5",
        "HOME": "/somewhere",
    }
    assert shown_variables(given, secrets) == {
        "METAMQ_BROKER_ID": "3",
        "METAMQ_ODD": NO_SETTING,
        "METAMQ_PASSWORD": NO_SETTING,
        "METAMQ_SECURITY_PASSWORD_FILE": NO_FILE,
        "METAMQ_ZOOKEEPER": "zk1:2181",
    }
    for number in range(1, 6):
        assert SEED not in secrets.text(f"{SEED}-{number}")
