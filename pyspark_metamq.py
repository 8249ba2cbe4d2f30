"""Where Spark finds the format `metamq` by itself: it looks into each top-level module called `pyspark_…`.

It imports all of them to find a format of any name. One that cannot be imported would take every source in Python away,
so this one then has no format instead.
"""

import logging

try:
    from metamq.spark_consumers.data_source import DefaultSource
except ImportError as error:  # what Spark has, or metamq, is of another release than was expected
    logging.getLogger("metamq.spark").warning("the format 'metamq' is not available here: %s", error)
else:
    __all__ = ["DefaultSource"]
