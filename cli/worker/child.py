"""One process of `metamq worker --processes`: its limit of messages, and its reports to the supervisor."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from metamq.broker.process.channel import ChildEnd
from metamq.broker.workers.worker import READY, REFUSED
from metamq.client.handling.retry_policy import Rollback
from metamq.errors import ConfigError

if TYPE_CHECKING:
    from metamq.cli.worker.pages import ProgramPages

AS_PROCESS = "--as-process"
"""The option of the processes of --processes, with their number."""
SPENT_STATUS = 75
"""The exit status of such a process after its --max-messages."""


class Spent:
    """The limit of --max-messages, and True in `is_spent` once it is reached."""

    def __init__(self, calls_max: int | None) -> None:
        self.calls_max = calls_max
        self.is_spent = False
        self._calls = itertools.count(1)

    def counted(self, listener: Callable[[Any], Any], consumer: Any) -> Callable[[Any], Any]:
        """Returns a listener that stops the consumer with the last call. Those in progress are finished; a later one,
        which begins before the consumer has stopped, leaves its message to others."""
        assert self.calls_max is not None
        calls_max = self.calls_max

        def count_and_call(message: Any) -> Any:
            number = next(self._calls)
            if number == calls_max:
                self.is_spent = True
                consumer.stop()
            elif number > calls_max:
                raise Rollback
            return listener(message)

        return count_and_call


@contextmanager
def reporting(pages: ProgramPages) -> Iterator[Callable[[], None]]:
    """Surrounds the work of a process of the supervisor. Yields the function that reports that it has joined its group.

    The supervisor reads the report on standard output. So what the handler prints goes to standard error.
    """
    ChildEnd(sys.stdin.fileno()).publish(pages)
    report = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(key: str, content: object) -> None:
        os.write(report, f"{json.dumps({key: content})}\n".encode())

    try:
        yield lambda: say(READY, {"name": "", "host": "", "port": 0})
    except ConfigError as error:
        say(REFUSED, [error.problem, error.hint])
        raise SystemExit(1) from None
