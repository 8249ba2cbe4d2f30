"""XAResource: the verbs of XA at one broker, for a transaction coordinator. The core of both APIs.

A resource works in one branch at a time, as XA defines for a thread of control; others may be suspended. It collects
messages into batches. A batch is sent when it is full and at end().
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from metamq.client.checks import check_ranges, is_number, wrong_type
from metamq.client.net.branches import ANSWER_S, Branch, BranchDescription, Encoded, TxClient, new_session
from metamq.client.net.first_contact import OwnCluster
from metamq.client.producer.partitioner import Partitioner, partitioner_named
from metamq.client.producer.producer_api import checked_message
from metamq.errors import BranchMisuse, BranchNotKnown, ConfigError, OutcomeUnknown, RolledBack
from metamq.tx.app.staging import Routes, Staging
from metamq.wire.compression import codec_named
from metamq.wire.limits import BATCH_BYTES_MAX, BATCH_TARGET_BYTES, MESSAGE_BYTES_MAX
from metamq.wire.xa import Verb, XACode, Xid
from metamq.zk.cluster.brokers import known_cluster_id

if TYPE_CHECKING:
    from metamq.client.settings import ClusterAccess

TIMEOUT_MAX_S = 24 * 3600


class TM(enum.IntFlag):
    """The flags of XA, by their numbers there."""

    NOFLAGS = 0
    JOIN = 0x00200000
    ENDRSCAN = 0x00800000
    STARTRSCAN = 0x01000000
    SUSPEND = 0x02000000
    SUCCESS = 0x04000000
    RESUME = 0x08000000
    FAIL = 0x20000000
    ONEPHASE = 0x40000000


class Vote(enum.Enum):
    """The answer of prepare()."""

    OK = "prepared: commit it or roll it back"
    RDONLY = "there was nothing in it: it is finished"


_STARTS = {TM.NOFLAGS: Verb.START, TM.JOIN: Verb.JOIN, TM.RESUME: Verb.RESUME}
_ENDS = {TM.SUCCESS: Verb.END, TM.FAIL: Verb.FAIL, TM.SUSPEND: Verb.SUSPEND}


@dataclass(frozen=True, slots=True)
class XAOptions:
    """Settings of a resource; construction validates."""

    batch_bytes: int = BATCH_TARGET_BYTES
    """The size at which a batch is sent."""
    max_message_bytes: int = MESSAGE_BYTES_MAX
    compression: str | None = None
    """None, "lz4" or "zstd"."""
    partitioner: str | Partitioner = "key_hash"
    request_timeout_s: float = ANSWER_S
    """Seconds that a verb waits for its answer. Then its outcome is unknown."""

    def __post_init__(self) -> None:
        limits = {
            "batch_bytes": (1, BATCH_BYTES_MAX // 4),
            "max_message_bytes": (1, MESSAGE_BYTES_MAX),
            "request_timeout_s": (0.05, 3600),
        }
        check_ranges("xa", self, limits, real="request_timeout_s")
        codec_named(self.compression)
        partitioner_named(self.partitioner)


class _WorkBranch:
    """A branch that this resource has begun or joined."""

    def __init__(self, branch: Branch, staging: Staging) -> None:
        self.branch = branch
        self.staging = staging
        self.unsent: deque[list[Encoded]] = deque()
        """Batches that the broker has not acknowledged. A repeated request has the same batches."""
        self.unsure: Verb | None = None
        """The last START, END or similar verb if it got no answer: a repeated call may find that it was done."""


class XACore(OwnCluster):
    """The verbs of XA, for the loop that opens it. See metamq.tx.XAResource for its methods and their errors."""

    def __init__(self, broker_id: int, options: XAOptions) -> None:
        if type(broker_id) is not int or broker_id < 0:
            raise ConfigError(f"`broker` is {broker_id!r}", hint="It is a broker's id: `metamq ha status` lists them.")
        super().__init__("XAResource", "Use `async with`.")
        self.broker_id = broker_id
        self._options = options
        self._routes = Routes(
            options.batch_bytes,
            options.max_message_bytes,
            partitioner_named(options.partitioner),
            codec_named(options.compression),
            {broker_id},
        )
        self._session_name = new_session()
        self._place = ""
        """Identifies the cluster."""
        self._timeout_s = 0.0
        self._current: _WorkBranch | None = None
        self._others: dict[Xid, _WorkBranch] = {}
        """Branches that are suspended, or ended and not finished yet."""

    async def open(self, access: ClusterAccess) -> None:
        """Connects to ZooKeeper. Raises ConnectError."""
        await super().open(access)
        self._client = TxClient(self.cluster)
        try:
            self._place = await known_cluster_id(self.cluster.session) or f"{access.zookeeper}{access.root}"
        except BaseException:
            await self.close()
            raise

    def is_same_rm(self, other: XACore) -> bool:
        """True if both reach the same broker id of the same cluster."""
        return self.broker_id == other.broker_id and self._place == other._place

    def _open_client(self) -> TxClient:
        if self.closed_by is not None:
            raise self.closed_by.with_traceback(None)
        return self._client

    async def _ask(self, branch: Branch, *verbs: Verb, **fields: float) -> XACode:
        client = self._open_client()
        return await client.ask(branch, verbs, timeout_s=self._options.request_timeout_s, **fields)  # type: ignore[arg-type]

    # -- work ---------------------------------------------------------------------------------------------------------

    async def start(self, xid: Xid, flags: TM, timeout_s: float | None) -> None:
        verb = _STARTS.get(flags)
        if verb is None:
            raise _invalid(xid, f"start() takes NOFLAGS, JOIN or RESUME, not {flags!r}")
        if self._current is not None:
            raise BranchMisuse(
                _valid(xid), XACode.PROTO, f"the resource works in {self._current.branch.xid}", hint="end() it."
            )
        work = self._others.get(_valid(xid))
        if work is None or (verb is Verb.START and work.unsure is not verb):
            work = self._joined(xid)
        try:
            await self._ask(work.branch, verb, branch_timeout_s=self._timeout_s if timeout_s is None else timeout_s)
        except OutcomeUnknown:
            work.unsure = verb
            self._others.setdefault(xid, work)
            raise
        except BranchMisuse:
            if work.unsure is not verb or not await self._is_worked_in(work.branch, verb):
                raise
        work.unsure = None
        self._others.pop(xid, None)
        self._current = work

    def _joined(self, xid: Xid) -> _WorkBranch:
        return _WorkBranch(Branch(xid, self.broker_id, self._session_name), Staging(self._routes))

    async def _is_worked_in(self, branch: Branch, verb: Verb) -> bool:
        """True if the first call was carried out, after the repeated call was refused."""
        for one in await self._open_client().branches(self.broker_id, all_of_them=True):
            if one.xid == branch.xid and one.state == "active" and branch.epoch in (0, one.epoch):
                branch.epoch = one.epoch
                return verb is not Verb.START or one.owner == branch.session
        return False

    async def send(
        self,
        topic: str,
        value: bytes,
        key: bytes | str | None,
        headers: Mapping[str, bytes] | None,
        partition: str | None,
        timestamp: datetime | int | None,
    ) -> None:
        client = self._open_client()
        message = checked_message(value, key, headers, partition, timestamp)
        work = self._current
        if work is None:
            raise BranchMisuse("XAResource", XACode.PROTO, "the resource works in no branch", hint="start() one.")
        work.staging.add(await self.cluster.topic(topic), message)
        full = work.staging.full(self.broker_id)
        if full:
            work.unsent.append(full)
            await self._send_unsent(client, work)

    async def end(self, xid: Xid, flags: TM) -> None:
        verb = _ENDS.get(flags)
        if verb is None:
            raise _invalid(xid, f"end() takes SUCCESS, FAIL or SUSPEND, not {flags!r}")
        work = self._current
        if work is not None and work.branch.xid == xid:
            self._current = None
            self._others[xid] = work
        else:
            work = self._others.get(_valid(xid))
        if work is None:
            raise BranchMisuse(xid, XACode.PROTO, "the resource does not work in it")
        if verb is Verb.FAIL:
            work.unsent.clear()
        elif rest := work.staging.rest(self.broker_id):
            work.unsent.append(rest)
        await self._send_unsent(self._open_client(), work, verb)

    async def _send_unsent(self, client: TxClient, work: _WorkBranch, last: Verb | None = None) -> None:
        """Sends the unsent batches, then the verb. After an error the same call sends all that is missing."""
        while work.unsent or last is not None:
            batches = work.unsent[0] if work.unsent else []
            is_last = last is not None and len(work.unsent) <= 1
            verbs = [Verb.SEND] if batches else []
            if last is not None and is_last:
                verbs.append(last)
            await self._send_once(client, work, verbs, batches)
            if batches:
                work.unsent.popleft()
            if is_last:
                return

    async def _send_once(self, client: TxClient, work: _WorkBranch, verbs: list[Verb], batches: list[Encoded]) -> None:
        try:
            await client.ask(work.branch, verbs, batches, timeout_s=self._options.request_timeout_s)
            work.unsure = None
        except OutcomeUnknown:
            work.unsure = verbs[-1]
            raise
        except BranchMisuse:
            if verbs[-1] is Verb.SEND or work.unsure is not verbs[-1]:
                raise
            work.branch.batches += len(batches)  # the first call has ended the work, and stored these batches

    # -- the end of a branch ------------------------------------------------------------------------------------------

    async def prepare(self, xid: Xid) -> Vote:
        code = await self._ending(xid, Verb.PREPARE, messages=self._messages_of(xid))
        if code is XACode.RDONLY:
            self._others.pop(xid, None)
            return Vote.RDONLY
        return Vote.OK

    async def commit(self, xid: Xid, one_phase: bool) -> None:
        if not one_phase:
            await self._ending(xid, Verb.COMMIT)
        else:
            try:
                await self._ending(xid, Verb.COMMIT_ONE_PHASE, messages=self._messages_of(xid))
            except OutcomeUnknown:
                await self._open_client().resolve(self._branch_of(xid), self._options.request_timeout_s)
        self._others.pop(xid, None)

    async def rollback(self, xid: Xid) -> None:
        await self._ending(xid, Verb.ROLLBACK)
        self._others.pop(xid, None)

    async def forget(self, xid: Xid) -> None:
        await self._ending(xid, Verb.FORGET)
        self._others.pop(xid, None)

    async def _ending(self, xid: Xid, verb: Verb, **fields: float) -> XACode:
        try:
            return await self._ask(self._branch_of(xid), verb, **fields)
        except (RolledBack, BranchNotKnown):
            self._others.pop(xid, None)
            raise

    async def recover(self, flags: TM) -> list[BranchDescription]:
        if not flags & TM.STARTRSCAN:  # the start of the scan returned all of them
            return []
        # A branch that follows another broker's decision ends without the caller's decision.
        return [one for one in await self._open_client().branches(self.broker_id) if one.follows is None]

    def set_timeout(self, timeout_s: float) -> None:
        if not is_number(timeout_s) or not 0 <= timeout_s <= TIMEOUT_MAX_S:
            raise _invalid(
                "(any)", f"a time-out of {timeout_s!r} s: it is 0 to {TIMEOUT_MAX_S:,}, 0 is the broker's own"
            )
        self._timeout_s = float(timeout_s)

    def _branch_of(self, xid: Xid) -> Branch:
        """Returns the known branch; for one that another process has begun, a branch with its id only."""
        work = self._others.get(_valid(xid))
        if work is None and self._current is not None and self._current.branch.xid == xid:
            work = self._current
        return work.branch if work is not None else Branch(xid, self.broker_id, self._session_name)

    def _messages_of(self, xid: Xid) -> int:
        """Returns the number of messages that this resource sent in the branch; -1: it does not know the branch."""
        work = self._others.get(xid)
        return -1 if work is None else work.staging.taken[self.broker_id]


def _valid(xid: Xid) -> Xid:
    """Returns `xid`. Raises WrongType; BranchMisuse with the code of XA if a part of it is too long, or empty."""
    if not isinstance(xid, Xid):
        raise wrong_type("`xid`", "a metamq.tx.Xid", xid)
    try:
        return xid.check()
    except ConfigError as error:
        raise _invalid(f"of format {xid.format_id!r}", error.problem) from None


def _invalid(xid: object, reason: str) -> BranchMisuse:
    return BranchMisuse(xid, XACode.INVAL, reason)
