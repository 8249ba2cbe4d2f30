"""The blocking DeadLetterQueue."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Self

from metamq.client.background import background
from metamq.tx.app import aio_dead_letters
from metamq.tx.app.aio_dead_letters import DeadLetter, LetterFilter, LetterSummary

if TYPE_CHECKING:
    from types import TracebackType

    from metamq.security.config import SecurityConfig

ALL = LetterFilter()


class DeadLetterQueue:
    __doc__ = aio_dead_letters.DeadLetterQueue.__doc__

    def __init__(
        self,
        group: str,
        zookeeper: str | None = None,
        *,
        root: str | None = None,
        config: str | None = None,
        security: SecurityConfig | None = None,
    ) -> None:
        self._background = background()
        self._queue = aio_dead_letters.DeadLetterQueue(group, zookeeper, root=root, config=config, security=security)
        self._background.run(self._queue.open())

    def summary(self) -> LetterSummary:
        """Returns a summary of the letters that are not settled."""
        return self._background.run(self._queue.summary())

    def letters(self, selected: LetterFilter = ALL) -> Iterator[DeadLetter]:
        """Yields the letters that are not settled, up to the present end of the topic."""
        found = self._queue.letters(selected)
        try:
            while (letter := self._background.run(anext(found, None))) is not None:
                yield letter
        finally:
            with contextlib.suppress(RuntimeError):  # after Ctrl-C it ends by itself
                self._background.run(found.aclose())

    def resend(
        self,
        selected: LetterFilter = ALL,
        *,
        to: str | None = None,
        progress: Callable[[int], None] = lambda count: None,
    ) -> int:
        """See metamq.aio.DeadLetterQueue.resend. After Ctrl-C, repeat it: the next call ends an open transaction."""
        return self._background.run(self._queue.resend(selected, to=to, progress=progress))

    def purge(self, selected: LetterFilter = ALL) -> int:
        """Settles letters without sending them, and returns their number. Retention deletes them from the topic."""
        return self._background.run(self._queue.purge(selected))

    def close(self) -> None:
        """Disconnects."""
        self._background.run(self._queue.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
