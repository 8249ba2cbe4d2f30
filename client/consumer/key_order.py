"""`run(listener, order="key")`: the messages of a partition are processed side by side, in order within each key.

One thread, or task, takes batches from the inbox and adds them to the windows of their partitions
(metamq.client.fetch.key_window). `concurrency` others process the messages that are free.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from metamq.client import telemetry
from metamq.client.background import at_once
from metamq.client.consumer.listener import ListenerPool, ListenerTasks
from metamq.client.fetch.key_window import KeyWindow
from metamq.client.handling.current import handling

if TYPE_CHECKING:
    from metamq.client.consumer.receivers import TaskReceiver, ThreadReceiver
    from metamq.client.fetch.inbox import PartitionState
    from metamq.client.fetch.message_batch import MessageBatch
    from metamq.client.model import Message
    from metamq.client.telemetry import Processing

SPAN_PER_HANDLER = 16
"""Messages of a partition for each handler, from the first unfinished one on. More would keep the handlers busier while
one message takes long, and a crash would repeat more."""

Free = tuple[KeyWindow, "Message[bytes]"]


@dataclass(eq=False)
class KeyWindows:
    """The windows of one `run()`. Thread-safe."""

    receiver: ThreadReceiver | TaskReceiver
    span: int
    put: Callable[[Free], None]
    """Gets each free message with its window."""
    group: str | None

    def __post_init__(self) -> None:
        self._inbox = self.receiver.inbox
        self._open: set[KeyWindow] = set()

    def __bool__(self) -> bool:
        return bool(self._open)

    def open(self, state: PartitionState, batch: MessageBatch[Any], may_deliver: Callable[[], bool]) -> KeyWindow:
        """Returns a new window for a partition."""
        window = KeyWindow(state, batch, may_deliver, lambda *free: self.put(free), self.span, self._report)
        self._open.add(window)
        return window

    def _report(self, batch: MessageBatch[Any]) -> Processing | None:
        return None if (reports := telemetry.current) is None else reports.taken(batch, self.group)

    def begin(self, window: KeyWindow, message: Message[bytes]) -> bool:
        """Returns True if the message may be processed; then end() must be called."""
        with self._inbox.lock:
            begun = window.begin(message)
            self._release_if_over(window)
            return begun

    def end(self, window: KeyWindow, message: Message[bytes], *, done: bool) -> Message[bytes] | None:
        """Notes the end of a message. Returns the next message of its key, which is free now."""
        with self._inbox.lock:
            try:
                return window.end(message, done=done)
            finally:
                if self._inbox.advance(window):
                    self.receiver.consumed()
                self._release_if_over(window)

    def stop(self) -> None:
        """Begins no further message. What is not done is delivered again."""
        with self._inbox.lock:
            for window in list(self._open):
                window.take_back(at_once=True)
                self._release_if_over(window)

    def _release_if_over(self, window: KeyWindow) -> None:
        # Under one lock with the check: otherwise a batch could be added between the two.
        if window.is_over and window in self._open:
            self.receiver.release(window, last_done=True)
            self._open.remove(window)


@dataclass(eq=False)
class KeyOrderPool(ListenerPool):
    """The threads of one `run(order="key")`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._free: queue.SimpleQueue[Free | None] = queue.SimpleQueue()
        self._windows = KeyWindows(
            self.receiver, SPAN_PER_HANDLER * self.concurrency, self._free.put, self.receiver.group
        )
        # Not the caller's thread: a Ctrl-C in the middle of a change would leave a window half changed.
        self._threads.append(threading.Thread(target=self._take, name="metamq-listener-take", daemon=True))

    def _take(self) -> None:
        try:
            while self.receiver.take_window(self._stop, self._windows.open) is not None or self._is_busy():
                pass
        except BaseException as error:
            self._error = self._error or error
            self._end()
        finally:
            self._ended.release()
            self._end_workers()

    def _is_busy(self) -> bool:
        return bool(self._windows) and not self.receiver.closed and not self._stop.is_set()

    def _end(self) -> None:
        super()._end()
        self._windows.stop()
        self._end_workers()

    def _end_workers(self) -> None:
        for _ in range(self.concurrency):
            self._free.put(None)  # behind the messages that are free: after stop() they are still processed

    def _work(self) -> None:
        try:
            while (free := self._free.get()) is not None:
                window, message = free
                following: Message[bytes] | None = message
                while following is not None and self._windows.begin(window, following):
                    following = self._process(window, following)
        except BaseException as error:
            self._error = self._error or error
            self._end()
        finally:
            self._ended.release()

    def _process(self, window: KeyWindow, message: Message[bytes]) -> Message[bytes] | None:
        done = False
        try:
            with handling(window.processing_of(message.offset)):
                done = at_once(self._handle_one(window, message))
        finally:
            following = self._windows.end(window, message, done=done)
        return following


@dataclass(eq=False)
class KeyOrderTasks(ListenerTasks):
    """The tasks of one `run(order="key")`."""

    async def run(self) -> None:
        """Runs until the consumer is closed or idle, or an error of a listener ends it."""
        free: asyncio.Queue[Free | None] = asyncio.Queue()
        windows = KeyWindows(self.receiver, SPAN_PER_HANDLER * self.concurrency, free.put_nowait, self.receiver.group)
        taking = asyncio.ensure_future(self._take_all(windows))
        handlers = [asyncio.ensure_future(self._work(windows, free)) for _ in range(self.concurrency)]
        try:
            ended, _ = await asyncio.wait([taking, *handlers], return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
            for _ in handlers:
                free.put_nowait(None)
            await asyncio.gather(*handlers)
        finally:
            windows.stop()
            for task in (taking, *handlers):
                task.cancel()
            await asyncio.gather(taking, *handlers, return_exceptions=True)
            if self.dead_letters is not None:
                await self.dead_letters.close()

    async def _take_all(self, windows: KeyWindows) -> None:
        while await self.receiver.take_window(windows.open) is not None or (windows and not self.receiver.closed):
            pass

    async def _work(self, windows: KeyWindows, free: asyncio.Queue[Free | None]) -> None:
        while (found := await free.get()) is not None:
            window, message = found
            following: Message[bytes] | None = message
            while following is not None and windows.begin(window, following):
                done = False
                try:
                    with handling(window.processing_of(following.offset)):
                        done = await self._handle_one(window, following)
                finally:
                    following = windows.end(window, following, done=done)
