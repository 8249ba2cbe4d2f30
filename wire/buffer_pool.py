"""Memory for large frames, used again once nobody can see it any more.

A new bytearray of a megabyte is zeroed, page by page as the kernel gives them, which costs a broker about as much as
the checksum of what is then received into it. So what was used before is used again.

A view of a bytearray, however it was sliced or cast, holds a reference to it: so one to which nothing refers but the
list of rooms is seen by nobody, and nobody can come to see it. What the reference count is then is measured, by the
same expression that asks for it later, and not assumed.
"""

from __future__ import annotations

import sys

BUFFER_STEP_BYTES = 256 * 1024
"""BufferPool are multiples of this, so that frames of about the same size fit into each other's."""
SMALL_BYTES = 128 * 1024
"""Up to this much, the allocator's own reuse is as good."""


class BufferPool:
    """At most `kept_bytes` of memory that is kept, free or not. Views of it may go to any thread, take() is for one."""

    def __init__(self, kept_bytes: int) -> None:
        self.kept_bytes = 0
        self._kept_bytes_max = kept_bytes
        self._buffers = [bytearray(1)]
        self._free_count = self._references(0)
        self._buffers.clear()

    def _references(self, index: int) -> int:
        return sys.getrefcount(self._buffers[index])

    def take(self, size: int) -> bytearray:
        """Memory of `size` bytes or more, which nobody else has. What is in it is undefined.

        Not much more: a frame that fills less than half of its memory would seem to be a small part of it, see
        metamq.client.fetch.message_batch.own_part.
        """
        if size <= SMALL_BYTES:
            return bytearray(size)
        buffer_bytes = -(-size // BUFFER_STEP_BYTES) * BUFFER_STEP_BYTES
        free = [index for index in range(len(self._buffers)) if self._references(index) == self._free_count]
        for index in free:  # from the first on, so that the same few stay in the processor's caches
            if buffer_bytes <= len(self._buffers[index]) <= buffer_bytes + buffer_bytes // 2:
                return self._buffers[index]
        while free and self.kept_bytes + buffer_bytes > self._kept_bytes_max:
            self.kept_bytes -= len(self._buffers.pop(free.pop()))
        if self.kept_bytes + buffer_bytes > self._kept_bytes_max:
            return bytearray(size)
        self._buffers.append(bytearray(buffer_bytes))
        self.kept_bytes += buffer_bytes
        return self._buffers[-1]
