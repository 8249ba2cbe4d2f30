"""HAClient: the slave's side of replication.

It follows one master at a time, by one link after the other (metamq.broker.ha.slave_link). Its states:

    READY       no link: connects to the master when its address is known, with growing pauses
    HANDSHAKE   has sent JOIN and waits for the ACCEPT
    TRANSFER    sends the ends and epochs of its logs, continues where the master decides, acknowledges what it holds
    SHUTDOWN    stopped
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from metamq.broker.ha.attempts import HAState, LinkAttempts
from metamq.broker.ha.slave_link import SlaveLink
from metamq.broker.log_once import LogOnce
from metamq.client.fetch.damage import report_to
from metamq.client.net.transport import BrokerConnection
from metamq.errors import ConnectError, DiskFull, Fenced, MetamqError, ProtocolError, StorageError
from metamq.wire import sync
from metamq.wire.commands import LATEST, OffsetsEntry
from metamq.zk.cluster.epochs import CLASSES, master_of_epoch

if TYPE_CHECKING:
    from metamq.broker.data.flusher import Flusher
    from metamq.broker.data.partition import Partition
    from metamq.broker.data.topics import Topics
    from metamq.broker.log.replicated import CopyDamaged
    from metamq.security.tls import ClientSecurity
    from metamq.zk.cluster.registrations import BrokerAddress, Registration

log = logging.getLogger("metamq.broker")

JOIN_TIMEOUT_S = 5.0
REFUSALS_ENOUGH = 2


class GivenUp(NamedTuple):
    """Messages of `async` topics that were cut from the logs of a former master, which may have acknowledged them."""

    epoch: int
    """The last epoch of these messages."""
    messages: Mapping[str, int]
    """Their number by topic."""


class HAClient:
    """The link of this replica to its master. Used by the broker's loop only.

    follow() sets the master; run() keeps a link to it until it is cancelled. `failed` is called when the disk fails:
    the broker must end.
    """

    def __init__(
        self,
        registration: Callable[[], Registration],
        topics: Topics,
        flusher: Flusher,
        *,
        learner: bool,
        security: ClientSecurity | None,
        generation: Callable[[], int],
        known_epoch: Callable[[], int],
        begun: Callable[[int], None],
        followed: Callable[[int], None],
        gave_up: Callable[[GivenUp], None],
        changed: Callable[[], None],
        full: Callable[[], DiskFull | None],
        failed: Callable[[MetamqError], None],
    ) -> None:
        """`known_epoch` returns the highest epoch that this replica knows, `begun` stores a newer one.

        `full` returns the reason why nothing can be stored now. On a full disk there is no link: retention or an
        operator must free space first. `followed` stores a broker generation when all logs follow it. `gave_up` takes
        the messages that this replica has acknowledged as a former master and then gave up. `changed` is
        called when a partition becomes readable, and when the master's address refuses connections.
        """
        self.state = HAState.READY
        self.epoch = 0
        self.received_bytes = 0  # of logs, since this replica became a slave
        self._registration = registration
        self._topics = topics
        self._flusher = flusher
        self._learner = learner
        self._security = security
        self._generation = generation
        self._known_epoch = known_epoch
        self._begun = begun
        self._followed = followed
        self._gave_up = gave_up
        self._was_master = master_of_epoch(known_epoch()) == registration().replica % CLASSES
        """True until all logs follow the next master: this replica was the last one."""
        self._given_up: list[GivenUp] = []  # one for each log that was cut since the last report
        self._heard_at: float | None = None
        """The time of the last frame on the former link, on the clock of the loop, time.monotonic()."""
        self._noticed = changed
        self.full = full
        self._failed = failed
        self.master: BrokerAddress | None = None  # to follow
        self.readable: set[Partition] = set()
        """Partitions that have held all stable messages at some time on a link. They may be offered to readers."""
        self._changed = asyncio.Event()
        self._is_leaving = False
        self.attempts = LinkAttempts()
        self.refusals = 0  # connections in a row that the master's address has refused since the last link
        self._link: SlaveLink | None = None
        self._log_once = LogOnce()
        self._damaged: OffsetsEntry | None = None
        """A batch that came damaged and is not reported to the master yet."""

    @property
    def incarnation(self) -> int:
        """The present incarnation of this replica."""
        return self._registration().incarnation

    def follow(self, master: BrokerAddress | None) -> None:
        """Sets the master to follow, or None."""
        if master != self.master:
            self.master = master
            self.refusals = 0
            self._changed.set()
            self.attempts.hurry()
            if self._link is not None:
                self._link.end(ConnectError("the master", "it is another one now"))

    async def run(self) -> None:
        """Keeps a link to the master, until cancelled."""
        try:
            while True:
                self._changed.clear()
                self.attempts.begin()
                master = self.master
                if master is None or self._is_leaving or master.replica == self._registration().replica:
                    await self._changed.wait()
                    continue
                try:
                    if (full := self.full()) is not None:
                        raise full.with_traceback(None)
                    error = await self._serve_while_it_is(master)
                except MetamqError as never_began:
                    error = never_began
                    self.attempts.failed(error)
                    self._count_refusal(error)
                if isinstance(error, StorageError) and not error.retriable:
                    self._failed(error)
                    return
                self._log_once.failed(f"no link to the master at {master.address}", error)
                await self._report_damage(master)
                self.state = HAState.READY
                await self.attempts.pause()
        finally:
            self.state = HAState.SHUTDOWN

    def _count_refusal(self, error: MetamqError) -> None:
        is_refusal = isinstance(error.__cause__, ConnectionRefusedError)
        self.refusals = self.refusals + 1 if is_refusal else 0
        if self.refusals == REFUSALS_ENOUGH:
            self._noticed()

    async def _serve_while_it_is(self, master: BrokerAddress) -> MetamqError:
        """Runs _serve(), and ends it when the master changes, even during a handshake: a former master that hangs, or
        is cut off from ZooKeeper, must not keep this slave."""
        serving = asyncio.ensure_future(self._serve(master))
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait({serving, changed}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                return serving.result()
            return ConnectError("the master", "it is another one now")
        finally:
            serving.cancel()
            changed.cancel()
            await asyncio.gather(serving, changed, return_exceptions=True)

    async def _serve(self, master: BrokerAddress) -> MetamqError:
        """Runs one link; returns the reason for its end. Raises the error if the link did not begin."""
        self.state = HAState.HANDSHAKE
        connection = await BrokerConnection.open(master.host, master.port, security=self._security)
        link = SlaveLink(self, connection, self._topics, self._flusher)
        try:
            me = self._registration()
            accept = await connection.stream(
                sync.Join(
                    sync.JOIN, self._known_epoch(), sync.MAGIC, me.broker_id, me.replica, me.incarnation, me.folder,
                    self._learner, self._generation(),
                ),
                link.received,
                timeout_s=JOIN_TIMEOUT_S,
            )  # fmt: skip
            frame = sync.unpack_from_master(accept)
            if not isinstance(frame, sync.Accept):
                raise ProtocolError(f"{master.address} answered a Join with {type(frame).__name__}")
            if frame.epoch < self._known_epoch():  # it would cut messages of a later master
                what = f"replica {master.replica} of broker {me.broker_id}"
                reason = f"it is in epoch {frame.epoch}, and this replica has seen epoch {self._known_epoch()}"
                raise Fenced(what, reason)
            self._begun(frame.epoch)  # durably, before a frame of the epoch is applied
            self.epoch = frame.epoch
            self._link = link
            self._log_once.worked(f"linked to the master at {master.address} again")
            link.begin(frame)
            self.state = HAState.TRANSFER
            self.refusals = 0
            self.attempts.linked()
            return await link.ended
        finally:
            self._link, self._heard_at = None, link.heard_at
            link.close()
            await connection.close()

    # -- events in the broker -----------------------------------------------------------------------------------------

    def opened(self, partition: Partition) -> None:
        """Attaches a partition that was opened here: its topic was created or enlarged."""
        if self._link is not None:
            self._link.attach([partition])

    def closed(self, partition: Partition) -> None:
        """Detaches a partition that was closed here: ZooKeeper does not list it any more."""
        self.readable.discard(partition)
        if self._link is not None:
            self._link.detach(partition)

    def flushes_now(self, partition: Partition) -> None:
        """Flushes a partition: from now on only its flushed messages count, old and new."""
        if self._link is not None:
            self._link.flushes_now(partition)

    def holds_stable(self, partition: Partition) -> None:
        """Notes that a partition holds all messages that are stable at the master."""
        if partition not in self.readable:
            self.readable.add(partition)
            self._noticed()

    def was_cut(self, partition: Partition, last_epoch: int, messages: int) -> None:
        """Notes that this number of messages was cut from the end of a log with this last epoch.

        The last master may have acknowledged them on `async` topics. A later master was asked for its messages, or an
        operator accepted the loss.
        """
        is_own = self._was_master and master_of_epoch(last_epoch) == self._registration().replica % CLASSES
        if is_own and self._topics.config(partition.topic).replication == "async":
            self._given_up.append(GivenUp(last_epoch, {partition.topic: messages}))

    def all_decided(self, generation: int) -> None:
        """Notes that all logs follow this broker generation. Reports the messages that this replica gave up."""
        self._followed(generation)
        self._was_master = False
        if self._given_up:
            messages = Counter[str]()
            for one in self._given_up:
                messages.update(one.messages)
            self._gave_up(GivenUp(max(one.epoch for one in self._given_up), messages))
            self._given_up.clear()

    def came_damaged(self, partition: Partition, damage: CopyDamaged) -> None:
        """Notes a batch that came damaged: on the way, or in the master's log."""
        place = partition.topic, partition.topic_id, partition.index
        self._damaged = OffsetsEntry(*place, LATEST, damaged=damage.offset)

    async def _report_damage(self, master: BrokerAddress) -> None:
        """Reports the damaged batch. The master then verifies its log: the next link could end the same way."""
        entry, self._damaged = self._damaged, None
        if entry is not None:
            await report_to(master, entry, self._security)

    @property
    def is_refused(self) -> bool:
        """True if no process listens at the master's address. One refusal may come from a restart."""
        return self.refusals >= REFUSALS_ENOUGH

    @property
    def silent_ms(self) -> int | None:
        """Milliseconds since the master was last heard; None if it was never heard. Any thread."""
        link = self._link
        at = self._heard_at if link is None else link.heard_at
        return None if at is None else round((time.monotonic() - at) * 1000)

    @property
    def linked(self) -> bool:
        """True if the master has accepted this replica."""
        return self._link is not None

    def say_goodbye(self) -> None:
        """Informs the master that this replica stops: it must not wait for this replica. No other link begins."""
        self._is_leaving = True
        if self._link is not None:
            self._link.say_goodbye()
        else:
            self._changed.set()  # ends a handshake

    async def hand_over(self, wait_ms: int) -> None:
        """Asks the master to stop writing, and waits until this replica holds all its messages.

        Raises ConnectError without a link, Timeout, or MetamqError with the master's reason.
        """
        if self._link is None:
            raise ConnectError("the master", "there is no link to it")
        await self._link.hand_over(wait_ms)
