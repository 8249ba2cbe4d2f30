"""Where Spark finds the format `metamq` by itself: it looks into each top-level module called `pyspark_…`."""

from metamq.spark_consumers.data_source import DefaultSource

__all__ = ["DefaultSource"]
