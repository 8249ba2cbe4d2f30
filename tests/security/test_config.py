"""The settings of [security]: what belongs together, and where the files come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from metamq import SecurityConfig
from metamq.client.settings import security_config
from metamq.errors import ConfigError
from metamq.security.tls import FreshContext, broker_security, client_context, client_security
from tests.security.certificate_folder import client_of, make_folder


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"ca": "a", "key": "k"}, "`certificate` is missing"),
        ({"ca": "a", "certificate": "c"}, "`key` is missing"),
        ({"certificate": "c", "key": "k"}, "without the authority"),
        ({"role": "admin"}, "`role` needs `dir`"),
        ({"dir": "d", "role": "r", "certificate": "c", "key": "k"}, "name two certificates"),
        ({"revoked": "r"}, "`revoked` needs `ca`"),
        ({"ca": "a", "user": "u"}, "`password_file` is missing"),
    ],
)
def test_what_belongs_together(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        SecurityConfig(**settings)


def test_the_environment_and_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metamq.toml").write_text('[security]\nca = "from-file"\nrevoked = "r"\n')
    assert security_config(None) == SecurityConfig()
    assert security_config(None, str(tmp_path / "metamq.toml")) == SecurityConfig(ca="from-file", revoked="r")
    monkeypatch.setenv("METAMQ_SECURITY_CA", "from-environment")
    assert security_config(None, str(tmp_path / "metamq.toml")).ca == "from-environment"
    assert security_config(SecurityConfig(ca="given")).ca == "given"
    with pytest.raises(TypeError, match=r"`security` must be a metamq\.SecurityConfig"):
        security_config(cast("Any", "ca.crt"))
    monkeypatch.setenv("METAMQ_SECURITY_CERTIFICAT", "x")
    with pytest.raises(ConfigError, match="METAMQ_SECURITY_CERTIFICATE"):
        security_config(None)


def test_a_folder_has_the_files_of_each_role(tmp_path: Path) -> None:
    files = SecurityConfig(dir="/s", role="admin").files()
    assert (files.ca, files.certificate, files.key) == ("/s/ca.crt", "/s/admin.crt", "/s/admin.key")
    assert SecurityConfig(dir="/s").files().certificate == ""
    assert SecurityConfig(dir="/s", ca="/other").files("brokers").ca == "/other"


def test_without_files_there_is_no_tls() -> None:
    assert client_security(SecurityConfig()) == (None, None, False)
    assert broker_security(SecurityConfig()) is None


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    make_folder(tmp_path)
    with pytest.raises(ConfigError, match=r"the certificate of the authority, /none, cannot be read: No such file"):
        client_security(SecurityConfig(ca="/none"))
    (tmp_path / "brokers.key").write_bytes((tmp_path / "admin.key").read_bytes())
    with pytest.raises(ConfigError, match=r"brokers\.crt, cannot be used: key values mismatch"):
        broker_security(SecurityConfig(dir=str(tmp_path)))
    with pytest.raises(ConfigError, match="the broker has no certificate"):
        broker_security(client_of(tmp_path))


def test_new_files_are_used_and_broken_ones_are_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = make_folder(tmp_path)
    fresh = FreshContext(client_of(tmp_path, "admin").files(), client_context)
    first = fresh.current()
    assert fresh.current() is first
    authority.issue("admin")
    second = fresh.current()
    assert second is not first
    (tmp_path / "admin.key").write_bytes(b"half of a k")
    for _ in range(3):
        assert fresh.current() is second
    assert caplog.text.count("new connections still use the former certificates") == 1
    authority.issue("admin")
    assert fresh.current() is not second


def test_nothing_of_a_key_is_shown(tmp_path: Path) -> None:
    make_folder(tmp_path)
    security = client_of(tmp_path, "admin")
    secret = (tmp_path / "admin.key").read_text().splitlines()[1]
    assert secret not in repr(security) + repr(FreshContext(security.files(), client_context))


def test_a_broker_needs_the_certificate_of_the_brokers(tmp_path: Path) -> None:
    make_folder(tmp_path / "security").issue("one")
    with pytest.raises(ConfigError, match="is of 'one', not of 'brokers'"):
        broker_security(client_of(tmp_path / "security", "one"))
