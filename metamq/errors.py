"""Every error that metamq raises.

    MetamqError
    ├── ConnectError              no server answers at an address, or the connection broke
    │   ├── UnsupportedVersion    the other side speaks another protocol version
    │   └── AuthenticationFailed  the other side does not accept the user, or its password or certificate
    ├── NotAuthorized             the rules do not allow this client to do this
    ├── ServerBusy                the server is at one of its limits
    ├── ProtocolError             the other side sent bytes that are not the protocol
    ├── ConfigError               a setting, name or argument is wrong
    │   ├── WrongType             an argument has the wrong type                  (also TypeError)
    │   └── ForkedError           a client is used in a process that did not create it
    ├── TopicNotFound             no such topic
    │   └── PartitionNotFound     the topic has no such partition
    ├── TopicExists               a topic of that name exists already
    ├── MessageTooLarge           a message or batch is over the limit
    ├── BufferFull                the producer's buffer is full, and waiting is off   (also BufferError)
    ├── DeliveryTimeout           no answer in time; the outcome may be unknown       (also TimeoutError)
    ├── Timeout                   the caller's own time limit ended                   (also TimeoutError)
    ├── HandlerTimeout            a handler of run() did not end within its limit
    ├── NotEnoughReplicas         too few in-sync replicas to accept a write
    ├── Fenced                    the broker is not the master
    ├── SequenceGap               a producer's batch came before its predecessor
    ├── OffsetOutOfRange          the log does not have the offset
    ├── CorruptData               a checksum or a length on disk or on the wire is wrong
    │   └── UndecodableBatch      a stored batch has right checksums, but its messages are unreadable
    ├── DecodeError               a consumer's `decode` rejects a message             (also ValueError)
    ├── StorageError              the broker's disk failed
    │   ├── DiskFull              too little disk is left to accept writes
    │   └── TooManyOpenFiles      the process or the system has no free file descriptor
    ├── TooManyThreads            the system starts no further thread for the process
    ├── OwnershipLost             another member owns the partition now
    ├── TransactionError          a transaction failed
    │   ├── RolledBack            it was rolled back: repeat it in a new transaction
    │   ├── OutcomeUnknown        it may have succeeded: ask again
    │   ├── BranchNotKnown        the broker does not know the branch
    │   ├── HeuristicOutcome      an operator has decided the branch
    │   ├── BranchMisuse          the call is not allowed in the branch's state
    │   └── TryLater              the call is not possible now; the branch is unchanged
    └── ClosedError               the object is used after close()

Each error carries fields, builds its own sentence from them, and gives the next step in `.hint`.
`.retriable` is True if the same call may succeed later. `.outcome` is `not_done` if the request certainly has no
effect, and `unknown` if it may have taken effect. All errors can be pickled.
"""

from __future__ import annotations

import copy
import shlex
from typing import Any, Literal, Self

Outcome = Literal["not_done", "unknown"]

PARTITIONS_NAMED_MAX = 20


def _rebuild(cls: type[MetamqError], args: tuple[Any, ...], fields: dict[str, Any]) -> MetamqError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(fields)
    return error


class MetamqError(Exception):
    """The base class of all errors of metamq. `str()` gives the problem, then the hint."""

    retriable: bool = False
    outcome: Outcome = "not_done"
    hint: str = ""

    def __init__(self, problem: str, *, hint: str | None = None, outcome: Outcome | None = None) -> None:
        Exception.__init__(self, problem)
        self.problem = problem
        if hint is not None:
            self.hint = hint
        if outcome is not None:
            self.outcome = outcome

    def with_unknown_outcome(self) -> Self:
        """Returns a copy with the outcome `unknown`, for a caller whose request may have taken effect."""
        unknown = copy.copy(self)
        unknown.outcome = "unknown"
        return unknown

    def __str__(self) -> str:
        return f"{self.problem}. {self.hint}" if self.hint else self.problem

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


class ConnectError(MetamqError):
    """No server answers at `address`, or the connection to it broke."""

    retriable = True

    def __init__(self, address: str, reason: str, *, hint: str | None = None, outcome: Outcome | None = None) -> None:
        super().__init__(f"no connection to {address}: {reason}", hint=hint, outcome=outcome)
        self.address = address
        self.reason = reason


