"""The transactions of a producer: the common part of the blocking and the asyncio Producer."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol, cast

from metamq.client.checks import check_seconds, wrong_type
from metamq.client.producer.producer_api import Key, ProducerApi
from metamq.client.typevars import T
from metamq.errors import BranchMisuse, BranchNotKnown, MetamqError
from metamq.tx.app.transactions import OpenTransaction, RecoveredXid, Transactions, misuse, warn_of_unreached
from metamq.wire.xa import Verb, Xid

if TYPE_CHECKING:
    from metamq.client.producer.outgoing import AnyMessage, Delivery, ManyDelivery

log = logging.getLogger("metamq.tx")

_working_in: ContextVar[tuple[weakref.ref[Block], ...]] = ContextVar("working_in", default=())
"""Blocks that were entered in this context; some may have ended since. A thread pool may give a thread to another user
between the beginning and the end of a block; a context has one user only."""


class Block(Protocol):
    """A block with a `send` of its own, such as a dbtx. In it the producer's `send` must not be called."""

    @property
    def is_active(self) -> bool: ...


class TransactionalProducer(ProducerApi[T]):
    """A producer with transactions. If a thread or task works in a transaction, `send` and `send_many` look it up.

    `_has_transactions` is set only while there is one: without transactions a producer only makes that check.
    """

    Error = MetamqError
    """The root of all errors, as PEP 249 demands it of connections."""
    ProgrammingError = BranchMisuse

    _known_transactions: Transactions

    def _owner(self) -> Any:
        raise AssertionError("a subclass returns its thread or task")

    @property
    def _transactions(self) -> Transactions:
        known = self.__dict__.get("_known_transactions")
        if known is None:  # setdefault(): two threads that come first at the same time must get the same object
            known = self.__dict__.setdefault("_known_transactions", Transactions(self._core))
        return cast(Transactions, known)

    def _begin(self, xid: Xid, timeout_s: float, *, is_tpc: bool) -> OpenTransaction:
        check_seconds("timeout_s", timeout_s, optional=False)
        transactions = self._transactions
        self._check_outside_blocks(xid)
        with transactions.lock:
            one = transactions.begin(self._owner(), xid, timeout_s, is_tpc=is_tpc)
            self._set_transactions(True)
        return one

    def _abandon(self) -> None:
        """Detaches the caller from its transaction, in any state of the transaction."""
        one = self._transactions.of(self._owner())
        if one is not None:
            self._leave(one)

    def _leave(self, one: OpenTransaction) -> None:
        """Ends the work in a transaction: later messages are not part of it."""
        transactions = self._transactions
        with transactions.lock:
            transactions.leave(one)
            self._set_transactions(transactions.any)

    def _enter_block(self, block: Block) -> None:
        """Refuses this producer's own sends in this context until _leave_block(): they would go out at once, even if
        the block fails."""
        transactions = self._transactions
        with transactions.lock:
            transactions.blocks.add(block)
            self._set_transactions(True)
        left = (each for each in _working_in.get() if (known := each()) is not None and known.is_active)
        _working_in.set((*left, weakref.ref(block)))

    def _leave_block(self, block: Block) -> None:
        transactions = self._transactions
        with transactions.lock:
            transactions.blocks.discard(block)
            self._set_transactions(transactions.any)

    def _check_outside_blocks(self, xid: object = "Producer") -> None:
        """Raises BranchMisuse inside of a block."""
        blocks = self._transactions.blocks
        if not blocks:
            return
        for block in [each() for each in _working_in.get()]:
            if block is not None and block.is_active and block in blocks:
                raise misuse(
                    xid,
                    "this is in a dbtx block of the producer, and would not be part of it",
                    hint="`tx.send` sends with the block: `with dbtx(connection, producer) as tx`. For a message that "
                    "does not belong to the block use another Producer, or send it after the block.",
                )

    async def _end_all(self) -> None:
        """Rolls back the transactions of all threads and tasks, at the producer's close. Prepared ones stay, as PEP 249
        demands of connections."""
        transactions = self._transactions
        with transactions.lock:
            found = transactions.leave_all()
            self._set_transactions(transactions.any)
        for one in found:
            if one.prepared:
                log.warning("transaction %s is prepared, and stays prepared: tpc_recover() finds it", one.xid)
                continue
            if one.prepared is None:
                log.warning("transaction %s was not committed, and is rolled back with its producer", one.xid)
            try:
                await self._roll_back_now(one)
            except Exception as error:  # the other transactions must be closed, too
                log.warning("transaction %s is rolled back by its brokers after its time-out: %s", one.xid, error)

    async def _roll_back_now(self, one: OpenTransaction) -> None:
        warn_of_unreached(one, await self._transactions.rollback(one))

    # -- sending ------------------------------------------------------------------------------------------------------

    def _send_in(
        self,
        topic: str,
        value: T,
        key: Key,
        headers: Mapping[str, bytes] | None,
        partition: str | None,
        timestamp: datetime | int | None,
    ) -> Delivery | None:
        one = self._sending_in()
        if one is None:
            return None
        message = self._message(value, key, headers, partition, timestamp)
        self._wait_for_capacity(one)
        return one.outbox.add(topic, message)

    def _send_many_in(self, topic: str, messages: Callable[[], list[AnyMessage]]) -> ManyDelivery | None:
        one = self._sending_in()
        if one is None:
            return None
        self._wait_for_capacity(one)
        return one.outbox.add_many(topic, messages())

    def _sending_in(self) -> OpenTransaction | None:
        """Returns the caller's transaction. Raises BranchMisuse inside of a dbtx block."""
        self._check_outside_blocks()
        one = self._transactions.of(self._owner())
        if one is not None:
            self._check_usable()
        return one

    def _wait_for_capacity(self, one: OpenTransaction) -> None:
        """Waits while the transaction's queue is full. The asyncio Producer does not wait here: it has drain()."""

    # -- PEP 249 ------------------------------------------------------------------------------------------------------

    def xid(self, format_id: int, gtrid: bytes | str, bqual: bytes | str = b"") -> Xid:
        """Returns the id of a transaction, for tpc_begin(). Text is encoded in UTF-8. Raises ConfigError."""
        parts = [part.encode() if isinstance(part, str) else part for part in (gtrid, bqual)]
        return Xid(format_id, *parts).check()

    def _xid_of(self, xid: Xid | str) -> Xid:
        if isinstance(xid, str):
            return Xid.parse(xid)
        if not isinstance(xid, Xid):
            raise wrong_type("`xid`", "the result of xid()", xid)
        return xid.check()

    # These check a call in its thread or task, and return its work for the loop.

    def _to_prepare(self) -> Coroutine[Any, Any, bool]:
        self._check_usable()
        one = self._tpc()
        if one is None:
            raise misuse("Producer", "tpc_prepare() needs a tpc_begin() in this thread or task before")
        if one.prepared is not None:
            raise misuse(one.xid, "tpc_prepare() was called before")
        return self._transactions.prepare(one)

    def _to_commit(self, xid: Xid | str | None) -> Coroutine[Any, Any, None]:
        if xid is not None:
            return self._transactions.finish(self._outside("tpc_commit()", xid), Verb.COMMIT)
        one = self._inside("tpc_commit()")
        if one.prepared is None:
            self._leave(one)
        return self._left_after(one, self._transactions.commit)

    def _to_roll_back(self, xid: Xid | str | None) -> Coroutine[Any, Any, None]:
        if xid is not None:
            return self._transactions.finish(self._outside("tpc_rollback()", xid), Verb.ROLLBACK)
        one = self._inside("tpc_rollback()")
        return self._left_after(one, self._transactions.tpc_rollback)

    async def _left_after(self, one: OpenTransaction, end: Callable[[OpenTransaction], Awaitable[None]]) -> None:
        try:
            await end(one)
        except BranchNotKnown:  # another process has ended it
            self._leave(one)
            raise
        self._leave(one)

    def _to_recover(self) -> Coroutine[Any, Any, list[RecoveredXid]]:
        self._check_usable()
        if self._transactions.of(self._owner()) is not None:
            raise misuse("(any)", "tpc_recover() is not allowed in a transaction: end it first")
        return self._transactions.recover()

    def _tpc(self) -> OpenTransaction | None:
        one = self._transactions.of(self._owner())
        return one if one is not None and one.is_tpc else None

    def _inside(self, call: str) -> OpenTransaction:
        """Returns the caller's two-phase transaction. Raises BranchMisuse if there is none."""
        self._check_usable()
        one = self._tpc()
        if one is None:
            raise misuse("Producer", f"{call} without an id needs a tpc_begin() in this thread or task before")
        return one

    def _outside(self, call: str, xid: Xid | str) -> Xid:
        """Returns the id. Raises BranchMisuse inside of a transaction."""
        self._check_usable()
        known = self._transactions.of(self._owner())
        if known is not None:
            raise misuse(known.xid, f"{call} with an id is not allowed in a transaction: end it first")
        return self._xid_of(xid)


class TransactionBlock:
    """The result of transaction(). Warns if it was never entered: then its messages were sent without a transaction."""

    _way: str
    _one: OpenTransaction
    _entered = False

    def __init__(self, producer: TransactionalProducer[Any], timeout_s: float) -> None:
        self._producer = producer
        self._timeout_s = timeout_s

    def _enter(self) -> Xid:
        """Begins the transaction, and returns its id. Raises BranchMisuse the second time."""
        producer, xid = self._producer, Xid.random(b"local:")
        if self._entered:
            raise misuse(xid, "a transaction() block can be entered once", hint="Call transaction() for each block.")
        self._entered = True
        producer._check_usable()
        self._one = producer._begin(xid, self._timeout_s, is_tpc=False)
        return xid

    def __del__(self) -> None:
        if not self._entered:
            text = f"transaction() was never entered, and has no effect: use `{self._way} producer.transaction():`"
            warnings.warn(text, RuntimeWarning, stacklevel=2, source=self)
