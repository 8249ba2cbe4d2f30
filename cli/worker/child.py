"""One process of `metamq worker --processes`: its limit of messages, and its reports to the supervisor."""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from metamq.broker.process.channel import ChildEnd
from metamq.broker.workers.worker import READY, REFUSED
from metamq.client.handling.retry_policy import attempt, attempts_before
from metamq.errors import ConfigError

if TYPE_CHECKING:
    from metamq.cli.worker.pages import ProgramPages
    from metamq.client.consumer.consumer_api import ConsumerApi

PROCESS_VARIABLE = "METAMQ_WORKER_PROCESS"
"""The number of such a process. No option: the command line is that of the user, who may end its options with `--`."""
SPENT_STATUS, IDLE_STATUS = 75, 76
"""The exit statuses of such a process after its --max-messages, and after its --idle-timeout."""
CHECK_S = 0.05


class Spent:
    """The limit of --max-messages, and True in `is_spent` once it has stopped the consumer.

    A message that waits for its next attempt when the consumer stops begins with attempt 1 in the next process. So the
    consumer stops when the messages that were begun within the limit are done or given up. Those that are begun
    meanwhile are beyond the limit.
    """

    def __init__(self, messages_max: int | None) -> None:
        self.messages_max = messages_max
        self.is_spent = False
        self._begun = itertools.count(1)
        self._full_s = 0.0
        """The time at which the last message within the limit was begun."""

    def counted(
        self, listener: Callable[[Any], Any], consumer: ConsumerApi[Any], stop: Callable[[], object]
    ) -> Callable[[Any], Any]:
        """Returns a listener that counts messages. `stop` stops the consumer. Any thread."""
        assert self.messages_max is not None
        messages_max = self.messages_max

        def count_and_call(message: Any) -> Any:
            number = next(self._begun) if attempt() == 1 + attempts_before(message) else 0
            if number == messages_max:
                self._full_s = time.monotonic()
                threading.Thread(target=watch, name="metamq-worker-spent", daemon=True).start()
            elif number > messages_max:
                stop_if_over()
            return listener(message)

        def watch() -> None:
            while not self.is_spent:
                time.sleep(CHECK_S)
                stop_if_over()

        def stop_if_over() -> None:
            if not self.is_spent and not self._has_first(consumer):
                self.is_spent = True
                stop()

        return count_and_call

    def _has_first(self, consumer: ConsumerApi[Any]) -> bool:
        """Returns True while a message within the limit is in progress, or waits for its next attempt."""
        now_s = time.monotonic()
        running = [one for part in consumer.health().partitions.values() for one in part.running]
        return any(now_s - one.running_s <= self._full_s for one in running)


@contextmanager
def reporting(pages: ProgramPages) -> Iterator[Callable[[], None]]:
    """Surrounds the work of a process of the supervisor. Yields the function that reports that it has joined its group.

    The supervisor reads the report on standard output. So what the handler prints goes to standard error. A fork
    closes its copy of the report.
    """
    ChildEnd(sys.stdin.fileno()).publish(pages)
    report = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.register_at_fork(after_in_child=report.close)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(key: str, content: object) -> None:
        report.write(f"{json.dumps({key: content})}\n".encode())

    try:
        yield lambda: say(READY, {"name": "", "host": "", "port": 0})
    except ConfigError as error:
        say(REFUSED, [error.problem, error.hint])
        raise SystemExit(1) from None
