"""The audit log: logins, refusals, changes and commands, with their clients, as lines of JSON

    login     a client is known now, by its certificate or its password; or the password was wrong
    refused   a right was missing
    change    a client asked to create, alter or delete a topic, or to make, renew or end a token
    command   a replica joined, a promotion was asked for, or an operator ended a transaction

A thread writes the lines, so a slow disk delays no request. A client can cause at most LINES_PER_S lines of a kind in a
second, all clients together ALL_LINES_PER_S. The next line has the number of omitted lines. Commands have no such
limit. Lines contain no secrets: passwords are never sent to a broker.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import sys
import threading
import time
from collections import Counter
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from typing import TYPE_CHECKING

from metamq.errors import ConfigError

if TYPE_CHECKING:
    from metamq.broker.config import BrokerConfig

LOGIN, REFUSED, CHANGE, COMMAND = "login", "refused", "change", "command"
STANDARD_ERROR = "-"
CLIENT_CHARS_MAX = 200
"""Characters of the name that a client gives itself."""
FILES_KEPT = 5
"""Older files: `audit.log.1` is the newest of them."""
LINES_PER_S = 20
ALL_LINES_PER_S = 1000
WAITING_MAX = 10_000
"""Lines that wait for the thread."""
TELL_S = 60.0
"""Seconds between two messages about a file that cannot be written."""
CLOSE_S = 2.0

log = logging.getLogger("metamq.broker")


class _File(RotatingFileHandler):
    def __init__(self, path: str, bytes_max: int) -> None:
        super().__init__(path, maxBytes=bytes_max, backupCount=FILES_KEPT, encoding="ascii")
        self._told_s = -TELL_S

    def handleError(self, record: logging.LogRecord) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= TELL_S:
            self._told_s = now_s
            log.error("the audit log %s loses lines: %s", self.baseFilename, sys.exc_info()[1])


class Audit:
    """Writes the audit log of a broker. Used by the broker's loop only."""

    def __init__(self, config: BrokerConfig) -> None:
        """Raises ConfigError if the file cannot be written."""
        self._source = {"broker": config.id, "replica": config.replica}
        self._second = 0
        self._lines: Counter[tuple[str, str, str]] = Counter()
        self._written = 0
        """Lines of this second that count for the limit of all clients."""
        self._left_out = 0
        self._queue: queue.Queue[str | None] = queue.Queue(WAITING_MAX)
        self._thread: threading.Thread | None = None
        if not config.audit:
            return
        try:
            handler = _File(config.audit, config.audit_bytes_max) if config.audit != STANDARD_ERROR else None
        except OSError as error:
            raise ConfigError(
                f"the audit log {config.audit!r} cannot be written: {error.strerror or error}",
                hint="Give `audit` in [broker], METAMQ_BROKER_AUDIT or --audit another file, or `-`.",
            ) from error
        self._handler: logging.Handler = handler or logging.StreamHandler(sys.stderr)
        self._thread = threading.Thread(target=self._write, name="metamq-audit", daemon=True)
        self._thread.start()

    def record(self, event: str, principal: str, peer: str, what: str, *, allowed: bool, reason: str = "") -> None:
        """Writes a line, unless there are too many. `peer`: the address of the client."""
        if self._thread is None:
            return
        now_s = time.time()
        if int(now_s) != self._second:
            self._second, self._written = int(now_s), 0
            self._lines.clear()
        # The client chooses the name in a failed login, so another name allows no more lines.
        key = event, principal if allowed or event != LOGIN else "", peer.rpartition(":")[0]
        if event != COMMAND:
            if self._lines[key] >= LINES_PER_S or self._written >= ALL_LINES_PER_S:
                self._left_out += 1
                return
            self._lines[key] += 1
            self._written += 1
        line = {
            "time": datetime.fromtimestamp(now_s, UTC).isoformat(timespec="milliseconds"),
            **self._source,
            "event": event,
            "principal": principal,
            "peer": peer,
            "what": what,
            "allowed": allowed,
        }
        if reason:
            line["reason"] = reason
        if self._left_out:
            line["left_out"] = self._left_out
        try:
            self._queue.put_nowait(json.dumps(line))
        except queue.Full:
            self._left_out += 1
            return
        self._left_out = 0

    def _write(self) -> None:
        while (line := self._queue.get()) is not None:
            self._handler.emit(logging.makeLogRecord({"msg": line}))
        with contextlib.suppress(OSError):  # the disk is still full
            self._handler.close()

    def close(self) -> None:
        """Writes the lines that wait, for at most CLOSE_S."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        try:
            self._queue.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        thread.join(CLOSE_S)
