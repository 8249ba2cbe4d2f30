"""Brings the machine into the same state before each measurement.

Two effects of one measurement would slow down the next one. First, its data is still being written to the disk. Second,
a virtual machine may give freed memory back to its host after two seconds (free page reporting). To use that memory
again costs up to six times as much, so the time of writes to the page cache varies by chance. Only the machine's owner
can turn that off; the results say if it is on.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

_REPORTED_ORDER = Path("/sys/module/page_reporting/parameters/page_reporting_order")
_ORDER_MAX = 10
_BALLOON = Path("/sys/bus/virtio/drivers/virtio_balloon")


def settle(memory_bytes: int) -> None:
    """Waits until written data is on the disk, and makes sure that this much free memory is available at once."""
    os.sync()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
    mmap.mmap(-1, memory_bytes, flags=flags).close()


def gives_memory_back() -> bool:
    """Returns True if this is a virtual machine that gives freed memory back to its host while it runs."""
    try:
        order = int(_REPORTED_ORDER.read_text())
    except (OSError, ValueError):
        return False
    return order <= _ORDER_MAX and any(_BALLOON.glob("virtio*"))
