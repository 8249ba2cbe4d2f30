"""The commands and the headers of their requests and responses.

Headers are msgpack arrays in the order of the fields here. A receiver ignores additional fields, so that a field can be
added at the end. An added field has a default, for peers that do not send it. Each list declares its maximum length.
metamq.wire.headers unpacks headers, and checks them. docs/wire-protocol.md has the tables and the bytes.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any, NamedTuple

from metamq.wire.limits import (
    DELEGATED_RIGHTS_MAX,
    FOLLOWERS_MAX,
    MECHANISMS_MAX,
    REQUEST_ENTRIES_MAX,
    VERBS_MAX,
    AtMost,
)


class Command(enum.IntEnum):
    """The command of a request."""

    HELLO = 1
    AUTHENTICATE = 2  # a login, between HELLO and all others
    PUT = 3
    GET = 4
    SYNC = 5  # replication: metamq.wire.sync
    OFFSETS = 6
    STATS = 7
    PROMOTE = 8
    TX = 9
    BRANCHES = 10
    TOPIC = 11
    DELAY = 12  # pushed by a broker, never requested
    DELEGATE = 13


Entries = AtMost(REQUEST_ENTRIES_MAX)

EARLIEST = -2
LATEST = -1


class Hello(NamedTuple):
    """The first request on a connection: the client's protocol versions and its name."""

    version_min: int
    version_max: int
    client: str
    takes_delays: bool = False
    """True if the client understands a DELAY."""


class HelloReply(NamedTuple):
    """The version that the broker chose, its identity, and its configured limits."""

    version: int
    broker_id: int
    epoch: int
    message_bytes_max: int
    batch_bytes_max: int
    frame_bytes_max: int
    server: str
    mechanisms: Annotated[list[str], AtMost(MECHANISMS_MAX)] = []  # noqa: RUF012
    """The mechanisms of a login that the broker requires next; empty: it requires none."""
    producer_prefix: int = 0
    """The first 24 bits of the producer ids that this client may use; 0: any, or Authenticated has it."""


class Authenticate(NamedTuple):
    """One message of a login: metamq.security.login. The answer is an Authenticated."""

    mechanism: str
    data: bytes


class Authenticated(NamedTuple):
    """The broker's answer to a message of a login."""

    data: bytes
    is_done: bool
    producer_prefix: int = 0
    """As in HelloReply."""
    zookeeper_proof: str = ""
    """The client's proof of identity for ZooKeeper, by the scheme `digest`; empty: none."""


class Delay(NamedTuple):
    """Pushed by a broker: the client's requests wait, since it is above its quota. The broker is alive."""

    wait_ms: int
    limit: str
    """The exceeded limit: a field of metamq.security.quotas.Quota."""
    per_second: int


class Promote(NamedTuple):
    """Asks a slave to become the master; with `accept_loss`, even if it is not in sync. The answer is a Promoted."""

    accept_loss: bool
    cause: str = ""
    """The reason, for the list of switches; empty: an operator's command."""
    master_stops: bool = False
    """True if the present master asks, since it is going to stop: it does not stay in the in-sync set."""
    epoch: int = 0
    """The epoch of the master that is replaced: in another one the request is refused; 0: any."""


class Promoted(NamedTuple):
    """The answer that the slave is the master now."""

    epoch: int
    generation: int


class TopicChange(NamedTuple):
    """Creates, alters or deletes a topic for a client that may not write to ZooKeeper. The answer is a TopicChanged."""

    topic: str
    document: bytes
    """The new content of the topic's node in ZooKeeper; empty: delete the topic."""
    version: int
    """The version of the node that is replaced; -1: the topic is new."""


class TopicChanged(NamedTuple):
    """The answer to a TopicChange."""

    is_done: bool
    """False if the node has another version: nothing was changed."""


class DelegatedRight(NamedTuple):
    """A right of a token: on a topic, or on "*", all topics on which the client that delegates has the right."""

    right: str
    topic: str


