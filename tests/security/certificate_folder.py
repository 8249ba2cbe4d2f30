"""Folders with an authority and certificates, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from metamq import SecurityConfig
from metamq.security.certificates import Authority, make_all
from metamq.security.config import ADMIN

HOSTS = ("localhost", "127.0.0.1")


def make_folder(folder: Path, hosts: Sequence[str] = HOSTS) -> Authority:
    """As `metamq security init`."""
    make_all(folder, hosts)
    return Authority(folder)


def secured(folder: Path, *, zookeeper_tls: bool = True) -> SecurityConfig:
    """The settings of brokers, and of clients with the administrator's certificate."""
    return SecurityConfig(dir=str(folder), role=ADMIN, zookeeper_tls=zookeeper_tls)


def in_days(days: int) -> datetime:
    return datetime.now(UTC) + timedelta(days=days)


def client_of(folder: Path, name: str = "") -> SecurityConfig:
    """The settings of a client, with the certificate `name` or without one."""
    own = (str(folder / f"{name}.crt"), str(folder / f"{name}.key")) if name else ("", "")
    return SecurityConfig(ca=str(folder / "ca.crt"), certificate=own[0], key=own[1])
