"""The sink in a driver or a task that comes to a named point of a batch and no further.

written         a task has prepared all it wrote, and its message is not with the driver
prepared        the driver has all messages, and has decided nothing
decided         the decision is recorded, and nothing of it is committed
one committed   one branch is committed, and others are not
committed       all are, and Spark has not noted that the batch is over
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from metamq.client.net.branches import TxClient
from metamq.spark_consumers.data_source import DefaultSource
from metamq.spark_consumers.sink.decision_store import DecisionStore
from metamq.spark_consumers.sink.exact_sink import BATCH_PROPERTY, ExactStreamWriter
from metamq.wire.xa import Verb

POINTS = ("written", "prepared", "decided", "one committed", "committed")
HELD_S = 600.0


class DyingSource(DefaultSource):
    """Options: `point`; `batch`, the number of the batch; `mark`, a file that is there once the point is reached; with
    `worker` = "dies" the Python worker ends there, and Spark goes on, else it stands still until it is killed."""

    @classmethod
    def name(cls) -> str:
        return "dying"

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:
        own = {name: self.options.pop(name, "") for name in ("point", "batch", "mark", "worker")}
        whole = super().streamWriter(schema, overwrite)
        assert type(whole) is ExactStreamWriter
        whole.__class__ = DyingWriter  # as whatever it has is its own affair
        whole.__dict__["dying"] = own
        return whole


class DyingWriter(ExactStreamWriter):
    dying: dict[str, str]

    def write(self, iterator: Iterator[Any]) -> Any:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        message = super().write(iterator)
        self._at("written", int(context.getLocalProperty(BATCH_PROPERTY) or -1))
        return message

    def commit(self, messages: Sequence[Any], batchId: int) -> None:
        self._at("prepared", batchId)
        decide, ask, commits = DecisionStore.decide, TxClient.ask, 0

        async def deciding(*arguments: Any, **named: Any) -> Any:
            standing = await decide(*arguments, **named)
            self._at("decided", batchId)
            return standing

        async def asking(client: Any, branch: Any, verbs: Any, *arguments: Any, **named: Any) -> Any:
            nonlocal commits
            commits += verbs[-1] is Verb.COMMIT
            if commits == 2:
                self._at("one committed", batchId)
            return await ask(client, branch, verbs, *arguments, **named)

        with patch.object(DecisionStore, "decide", deciding), patch.object(TxClient, "ask", asking):
            super().commit(messages, batchId)
        self._at("committed", batchId)

    def abort(self, messages: Sequence[Any], batchId: int) -> None:
        """Not this driver's any more."""
        os._exit(1)

    def _at(self, point: str, batch_id: int) -> None:
        if (point, str(batch_id)) != (self.dying["point"], self.dying["batch"]):
            return
        Path(self.dying["mark"]).touch()
        if self.dying["worker"] == "dies":
            os._exit(1)
        time.sleep(HELD_S)
