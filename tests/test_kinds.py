"""The marks pure and parts: set by what a test refers to, and checked while it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests import kinds, one_zookeeper, parts, postgres
from tests.kinds import reaches_starter


def helper() -> Any:
    return one_zookeeper.cluster()


def through_a_helper() -> None:
    helper()


def through_a_closure(then: Callable[[], object] = helper) -> Callable[[], object]:
    made = functools.partial(helper)
    return lambda: [made, then]


def by_an_import_inside() -> None:
    import subprocess  # noqa: F401


class Holder:
    @property
    def running(self) -> Any:
        return postgres.running_postgres()


@pytest.mark.parametrize("start", [helper, through_a_helper, through_a_closure, by_an_import_inside, Holder])
def test_what_starts_processes_is_found(start: Callable[..., object]) -> None:
    assert reaches_starter(start)


@pytest.mark.parametrize("start", [parts.wait_until, parts.LocalBroker, kinds.reaches_starter])
def test_what_starts_none_is_pure(start: Callable[..., object]) -> None:
    assert not reaches_starter(start)


def test_a_pure_test_that_starts_a_process_is_told(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds, "_started", [])
    monkeypatch.setattr(kinds, "_running", request.node)
    kinds._notice("open", ())
    with pytest.raises(AssertionError, match=r"is marked pure by tests/kinds\.py, but starts a process: os\.fork"):
        kinds._notice("os.fork", ())
