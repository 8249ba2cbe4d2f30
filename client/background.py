"""The background loop of the blocking API: one asyncio loop in one thread per process, started on first use.

A fork copies the client objects but not the thread: see metamq.client.forks. New clients in the child start a loop of
their own.

The loop stops at the end of the process, after all code that may still need it: uvloop must not call back into Python
while Python shuts down. Coroutines that the main thread runs later still work, in the main thread.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from metamq.errors import ConfigError, closed_client
from metamq.threads import start

T = TypeVar("T")

STOP_S = 2.0
"""Seconds for which the end of the process waits for a callback that does not return."""


class BackgroundLoop:
    """A running loop in a daemon thread."""

    def __init__(self) -> None:
        self.loop = _new_loop()
        self._stopped_by: threading.Thread | None = None
        """The thread that stopped the loop. Its later calls run the loop in it; calls of daemon threads wait until the
        process ends."""
        self._thread = threading.Thread(target=self._run, name="metamq", daemon=True)
        start(self._thread)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def stop(self) -> None:
        """Stops the loop and joins the thread. The loop's own thread must not call it."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(STOP_S)
        if not self._thread.is_alive():
            self._stopped_by = threading.current_thread()

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        """Runs `callback(*args)` in the loop. Returns at once. Thread-safe."""
        self.loop.call_soon_threadsafe(callback, *args)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the loop and waits for its result. Thread-safe.

        Ctrl-C ends the wait at once and cancels the coroutine. Raises ConfigError in the loop's own thread (in a
        delivery's callback, for example), where the wait would never end. Raises ClosedError if the client is closed
        during the call.
        """
        caller = threading.current_thread()
        if caller is self._thread:
            coroutine.close()
            raise ConfigError(
                "the call waits, but a delivery's callback must not wait: it runs in the loop that the call waits for",
                hint="Call it in another thread, or use metamq.aio.",
            )
        if caller is self._stopped_by:
            return self.loop.run_until_complete(coroutine)
        call = _Call(coroutine, self.loop)
        self.loop.call_soon_threadsafe(call.begin)
        try:
            call.ended.acquire()
        except BaseException:
            self.loop.call_soon_threadsafe(call.cancel)
            raise
        try:
            return call.result()
        except asyncio.CancelledError:  # close() in another thread cancelled the work that the coroutine waited for
            closed = closed_client("client", "by another thread, while this call waited for an answer")
            raise closed.with_unknown_outcome() from None


class _Call(Generic[T]):
    """A coroutine that a thread waits for. asyncio.run_coroutine_threadsafe() does the same at twice the cost."""

    __slots__ = ("_coroutine", "_loop", "_task", "ended")

    def __init__(self, coroutine: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> None:
        self._coroutine = coroutine
        self._loop = loop
        self._task: asyncio.Task[T] | None = None
        self.ended = threading.Lock()
        """A lock that is free once there is a result."""
        self.ended.acquire()

    def begin(self) -> None:
        """Starts the coroutine. Runs in the loop, like cancel()."""
        self._task = self._loop.create_task(self._coroutine)
        self._task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # the waiting thread may be gone: asyncio must not warn about an error that is not fetched
        self.ended.release()

    def cancel(self) -> None:
        """Cancels the coroutine: the thread does not wait for it any more."""
        assert self._task is not None
        self._task.cancel()

    def result(self) -> T:
        """Returns the result, or raises the error, of the ended coroutine."""
        assert self._task is not None
        return self._task.result()


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # Windows
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


_lock = threading.Lock()
_current: BackgroundLoop | None = None


def background() -> BackgroundLoop:
    """Returns this process's background loop. Starts it on the first call. Thread-safe."""
    global _current
    with _lock:
        if _current is None:
            _current = BackgroundLoop()
        return _current


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine that never waits, in this thread, without a loop."""
    try:
        work.send(None)
    except StopIteration as ended:
        result: T = ended.value
        return result
    work.close()
    raise AssertionError("the coroutine waits for a loop")


@atexit.register
def _stop_at_exit() -> None:
    """Runs after the handlers that were registered later, for example by the modules that import this one."""
    if _current is not None:
        _current.stop()


def _after_fork_in_child() -> None:
    global _current, _lock
    _lock = threading.Lock()
    _current = None


os.register_at_fork(after_in_child=_after_fork_in_child)
