"""The Spark data source `metamq`: executors pull from the brokers directly.

    from metamq.spark_consumers import session

    spark = session()
    spark.read.format("metamq").option("subscribe", "flights").load()

A task connects to the brokers itself, and gives Spark the fetched bytes as Arrow batches. The driver only plans the
ranges of the tasks. `options` (the user's wishes), `columns`, `ranges` (the tasks' offsets), `progress` (the steps of
a query) and `stream_offsets` (its places) do no I/O, and do not use Spark. `cluster_view` asks ZooKeeper and brokers
for the driver; `fetch` reads one range for a task.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if __name__ != "metamq.spark_consumers":
    raise ImportError(f"import metamq.spark_consumers, not {__name__}: a bare import makes a second copy")

if TYPE_CHECKING:
    from metamq.spark_consumers.driver.lag import QueryLag as QueryLag
    from metamq.spark_consumers.lag_listener import LagListener as LagListener
    from metamq.spark_consumers.spark_session import recommended_conf as recommended_conf
    from metamq.spark_consumers.spark_session import session as session

__all__ = ["LagListener", "QueryLag", "recommended_conf", "session"]

_HOMES = {
    "LagListener": "lag_listener",
    "QueryLag": "driver.lag",
    "recommended_conf": "spark_session",
    "session": "spark_session",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: each Python worker of Spark imports this package, and does not use them.
    if name in _HOMES:
        try:
            home = importlib.import_module(f"metamq.spark_consumers.{_HOMES[name]}")
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "pyspark":
                raise
            problem = f"{name} needs Spark, which is not installed. Install it with: pip install 'metamq[spark]'"
            raise ModuleNotFoundError(problem, name=error.name) from error
        return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
