"""The transactions of a producer: the common part of the blocking and the asyncio Producer."""

from __future__ import annotations

import asyncio
import logging
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, Protocol, cast

from metamq.client.checks import check_seconds, wrong_type
from metamq.client.producer.producer_api import Key, ProducerApi, as_bytes, checked_headers, key_bytes, timestamp_us
from metamq.client.typevars import T
from metamq.errors import BranchMisuse, ConfigError, MetamqError
from metamq.tx.app.staging import AnyMessage, StagedMessage
from metamq.tx.app.transactions import OpenTransaction, Transactions, misuse
from metamq.wire.xa import Xid
from metamq.words import count
from metamq.zk.names import parse_partition

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

    `_has_transactions` is set only while there is one: a producer without transactions pays for that check alone.
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
            self._has_transactions = True
        return one

    def _abandon(self) -> None:
        """Frees the caller from its transaction, in whatever state that is."""
        one = self._transactions.of(self._owner())
        if one is not None:
            self._leave(one)

    def _leave(self, one: OpenTransaction) -> None:
        """Ends the work in a transaction: later messages are not part of it."""
        transactions = self._transactions
        with transactions.lock:
            transactions.leave(one)
            self._has_transactions = transactions.any

    def _enter_block(self, block: Block) -> None:
        """Refuses this producer's own sends in this context until _leave_block(): they would go out at once, also if
        the block fails."""
        transactions = self._transactions
        with transactions.lock:
            transactions.blocks.add(block)
            self._has_transactions = True
        left = (each for each in _working_in.get() if (known := each()) is not None and known.is_active)
        _working_in.set((*left, weakref.ref(block)))

    def _leave_block(self, block: Block) -> None:
        transactions = self._transactions
        with transactions.lock:
            transactions.blocks.discard(block)
            self._has_transactions = transactions.any

    def _check_outside_blocks(self, xid: object = "(none)") -> None:
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

    def _leave_all(self) -> list[OpenTransaction]:
        """Leaves the transactions of all threads and tasks. Returns them."""
        transactions = self._transactions
        with transactions.lock:
            found = transactions.leave_all()
            self._has_transactions = transactions.any
        return found

    def _ends_with_the_producer(self, one: OpenTransaction) -> bool:
        """Logs a transaction that the producer's close finds open. True if it must be rolled back: a prepared one
        stays, as PEP 249 demands it of connections."""
        if one.prepared:
            log.warning("transaction %s is prepared, and stays prepared: tpc_recover() finds it", one.xid)
        elif one.prepared is None:
            log.warning("transaction %s was not committed, and is rolled back with its producer", one.xid)
        return not one.prepared

    def _message(
        self,
        value: T,
        key: Key,
        headers: Mapping[str, bytes] | None,
        partition: str | None,
        timestamp: datetime | int | None,
    ) -> AnyMessage:
        plain: Any = value if self._encode is None else self._encode(value)
        if key is None and headers is None and partition is None and timestamp is None:
            return as_bytes(plain, "value")
        if partition is not None:
            parse_partition(partition)
        return StagedMessage(
            as_bytes(plain, "value"), key_bytes(key), checked_headers(headers), partition, timestamp_us(timestamp)
        )

    def _messages(self, values: Sequence[T], keys: Sequence[Key] | None) -> list[AnyMessage]:
        if isinstance(values, bytes | str):
            raise wrong_type("`values`", "a list of values", values)
        plain: list[Any] = list(values)
        if keys is None:
            if self._encode is not None:
                plain = [self._encode(value) for value in plain]
            if set(map(type, plain)) - {bytes}:
                plain = [as_bytes(value, "value") for value in plain]
            return plain
        all_keys = list(keys)
        if len(all_keys) != len(plain):
            problem = f"send_many() got {count(len(all_keys), 'key')} for {count(len(plain), 'value')}"
            raise ConfigError(problem, hint="Give one for each; None means no key.")
        return [self._message(value, key, None, None, None) for value, key in zip(plain, all_keys, strict=True)]

    # -- PEP 249 ------------------------------------------------------------------------------------------------------

    def xid(self, format_id: int, gtrid: bytes | str, bqual: bytes | str = b"") -> Xid:
        """Returns the id of a transaction, for tpc_begin(). Text is encoded in UTF-8. Raises ConfigError."""
        parts = [part.encode() if isinstance(part, str) else part for part in (gtrid, bqual)]
        return Xid(format_id, *parts).check()

    def _new_xid(self) -> Xid:
        return Xid.random(b"local:")

    def _xid_of(self, xid: Xid | str) -> Xid:
        if isinstance(xid, str):
            return Xid.parse(xid)
        if not isinstance(xid, Xid):
            raise wrong_type("`xid`", "the result of xid()", xid)
        return xid.check()

    def _to_prepare(self) -> OpenTransaction:
        """Returns the transaction for tpc_prepare(). Raises BranchMisuse if the call is not allowed now."""
        self._check_usable()
        one = self._tpc()
        if one is None:
            raise misuse("(none)", "tpc_prepare() needs a tpc_begin() in this thread or task before")
        if one.prepared is not None:
            raise misuse(one.xid, "tpc_prepare() was called before")
        return one

    def _tpc(self) -> OpenTransaction | None:
        one = self._transactions.of(self._owner())
        return one if one is not None and one.is_tpc else None

    def _inside(self, call: str) -> OpenTransaction:
        """Returns the caller's two-phase transaction. Raises BranchMisuse if there is none."""
        self._check_usable()
        one = self._tpc()
        if one is None:
            raise misuse("(none)", f"{call} without an id needs a tpc_begin() in this thread or task before")
        return one

    def _outside(self, call: str, xid: Xid | str) -> Xid:
        """Returns the id. Raises BranchMisuse inside of a transaction."""
        self._check_usable()
        known = self._transactions.of(self._owner())
        if known is not None:
            raise misuse(known.xid, f"{call} with an id is not allowed in a transaction: end it first")
        return self._xid_of(xid)


class EnterOnce:
    """A block that warns if it was never entered: then its messages were sent without a transaction."""

    _way: str
    _entered = False

    def _entering(self, xid: Xid) -> Xid:
        """Returns `xid`. Raises BranchMisuse the second time."""
        if self._entered:
            raise misuse(xid, "a transaction() block can be entered once", hint="Call transaction() for each block.")
        self._entered = True
        return xid

    def __del__(self) -> None:
        if not self._entered:
            text = f"transaction() was never entered, and has no effect: use `{self._way} producer.transaction():`"
            warnings.warn(text, RuntimeWarning, stacklevel=2, source=self)


def current_task() -> asyncio.Task[Any] | None:
    """Returns the current task; None outside of a task, also outside of a loop."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
