"""Before a measurement: the same machine for all of them.

Two things of the machine outlast what caused them, and would be counted to whoever comes next. What was written before
is still being written to the disk. And memory that was freed may have gone back to the host of a virtual machine, two
seconds later (free page reporting): to use it again costs up to six times as much as to use what is there, so that
whatever writes to the page cache is timed by chance. That, only the machine's owner can turn off; the results say
whether it is.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

_REPORTED_ORDER = Path("/sys/module/page_reporting/parameters/page_reporting_order")
_ORDER_MAX = 10
_BALLOON = Path("/sys/bus/virtio/drivers/virtio_balloon")


def settle(memory_bytes: int) -> None:
    """Waits until the disk has what was written, and makes sure that so much free memory is there at once."""
    os.sync()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
    mmap.mmap(-1, memory_bytes, flags=flags).close()


def gives_memory_back() -> bool:
    """Whether this is a virtual machine that gives freed memory back to its host while it runs."""
    try:
        order = int(_REPORTED_ORDER.read_text())
    except (OSError, ValueError):
        return False
    return order <= _ORDER_MAX and any(_BALLOON.glob("virtio*"))
