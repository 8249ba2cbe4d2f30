"""A listener that knows how far each streaming query is behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from pyspark.sql.streaming import StreamingQueryListener

from metamq.spark_consumers.driver.lag import QueryLag, messages_behind


class LagListener(StreamingQueryListener):
    """Keeps the lag of each running query that reads metamq, as of its last batch.

        lag = LagListener(on_lag=lambda query: print(query.name, query.messages))
        spark.streams.addListener(lag)
        lag.queries()

    Where the logs end is what the source saw when it planned that batch: what came since does not count yet, nor what a
    bounded batch (`maxOffsetsPerTrigger`) left. `on_lag` is called after each batch, in a thread of Spark's.
    """

    def __init__(self, on_lag: Callable[[QueryLag], object] | None = None) -> None:
        self._on_lag = on_lag
        self._lock = threading.Lock()
        self._running: dict[str, QueryLag] = {}
        """By run id."""

    def queries(self) -> list[QueryLag]:
        """The lag of each query that runs and has had a batch."""
        with self._lock:
            return list(self._running.values())

    def onQueryStarted(self, event: Any) -> None:
        """Nothing is known yet."""

    def onQueryProgress(self, event: Any) -> None:
        """Notes a batch."""
        progress = event.progress
        behind = messages_behind((source.endOffset, source.latestOffset) for source in progress.sources)
        if not behind:
            return
        lag = QueryLag(str(progress.id), str(progress.runId), progress.name, progress.batchId, behind)
        with self._lock:
            self._running[lag.run_id] = lag
        if self._on_lag is not None:
            self._on_lag(lag)

    def onQueryIdle(self, event: Any) -> None:
        """It has read all that there is, or waits for `minOffsetsPerTrigger`."""

    def onQueryTerminated(self, event: Any) -> None:
        """Forgets the query."""
        with self._lock:
            self._running.pop(str(event.runId), None)
