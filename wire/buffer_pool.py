"""Memory for large frames, which is reused when no view of it exists any more.

The kernel zeroes a new bytearray of a megabyte page by page. For a broker this costs about as much as the checksum of
the bytes that are then received into it. So buffers are reused.

A view of a bytearray, however it was sliced or cast, holds a reference to it. So if only the pool's list refers to a
buffer, no code can see it, and none can get a view of it. The reference count of a free buffer is measured, by the same
expression that checks it later, and not assumed.
"""

from __future__ import annotations

import sys

BUFFER_STEP_BYTES = 256 * 1024
"""Buffers are multiples of this size: frames of about the same size can reuse each other's buffers."""
SMALL_BYTES = 128 * 1024
"""Up to this size the allocator's own reuse is as good."""


class BufferPool:
    """A pool of at most `kept_bytes` of memory, free or not. Any thread may have views of it; only one calls take()."""

    def __init__(self, kept_bytes: int) -> None:
        self.kept_bytes = 0
        self._kept_bytes_max = kept_bytes
        self._buffers = [bytearray(1)]
        self._free_count = self._references(0)
        self._buffers.clear()

    def _references(self, index: int) -> int:
        return sys.getrefcount(self._buffers[index])

    def take(self, size: int) -> bytearray:
        """Returns memory of at least `size` bytes that no other code uses. Its content is undefined.

        It is not much larger: a frame that fills less than half of its memory would seem to be a small part of it, see
        metamq.client.fetch.message_batch.own_part.
        """
        if size <= SMALL_BYTES:
            return bytearray(size)
        buffer_bytes = -(-size // BUFFER_STEP_BYTES) * BUFFER_STEP_BYTES
        free = [index for index in range(len(self._buffers)) if self._references(index) == self._free_count]
        for index in free:  # in order: the same few stay in the processor's caches
            if buffer_bytes <= len(self._buffers[index]) <= buffer_bytes + buffer_bytes // 2:
                return self._buffers[index]
        while free and self.kept_bytes + buffer_bytes > self._kept_bytes_max:
            self.kept_bytes -= len(self._buffers.pop(free.pop()))
        if self.kept_bytes + buffer_bytes > self._kept_bytes_max:
            return bytearray(size)
        self._buffers.append(bytearray(buffer_bytes))
        self.kept_bytes += buffer_bytes
        return self._buffers[-1]
