"""A worker at work: it calls the handler with each message until a signal comes.

The first signal ends it after the messages in progress: they are committed, and the worker leaves its group. Before
there is a consumer it ends at once. The second signal does not wait: the messages in progress are not done.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from metamq.cli.processes import Stopped
from metamq.errors import ClosedError, ConfigError
from metamq.words import count

if TYPE_CHECKING:
    from metamq.cli.show.two_signals import TwoSignals
    from metamq.cli.worker.child import Spent
    from metamq.cli.worker.pages import ProgramPages
    from metamq.cli.worker.program import Program
    from metamq.client.consumer.consumer_api import ConsumerApi

log = logging.getLogger("metamq.cli")

_CONTEXT_HINT = "Write @contextmanager above it, or @asynccontextmanager for an `async` one, and one `yield` in it."


def stop_at_once() -> None:
    """Ends a worker that has no consumer yet."""
    raise Stopped


def _do_nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class HandlerRun:
    """A program, with the arguments of its Consumer and those of `run()`."""

    program: Program
    consumer: dict[str, Any]
    run: dict[str, Any]
    signals: TwoSignals
    pages: ProgramPages
    ready: Callable[[], None]
    spent: Spent

    def work(self) -> None:
        """Runs until a signal, the consumer's idle time-out, or an error. Raises Stopped after an early signal,
        KeyboardInterrupt after the second one, and the errors of the program and of the consumer."""
        try:
            asyncio.run(self._in_tasks()) if self.program.is_async else self._in_threads()
        except (asyncio.CancelledError, SystemExit) as error:
            places = getattr(error, "__notes__", [])
            if isinstance(error, SystemExit):
                if not places:
                    raise
            elif self.signals.asked:
                raise Stopped from None
            raise _ending_error(error, places) from error

    def _in_threads(self) -> None:
        from metamq import Consumer

        with ExitStack() as stack:
            entered = self._lifespan()
            if entered is not None:
                if not hasattr(entered, "__enter__"):
                    hint = "Make both functions `async`, or neither."
                    raise ConfigError("the lifespan is for asyncio, and the handler is a plain function", hint=hint)
                stack.enter_context(entered)
            consumer: Consumer[Any] = stack.enter_context(Consumer(**self.consumer))
            self._opened(consumer, consumer.stop)
            try:
                consumer.run(self._listener(consumer, partial(_stop_if_open, consumer)), **self.run)
            finally:
                self._ended()

    async def _in_tasks(self) -> None:
        from metamq.client.consumer.aio_consumer import Consumer

        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self.signals.stop = lambda: loop.call_soon_threadsafe(task.cancel)
        async with AsyncExitStack() as stack:
            entered = self._lifespan()
            if hasattr(entered, "__aenter__"):
                await stack.enter_async_context(entered)
            elif entered is not None:
                stack.enter_context(entered)
            consumer: Consumer[Any] = await stack.enter_async_context(Consumer(**self.consumer))

            def stop() -> None:
                loop.call_soon_threadsafe(_stop_if_open, consumer)

            self._opened(consumer, stop)
            try:
                await consumer.run(self._listener(consumer, stop), **self.run)
            finally:
                self._ended()

    def _lifespan(self) -> Any:
        """Returns the context manager of the program, or None. Raises ConfigError."""
        if self.program.lifespan is None:
            return None
        entered = self.program.lifespan()
        if not hasattr(entered, "__aenter__") and not hasattr(entered, "__enter__"):
            if isinstance(entered, Coroutine):
                entered.close()  # avoids a warning of Python in addition to the error
            raise ConfigError("the lifespan returns no context manager", hint=_CONTEXT_HINT)
        return entered

    def _listener(self, consumer: ConsumerApi[Any], stop: Callable[[], object]) -> Callable[[Any], Any]:
        handler = self.program.handler
        listener = (lambda message: handler(message, consumer)) if self.program.takes_consumer else handler
        return listener if self.spent.messages_max is None else self.spent.counted(listener, consumer, stop)

    def _opened(self, consumer: ConsumerApi[Any], stop: Callable[[], object]) -> None:
        def note_and_stop() -> None:
            self.pages.ends()
            # A handler of signals must not write to a stream: it may have interrupted another write to it.
            threading.Thread(target=_log_stopping, args=(consumer,), name="metamq-worker-stops").start()
            stop()

        self.signals.stop = note_and_stop
        self.pages.reads(consumer)
        self.ready()

    def _ended(self) -> None:
        self.signals.stop = _do_nothing
        self.pages.ends()


def _ending_error(error: BaseException, places: list[str]) -> ConfigError:
    """Returns the error for a handler that raised what ends a program, at the place of its message."""
    hint = "Catch it where the handler awaits a task that others cancel."
    if isinstance(error, SystemExit):
        hint = "Raise an Exception: then the message is tried again, and given up after the last attempt."
    place = f"{places[0]}: " if places else ""
    return ConfigError(f"{place}the handler raised {type(error).__name__}, which ends the worker", hint=hint)


def _log_stopping(consumer: ConsumerApi[Any]) -> None:
    running = sum(len(one.running) for one in consumer.health().partitions.values())
    log.info("stopping: %s in progress", count(running, "message"))


def _stop_if_open(consumer: Any) -> None:
    with contextlib.suppress(ClosedError):  # run() has ended meanwhile
        consumer.stop()