class UnsupportedVersion(ConnectError):
    """The other side speaks the protocol versions `theirs` (lowest, highest); this side speaks `ours`."""

    retriable = False

    def __init__(self, address: str, ours: tuple[int, int], theirs: tuple[int, int]) -> None:
        reason = f"it speaks protocol versions {theirs[0]} to {theirs[1]}, this side {ours[0]} to {ours[1]}"
        older = "this side" if ours[1] < theirs[0] else "the other side"
        super().__init__(address, reason, hint=f"Upgrade {older} to a metamq release that shares a version.")
        self.ours = ours
        self.theirs = theirs


class AuthenticationFailed(ConnectError):
    """The other side at `address` rejects the identity of this side. A retry fails in the same way."""

    retriable = False
    hint = "See METAMQ_SECURITY_USER and METAMQ_SECURITY_PASSWORD_FILE, and `metamq user list`."

    def __init__(self, address: str, reason: str, *, hint: str | None = None) -> None:
        super().__init__(address, reason, hint=hint)


class NotAuthorized(MetamqError):
    """`principal` does not have the `right` on `resource`. The resource may not exist."""

    def __init__(self, principal: str, right: str, resource: str, *, hint: str | None = None) -> None:
        shown = " ".join(map(shlex.quote, (principal, right, resource)))
        ways = f"`metamq acl explain {shown}` shows the rule that decides."
        super().__init__(f"{principal!r} may not {right} {resource}", hint=ways if hint is None else hint)
        self.principal = principal
        self.right = right
        self.resource = resource


class ServerBusy(MetamqError):
    """The server is at its limit for `what`. It has not done the request."""

    retriable = True
    hint = "Call again a little later."

    def __init__(self, what: str) -> None:
        super().__init__(f"the server accepts no more {what} now")
        self.what = what


class ProtocolError(MetamqError):
    """The peer sent bytes that do not follow the protocol. The connection is closed after this error."""


class ConfigError(MetamqError):
    """A setting, a name or an argument is wrong."""

    ends_run: bool = False
    """True if the program is wrong, and not the message: a consumer's run() ends with it, and gives nothing up."""


class WrongType(ConfigError, TypeError):
    """An argument has the wrong type."""


class ForkedError(ConfigError):
    """A client was created in one process and used in a fork of that process."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"this {what} was made before the process forked, and does not work in the child",
            hint=f"Make the {what} in the child.",
        )


class TopicNotFound(MetamqError):
    """No topic of that name exists."""

    def __init__(self, topic: str, *, hint: str | None = None) -> None:
        super().__init__(
            f"topic {topic!r} does not exist",
            hint=hint or f"Create it with `metamq topic create {topic}` or Admin.create_topic().",
        )
        self.topic = topic

    @classmethod
    def made_anew(cls, topic: str, now: str, before: str) -> TopicNotFound:
        """Returns the error for a topic that was deleted and created again: its id is `now` and was `before`."""
        error = TopicNotFound(topic, hint=f"Its id is {now} now, and was {before}.")
        error.problem = f"topic {topic!r} was deleted and created again"
        return error


class PartitionNotFound(TopicNotFound):
    """The topic exists, but it has no such partition."""

    def __init__(
        self, topic: str, partition: str, partitions: tuple[str, ...] = (), *, hint: str | None = None
    ) -> None:
        known = f"It has: {', '.join(partitions)}." if partitions else ""
        if len(partitions) > PARTITIONS_NAMED_MAX:
            known = f"It has {len(partitions):,} partitions, {partitions[0]} to {partitions[-1]}."
        MetamqError.__init__(
            self,
            f"topic {topic!r} has no partition {partition!r}",
            hint=hint or known or f"`metamq topic describe {topic}` lists its partitions.",
        )
        self.topic = topic
        self.partition = partition


class TopicExists(MetamqError):
    """A topic of that name exists already."""

    def __init__(self, topic: str) -> None:
        super().__init__(
            f"topic {topic!r} exists already",
            hint=f"Change it with `metamq topic alter {topic}`, or choose another name.",
        )
        self.topic = topic


MESSAGE_BYTES_MOST = 4 * 1024 * 1024
"""The highest value of a topic's limit, in bytes."""
_RAISE_THE_LIMIT = (
    "Send less at once, or raise the topic's limit, to 4 MiB at most: `metamq topic alter TOPIC "
    "--max-message-bytes 4MiB`."
)
_NO_TOPIC_TAKES_IT = "No topic takes a message of more than 4 MiB: split it, or send a link to it."


