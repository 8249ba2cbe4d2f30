"""One way to call the blocking and the asyncio XAResource, so that a test tries both."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import metamq.tx
import metamq.tx.aio
from metamq.errors import RolledBack

T = TypeVar("T")
FACES = ["blocking", "asyncio"]


class AsyncRunner:
    """An asyncio client that is called as if it blocked: each call is run in a loop of its own thread's."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._runner = asyncio.Runner()
        self.client = make()
        self._runner.run(self.client.open())

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.client, name)
        if not inspect.iscoroutinefunction(method):
            return method

        def run(*arguments: Any, **named: Any) -> Any:
            return self._runner.run(method(*arguments, **named))

        return run

    def close(self) -> None:
        self._runner.run(self.client.close())
        self._runner.close()


def resource(face: str, zookeeper: str, **settings: Any) -> Any:
    """An open XAResource."""
    if face == "blocking":
        return metamq.tx.XAResource(0, zookeeper, **settings)
    return AsyncRunner(lambda: metamq.tx.aio.XAResource(0, zookeeper, **settings))


def in_time(mq: Any, work: Callable[[], T]) -> T:
    """What the work makes within a time-out that is as short as this machine lets it be. Later branches have it too."""
    for timeout_s in (0.2, 1, 5, 25):
        mq.set_timeout(timeout_s)
        with contextlib.suppress(RolledBack):
            return work()
    raise AssertionError("it is rolled back before it is done, whatever the time-out")


def same_rm(one: Any, other: Any) -> bool:
    """is_same_rm() of either face."""
    return bool(getattr(one, "client", one).is_same_rm(getattr(other, "client", other)))
