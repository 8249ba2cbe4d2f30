"""The place of `metamq zookeeper` in an ensemble comes from options or from the environment."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Metamq, Outcome

SERVERS = "zk1,zk2,zk3"


def start(offline: Metamq, *arguments: str) -> Outcome:
    """Checks the place, and ends before it starts a server."""
    return offline("zookeeper", "--host", "0.0.0.0", "--fetch-jars", *arguments)


@pytest.mark.parametrize(
    ("servers", "number", "status"),
    [
        ("", "1", 0),
        ("", None, 0),
        (SERVERS, "1", 0),
        (SERVERS, "3", 0),
        ("", "2", 1),
        (SERVERS, None, 1),
        (SERVERS, "4", 1),
    ],
)
@pytest.mark.parametrize("by", ["option", "environment"])
def test_where_the_place_comes_from(
    offline: Metamq, monkeypatch: pytest.MonkeyPatch, by: str, servers: str, number: str | None, status: int
) -> None:
    given = {"ensemble": servers} if number is None else {"ensemble": servers, "id": number}
    options = [part for name, value in given.items() for part in (f"--{name}", value)] if by == "option" else []
    if by == "environment":
        for name, value in given.items():
            monkeypatch.setenv(f"METAMQ_ZOOKEEPER_{name.upper()}", value)
    ended = start(offline, *options)
    assert ended.status == status
    assert ("--ensemble" in ended.talk or "not in the ensemble" in ended.talk) == bool(status)