class Delegate(NamedTuple):
    """Makes or renews a token: its holder logs in by it, and has a part of this client's rights. The answer is a
    Delegated."""

    token_id: str
    rights: Annotated[list[DelegatedRight], AtMost(DELEGATED_RIGHTS_MAX)]
    lifetime_s: int
    """0: the token ends."""
    salt: bytes
    """With the next three: the verifier of the token's secret, by SCRAM-SHA-512."""
    stored_key: bytes
    server_key: bytes
    iterations: int


class Delegated(NamedTuple):
    """The answer to a Delegate: this broker knows the token."""

    expires_ms: int
    """Milliseconds since 1970."""


class PutEntry(NamedTuple):
    """One batch of a PUT: its place, and its size in the body. The batches are in the order of the entries."""

    topic: str
    topic_id: str
    partition: int
    """The index in this broker: 3 for partition "0-3"."""
    size: int


class PutResult(NamedTuple):
    """The result of one entry: status OK, or the error's status and fields."""

    status: int
    base_offset: int
    append_time_us: int
    error: Any


class GetPartition(NamedTuple):
    """Opens a partition in the fetch session. The client chooses the handle, which then names the partition."""

    handle: int
    topic: str
    topic_id: str
    partition: int
    epoch: int = -1
    """The epoch of the message before the offset that is armed first; -1: unknown. The broker checks that its log is
    the same up to there (OffsetDiverged)."""
    in_place: bool = False
    """True if the reader prefers to read the broker's file itself: it may be on the same machine."""


class Get(NamedTuple):
    """One long poll of the connection's fetch session; it has only changes.

    A partition is *armed* with the offset to read from, is answered once, and is then idle until it is armed again. The
    broker answers the request when `bytes_min` bytes have come for armed partitions, when one of them fails, or after
    `wait_ms`. It counts bytes from a partition's last answer on; older data is enough by itself. Another GET on the
    connection ends a parked one at once, with an empty answer, and continues with all armed partitions: so a client can
    change a parked poll. A refused GET changes nothing.
    """

    wait_ms: int
    bytes_min: int
    bytes_max: int
    partition_bytes_max: int
    opened: Annotated[list[GetPartition], Entries]
    armed: Annotated[list[tuple[int, int]], Entries]
    """(handle, offset)."""
    closed: Annotated[list[int], Entries]
    """Handles to forget; a handle is not used twice on a connection."""


class GetResult(NamedTuple):
    """The data of one armed partition. The batches are in the body, in the order of the results.

    The first batch may begin before the requested offset, and the last may be incomplete. The receiver drops the
    messages before the offset, and the incomplete batch.
    """

    handle: int
    status: int
    size: int
    start_offset: int
    stable_offset: int
    """The end of the readable part; the lag is the distance to it."""
    error: Any
    preferred_replica: int = -1
    """The replica that the reader should ask next; -1: this one. A hint for readers that read from slaves."""
    file: Any = None
    """A FilePlace with the batches: its file has the `size` bytes, and the body has none."""


class FilePlace(NamedTuple):
    """A byte range of a file on the broker's machine. Device and inode identify the file at that path."""

    path: str
    device: int
    inode: int
    at: int
    epoch: int
    """The epoch of the log's last batch. If the log now has a later epoch, batches may have been replaced by others, if
    a loss was accepted."""


class OffsetsEntry(NamedTuple):
    """Asks for an offset of one partition: EARLIEST, LATEST, or the first message at a time (microseconds)."""

    topic: str
    topic_id: str
    partition: int
    timestamp_us: int
    offset: int = -1
    """The current offset of the client; -1: none. A master then lists the epochs of the messages from there on."""
    epoch: int = -1
    """The epoch of the message before that offset; -1: unknown. The broker checks that its log is the same up to there
    (OffsetDiverged)."""
    damaged: int = -1
    """An offset from which the client received a damaged batch; -1: none. The broker verifies its own bytes; the answer
    does not wait for this."""


