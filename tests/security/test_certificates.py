"""The authority: what it makes, renews and revokes, and which files others may read."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from metamq.errors import ConfigError
from metamq.security.certificates import Authority
from metamq.security.names import check_name
from tests.security.certificate_folder import HOSTS, in_days, make_folder


def test_what_it_makes_is_listed_and_keys_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "security"
    authority = make_folder(folder)
    found = {one.name: one for one in authority.certificates()}
    assert {name: one.hosts for name, one in found.items()} == {"admin": (), "brokers": HOSTS, "zookeeper": HOSTS}
    assert {one.days_left(in_days(0)) for one in found.values()} == {364}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not list((folder / "issued").glob("*.key"))
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.glob("*.key")} == {0o600}
    assert not list(folder.glob(".*"))


def test_an_authority_is_never_replaced(tmp_path: Path) -> None:
    make_folder(tmp_path / "one")
    before = (tmp_path / "one" / "ca.key").read_bytes()
    with pytest.raises(ConfigError, match="has an authority already"):
        Authority.make(tmp_path / "one")
    assert (tmp_path / "one" / "ca.key").read_bytes() == before


def test_a_renewed_certificate_replaces_the_former_one(tmp_path: Path) -> None:
    authority = make_folder(tmp_path)
    before = {one.name: one for one in authority.certificates()}["brokers"]
    after = Authority(tmp_path).issue("brokers", HOSTS, days=900)
    assert (after.serial != before.serial, after.not_after > before.not_after) == (True, True)
    assert {one.name: one for one in authority.certificates()}["brokers"] == after


def test_revoked_ones_stay_revoked(tmp_path: Path) -> None:
    authority = make_folder(tmp_path)
    authority.issue("etl")
    former = authority.issue("etl")
    authority.issue("etl")
    assert former.serial in {one.serial for one in authority.revoke("etl")}, "a renewal does not hide a former one"
    assert all(one.is_revoked for one in authority.revoke("etl") + authority.revoke("admin"))
    assert {one.name for one in Authority(tmp_path).certificates() if one.is_revoked} == {"admin", "etl"}
    authority.issue("etl")
    assert {one.name for one in authority.certificates() if one.is_revoked} == {"admin"}


def test_no_certificate_outlives_its_authority(tmp_path: Path) -> None:
    authority = make_folder(tmp_path)
    assert authority.issue("late", days=3650, now=in_days(3000)).days_left(in_days(0)) < 3650


@pytest.mark.parametrize("name", ["", "ca", "../etl", "a b", "-x", "é", "a" * 65])
def test_names_that_cannot_be_files_or_rules_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be the name of a principal"):
        check_name(name)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no authority: .*ca\.crt is missing.*metamq security init"):
        Authority(tmp_path)
    authority = make_folder(tmp_path)
    with pytest.raises(ConfigError, match="has no certificate 'other'"):
        authority.revoke("other")
    (tmp_path / "ca.key").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"is damaged: .*Restore it from a copy"):
        Authority(tmp_path)
