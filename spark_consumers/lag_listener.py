"""A listener that knows the lag of each streaming query."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from pyspark.sql.streaming import StreamingQueryListener

from metamq.spark_consumers.driver.lag import QueryLag, messages_behind


class LagListener(StreamingQueryListener):
    """Keeps the lag of each running query that reads metamq, after its last batch.

        lag = LagListener(on_lag=lambda query: print(query.name, query.messages))
        spark.streams.addListener(lag)
        lag.queries()

    The source reads the ends of the logs when it plans a batch. So the lag is the messages that a limited batch
    (`maxOffsetsPerTrigger`) left. Messages that came after the planning do not count yet. `on_lag` is called after each
    batch, in a thread of Spark. All methods are thread-safe.
    """

    def __init__(self, on_lag: Callable[[QueryLag], object] | None = None) -> None:
        self._on_lag = on_lag
        self._lock = threading.Lock()
        self._running: dict[str, QueryLag] = {}
        """The lag of each query, by run id."""

    def queries(self) -> list[QueryLag]:
        """Returns the lag of each query that runs and has had a batch."""
        with self._lock:
            return list(self._running.values())

    def onQueryStarted(self, event: Any) -> None:
        """Does nothing: the lag is not known yet."""

    def onQueryProgress(self, event: Any) -> None:
        """Records the lag after a batch."""
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
        """Does nothing: the query has read all messages, or waits for `minOffsetsPerTrigger`."""

    def onQueryTerminated(self, event: Any) -> None:
        """Forgets the query."""
        with self._lock:
            self._running.pop(str(event.runId), None)
