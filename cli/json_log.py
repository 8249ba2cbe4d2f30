"""Log lines as JSON objects, one a line, for programs that collect logs: `metamq broker --log-format json`.

The fields of a record's `extra=` become keys: topic, partition, broker, group and so on.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

import click

LOG_FORMAT = click.option(
    "--log-format",
    type=click.Choice(("text", "json")),
    envvar="METAMQ_LOG_FORMAT",
    default="text",
    show_default=True,
    help="Log lines as text, or each as a JSON object.",
)
_KNOWN = {*logging.makeLogRecord({}).__dict__, "message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """`fields` are in every line: the broker id and the replica."""

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        line = {
            **{name: value for name, value in record.__dict__.items() if name not in _KNOWN},
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_as_json(*filters: logging.Filter, **fields: Any) -> None:
    """Formats all log lines from now on as JSON, with these fields in each, and those that the filters add."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonLines(**fields))
        for one in filters:
            handler.addFilter(one)
