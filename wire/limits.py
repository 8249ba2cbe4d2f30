"""All limits of the protocol. A receiver checks each one before it allocates memory.

The answer to HELLO has the configured limits of a broker; these are the defaults and the maximum values.
"""

from __future__ import annotations

from typing import NamedTuple

from metamq import errors


class AtMost(NamedTuple):
    """The maximum number of entries of a list; a header declares it with the list's field."""

    entries: int


PROTOCOL_VERSION_MIN = 1
PROTOCOL_VERSION_MAX = 1

HELLO_BYTES_MAX = 4 * 1024
"""Bytes of a frame before HELLO and the login are done: an unknown peer cannot make a broker allocate more."""

MECHANISMS_MAX = 8
"""Mechanisms of a login that a broker offers."""

LOGIN_STEPS_MAX = 4
"""Messages of a client in one login."""

HEADER_BYTES_MAX = 1024 * 1024
"""Bytes of a request's msgpack header. ENTRIES_TARGET partitions with the longest names take less than half of it."""

UNPACKED_BYTES_MAX = 16 * 1024
"""Bytes of a request's header that is unpacked on arrival, in 4 ms at most; a larger one waits for its turn."""

ANSWER_HEADER_BYTES_MAX = 8 * 1024 * 1024
"""Bytes of a response's header. It is larger, since an error has sentences where the request's entry had a name."""

REQUEST_ENTRIES_MAX = 4000
"""Entries of each list of a client's request, and of its answer."""

ENTRIES_MAX = 20_000
"""Entries of each list in a SYNC frame: twice the partitions that a topic may have."""

ENTRIES_TARGET = 1000
"""Entries that this client library puts into one request. They fit with the longest names, even with an error each."""

FOLLOWERS_MAX = 2000
"""Numbers in a TX that name the followers of a branch, or its decider."""

VERBS_MAX = 8
"""Verbs of one TX."""

ATTACH_EPOCHS_MAX = 1000
"""Epochs of one partition in an ATTACH, the newest ones. A log that diverged before these is copied again."""

ATTACH_EPOCHS_TARGET = 10_000
"""Epochs of all partitions in one ATTACH of a slave; with ENTRIES_TARGET partitions it fits into a header."""

ERROR_TEXT_CHARS_MAX = 1000
"""Characters of each text in an error's fields; the rest is cut."""

MESSAGE_BYTES_MAX = errors.MESSAGE_BYTES_MOST
"""Bytes of value, key and headers of one message together."""

BATCH_BYTES_MAX = 16 * 1024 * 1024
"""Bytes of one batch, compressed or not. Positions inside a batch are int32, as in Arrow's binary arrays."""

BATCH_COUNT_MAX = 1 << 20
"""Messages in one batch."""

FRAME_BYTES_MAX = 64 * 1024 * 1024
"""Bytes of a whole frame: header and body."""

FETCH_BYTES_MAX = 32 * 1024 * 1024
"""Maximum `bytes_max` of a GET. The last batch is whole, so an answer may have one batch more."""

FETCH_RESULTS_MAX = 1000
"""Partitions in one answer to a GET; the next answer has the others."""

HAND_OVER_MS_MAX = 60 * 1000
"""Milliseconds for which a slave can ask its master to accept no writes."""

DELEGATED_RIGHTS_MAX = 200
"""Rights of a token."""

DELAY_MS_MAX = 10 * 1000
"""Milliseconds of one DELAY; a longer wait has several."""

STATS_PARTITIONS_MAX = 1000
"""Partitions in one answer to STATS, which also says where the next request must continue."""

FETCH_PARTITIONS_MAX = 100_000
"""Partitions that are open in one fetch session."""

FETCH_WAIT_MS_MAX = 5 * 60 * 1000
"""Milliseconds for which a GET is parked at most."""

BATCH_TARGET_BYTES = 1024 * 1024 - 4096
"""Size at which a producer closes a batch: with header and padding it fits into the 1 MiB of a consumer's request."""

assert MESSAGE_BYTES_MAX < BATCH_BYTES_MAX < FRAME_BYTES_MAX < 2**31
assert BATCH_TARGET_BYTES <= BATCH_BYTES_MAX
assert ENTRIES_TARGET < REQUEST_ENTRIES_MAX <= ENTRIES_MAX
assert HELLO_BYTES_MAX < HEADER_BYTES_MAX < ANSWER_HEADER_BYTES_MAX
assert ANSWER_HEADER_BYTES_MAX + FETCH_BYTES_MAX + BATCH_BYTES_MAX < FRAME_BYTES_MAX