class MessageTooLarge(MetamqError):
    """A message, or the batch that contains it, has `size` bytes, which is more than the allowed `limit`."""

    def __init__(self, what: str, size: int, limit: int, *, hint: str | None = None) -> None:
        super().__init__(
            f"{what} has {size:,} bytes, the limit is {limit:,}",
            hint=hint or (_NO_TOPIC_TAKES_IT if size > MESSAGE_BYTES_MOST else _RAISE_THE_LIMIT),
        )
        self.size = size
        self.limit = limit


class BufferFull(MetamqError, BufferError):
    """The producer's buffer holds `limit` bytes of messages that are not acknowledged yet."""

    retriable = True

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"the producer's buffer of {limit:,} bytes is full",
            hint="Wait with `flush()` (asyncio: `await drain()`), raise `buffer_bytes`, or check the broker.",
        )
        self.limit = limit


class DeliveryTimeout(MetamqError, TimeoutError):
    """A message was not acknowledged within `timeout_s` seconds. It may be stored nevertheless."""

    retriable = True
    outcome: Outcome = "unknown"

    def __init__(
        self, what: str, timeout_s: float, reason: str = "", *, hint: str = "", outcome: Outcome = "unknown"
    ) -> None:
        tail = f" (last error: {reason})" if reason else ""
        super().__init__(
            f"{what} was not acknowledged within {round(timeout_s, 3):g} s{tail}",
            hint=hint or "Check that the broker is up with `metamq doctor`.",
            outcome=outcome,
        )
        self.timeout_s = timeout_s
        self.reason = reason


class Timeout(MetamqError, TimeoutError):
    """The caller's own time limit ended. The operation that the caller waited for continues."""

    retriable = True
    outcome: Outcome = "unknown"

    def __init__(self, what: str, timeout_s: float, *, hint: str | None = None) -> None:
        super().__init__(f"{what} took longer than {round(timeout_s, 3):g} s", hint=hint)
        self.what = what
        self.timeout_s = timeout_s


class HandlerTimeout(MetamqError):
    """The handler of a message did not end within `timeout_s`, the limit of run(), and was cancelled.

    It is no TimeoutError: run(retry_on=TimeoutError) means an outage, and would call the handler without end.
    """

    def __init__(self, topic: str, partition: str, offset: int, timeout_s: float) -> None:
        super().__init__(
            f"the handler of {topic}/{partition} offset {offset} took longer than {timeout_s:g} s",
            hint="Raise `handler_timeout_s` of run(), or find what the handler waits for.",
        )
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self.timeout_s = timeout_s


class NotEnoughReplicas(MetamqError):
    """The in-sync set has `have` members, and the topic requires `need`."""

    retriable = True

    def __init__(self, what: str, have: int, need: int, *, outcome: Outcome = "not_done") -> None:
        super().__init__(
            f"{what} has {have} in-sync replica{'' if have == 1 else 's'}, {need} needed",
            hint="`metamq ha status` shows which replica is missing.",
            outcome=outcome,
        )
        self.have = have
        self.need = need


class Fenced(MetamqError):
    """The broker is not the master now. The caller must look up the master again."""

    retriable = True

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"{what} is not the master: {reason}")
        self.reason = reason


class SequenceGap(MetamqError):
    """A batch of an idempotent producer came before its predecessor was stored."""

    retriable = True

    def __init__(self, what: str, expected: int, got: int) -> None:
        super().__init__(f"{what} expects batch {expected} of this producer next, got {got}")
        self.expected = expected
        self.got = got


class OffsetOutOfRange(MetamqError):
    """The log holds the offsets `start` to `end` (exclusive), and `offset` is outside of them.

    If a consumer raises this error, `topic` and `partition` name the log.
    """

    topic = ""
    partition = ""

    def __init__(self, what: str, offset: int, start: int, end: int, reason: str = "") -> None:
        tail = f" ({reason})" if reason else ""
        super().__init__(
            f"{what} has the offsets {start} to {end}, not {offset}{tail}",
            hint="Seek, reset the group with `metamq group reset`, or choose `on_data_loss='earliest'|'latest'`.",
        )
        self.offset = offset
        self.start = start
        self.end = end
        self.reason = reason


