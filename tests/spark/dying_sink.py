"""The sink in a driver that dies at a point of commit(): for Spark to see its worker gone, and its abort() not come."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from metamq.spark_consumers.committing import Committer
from metamq.spark_consumers.data_source import DefaultSource
from metamq.spark_consumers.exact_sink import ExactStreamWriter


class DyingSource(DefaultSource):
    """Option `dieAt`: "prepared", "decided" or "committed"; `mark`: a file that is there once it has died."""

    @classmethod
    def name(cls) -> str:
        return "dying"

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:
        point, mark = self.options.pop("dieAt"), self.options.pop("mark")
        whole = super().streamWriter(schema, overwrite)
        return DyingWriter(whole, point, mark)


class DyingWriter(ExactStreamWriter):
    def __init__(self, whole: ExactStreamWriter, point: str, mark: str) -> None:
        super().__init__(whole._options, whole._checkpoint)
        self._point = point
        self._mark = mark

    def commit(self, messages: Sequence[Any], batchId: int) -> None:
        if self._point == "prepared":
            self._die()
        if self._point == "decided":

            async def dying(*_arguments: object) -> None:
                self._die()

            Committer.finish = dying  # type: ignore[assignment,method-assign]
        super().commit(messages, batchId)
        self._die()

    def abort(self, messages: Sequence[Any], batchId: int) -> None:
        self._die()

    def _die(self) -> None:
        Path(self._mark).touch()
        os._exit(1)
