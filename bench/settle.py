"""Before a measurement: the same machine for all of them.

Two things of the machine outlast what caused them, and would be counted to whoever comes next. What was written before
is still being written to the disk. And memory that was freed may have gone back to the host of a virtual machine (free
page reporting): to use it again costs three times as much as to use what is there.
"""

from __future__ import annotations

import mmap
import os


def settle(memory_bytes: int) -> None:
    """Waits until the disk has what was written, and makes sure that so much free memory is there at once."""
    os.sync()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
    mmap.mmap(-1, memory_bytes, flags=flags).close()