class OffsetDiverged(OffsetOutOfRange):
    """The log no longer has the messages that were read before `offset`: a promotion accepted their loss.

    Before the offset `agreed` the log is unchanged. `epoch` is the epoch of the message before `offset`.
    """

    def __init__(self, what: str, offset: int, start: int, end: int, agreed: int, epoch: int) -> None:
        reason = f"a promotion with an accepted loss gave up the messages read from {agreed} on"
        super().__init__(what, offset, start, end, reason)
        self.hint = "Seek to the offset to continue at, or choose `on_data_loss='earliest'|'latest'`."
        self.agreed = agreed
        self.epoch = epoch


class CorruptData(MetamqError):
    """Bytes on disk or on the wire do not match their checksum or their lengths."""

    def __init__(self, what: str, reason: str, *, position: int | None = None, hint: str | None = None) -> None:
        place = f" at byte {position:,}" if position is not None else ""
        super().__init__(f"{what} is damaged{place}: {reason}", hint=hint)
        self.position = position
        self.reason = reason


class UndecodableBatch(CorruptData):
    """A batch is stored as its producer sent it, but its messages cannot be read.

    The batch has the offsets `offset` to `end_offset` (exclusive). A seek of `(topic, partition)` to `end_offset` skips
    it.
    """

    def __init__(self, topic: str, partition: str, offset: int, end_offset: int, reason: str) -> None:
        what = f"the batch of {topic}/{partition} with the offsets {offset} to {end_offset - 1}"
        hint = (
            f"Its producer encoded it wrongly, no consumer can read it. Skip it with `seek`, or in a stopped group: "
            f"`metamq group reset GROUP {topic} --partition {partition}={end_offset}`."
        )
        super().__init__(what, reason, hint=hint)
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self.end_offset = end_offset


class DecodeError(MetamqError, ValueError):
    """A consumer's `decode` rejects a message. `__cause__` is the error of `decode`; `value` is as stored."""

    def __init__(
        self, topic: str, partition: str, offset: int, key: bytes | None, value: bytes, reason: BaseException
    ) -> None:
        super().__init__(
            f"`decode` rejects offset {offset} of {topic}/{partition}: {type(reason).__name__}: {reason}",
            hint=f"It is delivered again. `consumer.seek(({topic!r}, {partition!r}), {offset + 1})` skips it; `run()` "
            "sends it to the dead-letter topic.",
        )
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self.key = key
        self.value = value


class SchemaIncompatible(MetamqError):
    """A new schema breaks the compatibility of its topic; nothing was registered. `field` is the path of the field;
    `old` and `new` are its types, in the registered `version` and in the new schema."""

    def __init__(
        self, topic: str, version: int, field: str, old: str, new: str, reason: str, rule: str, hint: str
    ) -> None:
        super().__init__(
            f"the schema is not {rule} compatible with version {version} of topic {topic!r}: field {field!r} is "
            f"{old} in version {version} and {new} in the new schema: {reason}",
            hint=hint,
        )
        self.topic = topic
        self.version = version
        self.field = field
        self.old = old
        self.new = new
        self.reason = reason
        self.rule = rule


class StorageError(MetamqError):
    """A write or an fsync failed. Its outcome is unknown, and the broker never retries it."""

    outcome: Outcome = "unknown"


class DiskFull(StorageError):
    """The free space on the disk is below the broker's reserve: the broker refuses writes, and reads continue.

    With a reserve of 0 the disk itself refused a write: the disk is full, has no free inode, or a quota is used up.
    """

    retriable = True
    outcome: Outcome = "not_done"

    def __init__(self, path: str, free_bytes: int, reserve_bytes: int) -> None:
        problem = f"{path} has {free_bytes:,} bytes free, the broker keeps {reserve_bytes:,} in reserve"
        hint = "Free disk, shorten the retention of a topic, or lower `disk_reserve_bytes`."
        if not reserve_bytes:
            problem = f"{path}: no space is left on the disk"
            hint = "Free disk, inodes or quota (`df`, `df -i`, `quota`), or shorten the retention of a topic."
        super().__init__(problem, hint=hint)
        self.path = path
        self.free_bytes = free_bytes
        self.reserve_bytes = reserve_bytes


