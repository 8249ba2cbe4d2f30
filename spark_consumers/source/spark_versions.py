"""The interfaces that each release of Spark has for a source in Python, and metamq's substitutes for them.

| Spark | read | write | writeStream | readStream |
|---|---|---|---|---|
| 4.0 | yes | yes | no | no |
| 4.1 | yes | yes | yes | no |
| 4.2, 4.3 | yes | yes | yes | yes |

Spark imports every module called `pyspark_…` when it looks for a format of any name. So a class that a release may not
have is imported only where it is used, and a query that needs it ends with an error that names the release.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from typing import TYPE_CHECKING, Any

from metamq.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

STREAM_READS = "4.2", "pyspark.sql.streaming.datasource", "SupportsTriggerAvailableNow"
"""Spark's first release with that class, and its place. The class lets a source limit a batch."""
STREAM_WRITES = "4.1", "pyspark.sql.datasource", "DataSourceStreamArrowWriter"
FILE_MANAGER_PACKAGES = (
    ((4, 1), "org.apache.spark.sql.execution.streaming.checkpointing"),
    ((4, 0), "org.apache.spark.sql.execution.streaming"),
)
"""The package of FileSystemBasedCheckpointFileManager, by the first release that has it there."""


def is_there(needed: tuple[str, str, str]) -> bool:
    """True if this Spark has the class."""
    _release, module, name = needed
    return importlib.util.find_spec(module) is not None and hasattr(importlib.import_module(module), name)


def check_is_there(what: str, needed: tuple[str, str, str], instead: str) -> None:
    """Raises ConfigError if this Spark lacks the class."""
    if not is_there(needed):
        import pyspark

        problem = f"{what} with metamq needs Spark {needed[0]} or later, and this is {pyspark.__version__}"
        raise ConfigError(problem, hint=instead)


def stream_arrow_writer() -> Any:
    """Returns the base class of writers for streaming queries; before Spark 4.1 no query uses it."""
    from pyspark.sql import datasource

    return getattr(datasource, "DataSourceStreamArrowWriter", datasource.DataSourceStreamWriter)


def file_manager(version: str) -> str:
    """Returns the name in this release of Spark of the class that keeps checkpoints in a file system."""
    release = tuple(int(part) for part in version.split(".")[:2])
    package = next(name for first, name in FILE_MANAGER_PACKAGES if release >= first)
    return f"{package}.FileSystemBasedCheckpointFileManager"


def arrow_schema(schema: StructType) -> Any:
    """Returns Spark's Arrow schema for a reader's rows, with times in UTC."""
    from pyspark.sql.pandas.types import to_arrow_schema

    if "timezone" in inspect.signature(to_arrow_schema).parameters:
        return to_arrow_schema(schema, timezone="UTC")
    return to_arrow_schema(schema)  # before Spark 4.2 times are always in UTC