class Stats(NamedTuple):
    """Asks for figures of partitions, beginning with this one, in the order of topics and indexes."""

    topic: str
    partition: int


class OffsetsResult(NamedTuple):
    """The offset. `timestamp_us` is its message's timestamp if the request had a time; -1 if there is no such message.

    `epoch` is the epoch of the message before the offset; -1 if there is none.
    """

    status: int
    offset: int
    timestamp_us: int
    start_offset: int
    stable_offset: int
    epoch: int
    error: Any
    epochs: Annotated[list[tuple[int, int]], Entries]
    """(epoch, end offset) of the readable messages from the client's offset on: a limited number, in order."""


class Tx(NamedTuple):
    """Verbs of one branch, carried out in this order up to the first that fails. The answer is a TxReply."""

    xid: Annotated[list[Any], AtMost(3)]
    """[format id, gtrid, bqual]."""
    epoch: int
    """The use of the id, as START answered it; 0: the existing branch, or one that these verbs begin."""
    session: str
    """The session: a name that the client chooses, at most 64 characters. It outlives a connection by some seconds."""
    verbs: Annotated[list[int], AtMost(VERBS_MAX)]
    """metamq.wire.xa.Verb."""
    timeout_ms: int
    """START: milliseconds after which an unprepared branch is rolled back; 0: the broker's default."""
    messages: int
    """PREPARE, COMMIT_ONE_PHASE: number of messages that the session has sent in the branch; -1: unknown."""
    first: int
    """SEND: number of batches that the session has sent in the branch before these."""
    entries: Annotated[list[Any], Entries]
    """SEND: a PutEntry for each batch in the body."""
    follows: Annotated[list[int], AtMost(3)] = []  # noqa: RUF012
    """PREPARE: the decider of the branch, [broker id, its generation, epoch]: the branch with the same id at another
    broker, with the epoch that START returned there. Empty: the transaction manager decides."""
    followers: Annotated[list[int], AtMost(FOLLOWERS_MAX)] = []  # noqa: RUF012
    """DECIDE: pairs of broker id and epoch, of the branches with the same id that follow."""
    principal: str = ""
    """From a broker that ends branches by itself: the principal of the branch for which it acts."""


class TxReply(NamedTuple):
    """The results of a Tx."""

    history: str
    """Broker id and generation, as "0:1". If it has changed, acknowledged messages may be gone."""
    results: Annotated[list[Any], AtMost(VERBS_MAX)]
    """A TxResult for each verb that was carried out, including the first that failed."""


class TxResult(NamedTuple):
    """The result of one verb."""

    status: int
    code: int
    """metamq.wire.xa.XACode."""
    epoch: int
    error: Any


class Branches(NamedTuple):
    """Asks for the branches of a broker, in the order of their epochs, after this one."""

    after_epoch: int
    all: bool
    """True: also branches that are not prepared."""
    of_others: bool = False
    """True: an error if the client may not see which branches of others are prepared."""


class BranchInfo(NamedTuple):
    """One branch."""

    xid: Annotated[list[Any], AtMost(3)]
    epoch: int
    state: str
    owner: str
    messages: int
    bytes: int
    prepared_us: int
    """Time of its prepare (microseconds since 1970) or of its decision; 0 before."""
    follows: Annotated[list[int], AtMost(3)] = []  # noqa: RUF012
    """The decider, like in Tx."""
    followers: Annotated[list[int], AtMost(FOLLOWERS_MAX)] = []  # noqa: RUF012
    """The followers, like in Tx."""
    age_ms: int = -1
    """Milliseconds since `prepared_us` by the broker's clock; -1: not known."""


class BranchesReply(NamedTuple):
    """A page of branches."""

    history: str
    branches: Annotated[list[Any], Entries]
    more: bool
