"""The limits of the protocol, in one place; a receiver checks each before it allocates anything.

A HELLO tells the client the limits that its broker was configured with; these are the defaults and the ceilings.
"""

from __future__ import annotations

PROTOCOL_VERSION_MIN = 1
PROTOCOL_VERSION_MAX = 1

HELLO_BYTES_MAX = 4 * 1024
"""A frame before the HELLO is done: a stranger can make us allocate no more than this."""

HEADER_BYTES_MAX = 1024 * 1024
"""A frame's msgpack header; 1,000 partitions in one GET take about 40 KB."""

MESSAGE_BYTES_MAX = 4 * 1024 * 1024
"""Value, key and headers of one message together."""

BATCH_BYTES_MAX = 16 * 1024 * 1024
"""One batch, after decompression too. Positions inside a batch are int32, as in Arrow's binary arrays."""

BATCH_COUNT_MAX = 1 << 20
"""Messages in one batch."""

FRAME_BYTES_MAX = 64 * 1024 * 1024
"""A whole frame: header and body."""

BATCH_TARGET_BYTES = 1024 * 1024
"""Where a producer closes a batch. Measured: above 256 KiB the cost per message no longer falls."""

assert MESSAGE_BYTES_MAX < BATCH_BYTES_MAX < FRAME_BYTES_MAX < 2**31
assert BATCH_TARGET_BYTES <= BATCH_BYTES_MAX
assert HELLO_BYTES_MAX < HEADER_BYTES_MAX
