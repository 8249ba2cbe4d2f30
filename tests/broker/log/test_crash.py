"""Real processes that die: killed while they append, and stopped by a file size limit."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from metamq.broker.log.config import LogConfig

CONFIG = LogConfig(segment_bytes=20_000, index_interval_bytes=1000)

APPENDER = """
import sys
from metamq.broker.log.config import LogConfig
from metamq.broker.log.disk.files import FileCache
from metamq.broker.log.partition_log import PartitionLog
from metamq.wire.batch import read_header
from metamq.wire.columns import encode

log = PartitionLog.open(sys.argv[1], "flights/0-0", LogConfig(segment_bytes=20_000, index_interval_bytes=1000),
                        FileCache(3), now_us=0)
for number in range(log.end_offset, 10**9):
    batch = encode([b"value %d" % number], base_timestamp_us=number, producer_id=7, sequence=number)
    log.append(memoryview(batch), [read_header(batch)], epoch=1, batch_id=number, now_us=number)
    if number % 50 == 0:
        ticket = log.start_flush()
        ticket.sync()
        log.finish_flush(ticket)
    print(number, flush=True)
"""


def test_kill_minus_9_loses_no_append_that_returned(shelf: Any) -> None:
    confirmed = -1
    for enough in (40, 333, 777):
        process = subprocess.Popen(
            [sys.executable, "-c", APPENDER, str(shelf.folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        with process:
            assert process.stdout is not None
            while confirmed < enough:
                line = process.stdout.readline()
                assert line, process.stderr.read().decode() if process.stderr else ""
                confirmed = int(line)
            process.send_signal(signal.SIGKILL)
            confirmed = max(
                [confirmed, *(int(line) for line in process.stdout.read().splitlines(True) if line[-1:] == b"\n")]
            )
        log = shelf.open(CONFIG)
        assert not log.recovery.clean
        assert log.end_offset >= confirmed + 1
        assert shelf.read_all(log) == [b"value %d" % number for number in range(log.end_offset)]
        _batch, header = shelf.batch([b"x"], producer_id=7, sequence=log.end_offset - 1)
        assert log.check_producer(header).base_offset == log.end_offset - 1
        log.close(clean=False)


LIMITED = """
import resource, sys
from metamq.broker.log.config import LogConfig
from metamq.broker.log.disk.files import FileCache
from metamq.broker.log.partition_log import PartitionLog
from metamq.errors import StorageError
from metamq.wire.batch import read_header
from metamq.wire.columns import encode

resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
log = PartitionLog.open(sys.argv[1], "flights/0-0", LogConfig(), FileCache(3), now_us=0)
try:
    for number in range(1000):
        batch = encode([b"value %d" % number * 10], base_timestamp_us=number)
        log.append(memoryview(batch), [read_header(batch)], epoch=1, batch_id=number, now_us=number)
except StorageError as error:
    print(number, error)
assert log.end_offset == number
log.close()
"""


def test_a_real_short_write_and_a_real_failure(shelf: Any) -> None:
    """The kernel writes what fits below the limit, and refuses the rest."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(shelf.folder)], capture_output=True, text=True, check=True, timeout=60
    )
    number, message = done.stdout.strip().split(" ", 1)
    assert "File too large" in message
    path = Path(shelf.paths("log")[0])
    assert path.stat().st_size == 5000
    log = shelf.open()
    assert log.end_offset == int(number)
    assert log.recovery.cut_bytes == 5000 - log.end_position > 0
    assert shelf.read_all(log) == [b"value %d" % n * 10 for n in range(int(number))]
    log.close()
