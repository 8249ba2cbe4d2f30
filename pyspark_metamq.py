"""The module in which Spark finds the format `metamq`: Spark looks into each top-level module called `pyspark_…`.

Spark imports all of them to find a format of any name. If one raised an error, Spark would lose every source in Python.
So this module then has no format, and logs a warning.
"""

import logging

try:
    from metamq.spark_consumers.data_source import DefaultSource
except ImportError as error:  # Spark, or metamq, is of an unexpected release
    logging.getLogger("metamq.spark").warning("the format 'metamq' is not available here: %s", error)
else:
    __all__ = ["DefaultSource"]
