"""The limits of the protocol, in one place; a receiver checks each before it allocates anything.

A HELLO tells the client the limits that its broker was configured with; these are the defaults and the ceilings.
"""

from __future__ import annotations

from typing import NamedTuple

from metamq import errors


class AtMost(NamedTuple):
    """How many entries a list has at most; a header declares it with the list's field."""

    entries: int


PROTOCOL_VERSION_MIN = 1
PROTOCOL_VERSION_MAX = 1

HELLO_BYTES_MAX = 4 * 1024
"""A frame before the HELLO is done: a stranger can make us allocate no more than this."""

HEADER_BYTES_MAX = 1024 * 1024
"""A request's msgpack header; ENTRIES_TARGET partitions of the longest names take less than half of it."""

UNPACKED_BYTES_MAX = 16 * 1024
"""A request's header is unpacked as soon as it is there, which takes 4 ms at most; a larger one waits for its turn."""

ANSWER_HEADER_BYTES_MAX = 8 * 1024 * 1024
"""A response's; an error has sentences where its entry in the request had a name."""

REQUEST_ENTRIES_MAX = 4000
"""Entries of each list of a client's request, and of its answer."""

ENTRIES_MAX = 20_000
"""Entries of each list in a SYNC frame: twice the partitions that a topic may have."""

ENTRIES_TARGET = 1000
"""Entries that our clients put into one request: with the longest names it fits, and so do an error for each."""

FOLLOWERS_MAX = 2000
"""Numbers in a TX that tell which branches follow, and whose decision they follow."""

VERBS_MAX = 8
"""Verbs of one TX."""

ATTACH_EPOCHS_MAX = 1000
"""Epochs of one partition in an ATTACH, the newest. One that parted from its master before them is copied anew."""

ATTACH_EPOCHS_TARGET = 10_000
"""Epochs of all partitions in one ATTACH of ours; with ENTRIES_TARGET partitions it fits in a header."""

ERROR_TEXT_CHARS_MAX = 1000
"""Of each text in an error's fields; the rest is cut."""

MESSAGE_BYTES_MAX = errors.MESSAGE_BYTES_MOST
"""Value, key and headers of one message together."""

BATCH_BYTES_MAX = 16 * 1024 * 1024
"""One batch, after decompression too. Positions inside a batch are int32, as in Arrow's binary arrays."""

BATCH_COUNT_MAX = 1 << 20
"""Messages in one batch."""

FRAME_BYTES_MAX = 64 * 1024 * 1024
"""A whole frame: header and body."""

FETCH_BYTES_MAX = 32 * 1024 * 1024
"""What `bytes_max` of a GET can ask for; the last batch comes whole, so an answer may have one batch more."""

FETCH_RESULTS_MAX = 1000
"""Partitions in one answer to a GET; the others keep their turn."""

HAND_OVER_MS_MAX = 60 * 1000
"""How long a slave can ask its master to take no writes."""

STATS_PARTITIONS_MAX = 1000
"""Partitions in one answer to STATS, which says where to go on."""

FETCH_PARTITIONS_MAX = 100_000
"""Partitions that are open in one fetch session."""

FETCH_WAIT_MS_MAX = 5 * 60 * 1000
"""How long a GET is parked at most."""

BATCH_TARGET_BYTES = 1024 * 1024 - 4096
"""Where a producer closes a batch: with header and padding it fits in 1 MiB, as much as a consumer asks for at once."""

assert MESSAGE_BYTES_MAX < BATCH_BYTES_MAX < FRAME_BYTES_MAX < 2**31
assert BATCH_TARGET_BYTES <= BATCH_BYTES_MAX
assert ENTRIES_TARGET < REQUEST_ENTRIES_MAX <= ENTRIES_MAX
assert HELLO_BYTES_MAX < HEADER_BYTES_MAX < ANSWER_HEADER_BYTES_MAX
assert ANSWER_HEADER_BYTES_MAX + FETCH_BYTES_MAX + BATCH_BYTES_MAX < FRAME_BYTES_MAX