class TooManyOpenFiles(StorageError):
    """All file descriptors are in use: the `limit` of the process, or all of the system if `limit` is None.

    Nothing was changed. The same call works once descriptors are free.
    """

    retriable = True
    outcome: Outcome = "not_done"

    def __init__(self, what: str, limit: int | None) -> None:
        reason = f"all {limit:,} descriptors of the process" if limit is not None else "all descriptors of the system"
        super().__init__(
            f"{what}: {reason} are in use",
            hint="Raise the limit on open files: `ulimit -n`, LimitNOFILE= of systemd, `ulimits` of Compose."
            if limit is not None
            else "Raise the system's limit on open files: `sysctl fs.file-max`.",
        )
        self.limit = limit


class TooManyThreads(MetamqError):
    """The system does not let the process start the thread `name`."""

    retriable = True

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the thread {name!r} cannot be started",
            hint="The limit on processes (`ulimit -u`, `pids_limit` of a container), or the memory, is used up.",
        )
        self.name = name


class OwnershipLost(MetamqError):
    """Another consumer owns the partition now, or has committed its messages. Uncommitted messages come again."""

    def __init__(self, topic: str, partition: str, reason: str) -> None:
        super().__init__(
            f"partition {partition} of {topic!r} is refused to this consumer: {reason}",
            hint="Roll back the results of its uncommitted messages: its owner receives them again.",
        )
        self.topic = topic
        self.partition = partition
        self.reason = reason


_WITHOUT_BRANCH = ("dbtx", "Producer", "XAResource")
"""The subjects of a misuse outside of a branch."""


class TransactionError(MetamqError):
    """A transaction failed. The subclass shows the caller's next step.

    `code` is the XA code (metamq.tx.XACode), `xid` is the branch as `str(Xid)`, or "" outside of a branch.
    """

    code: int = -3  # XAER_RMERR
    xid: str = ""

    def __init__(
        self, xid: object, code: int, reason: str, *, hint: str | None = None, outcome: Outcome | None = None
    ) -> None:
        has_branch = xid not in _WITHOUT_BRANCH
        super().__init__(f"{'transaction branch ' * has_branch}{xid}: {reason}", hint=hint, outcome=outcome)
        self.xid = str(xid) if has_branch else ""
        self.code = int(code)
        self.reason = reason


class RolledBack(TransactionError):
    """The branch was rolled back, or can only be rolled back (XA_RB*). None of its messages becomes visible."""

    retriable = True
    hint = "Repeat the work in a new transaction."


class OutcomeUnknown(TransactionError):
    """No answer came (XAER_RMFAIL). The call may have succeeded: the caller must not assume a rollback."""

    retriable = True
    outcome: Outcome = "unknown"
    hint = "Ask again, or call `recover()` later."


class BranchNotKnown(TransactionError):
    """The broker does not know the branch (XAER_NOTA): it never existed, or it is finished and forgotten.

    `finished` is "committed" if the broker still remembers that the branch was committed.
    """

    finished: str = ""


class HeuristicOutcome(TransactionError):
    """An operator has committed or rolled back the branch without the transaction manager (XA_HEUR*)."""

    hint = "Compare the outcome with yours, then `forget()` the branch."


class BranchMisuse(TransactionError):
    """The call does not fit the branch's state or the previous call (XAER_PROTO, _INVAL, _DUPID, _OUTSIDE)."""


class TryLater(TransactionError):
    """The call is not possible now (XA_RETRY). The branch is unchanged."""

    retriable = True
    hint = "Call again a little later."


class ClosedError(MetamqError):
    """The object is used after close()."""

    def __init__(self, what: str, reason: str = "", *, hint: str = "") -> None:
        super().__init__(f"this {what} is closed" + (f": {reason}" if reason else ""), hint=hint)


def closed_client(what: str, reason: str = "") -> ClosedError:
    """Returns the error for a user's client that was closed."""
    return ClosedError(what, reason, hint="Make a new one.")
