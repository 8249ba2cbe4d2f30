"""The broker's end of one TCP connection: asyncio on one side, the sans-IO ServerConnection on the other.

Backpressure runs both ways. What a client sends faster than the disk takes stays in the kernel: reading pauses while
more than INFLIGHT_BYTES_MAX of its requests are unanswered, or memory for all connections' requests is short
(metamq.broker.front_door.request_memory). What it does not read stays on disk: while the transport's write buffer is
above its mark, no request of its is begun, no long poll answered, and nothing read.

A client that holds memory owes progress: half a frame has to go on, and answers have to be read where a request waits
for that, or the memory of all answers is used up (metamq.broker.front_door.answer_memory). The broker looks at all
connections now and then, sweep(), and closes one that did neither since the last look but one: no timer a frame. Other
answers may lie unread for longer, as those of a task that works on the one before. A connection that owes nothing may
be silent for as long as it likes, once it has asked for something.

A client that breaks the protocol is told so and gets the end of the stream. What it still sends is thrown away for a
moment: a socket closed over unread bytes resets the connection, and the client would not learn why.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from metamq.broker.front_door.admission import Admission, ConnectionFate
from metamq.broker.front_door.answer_memory import AnswerMemory
from metamq.broker.front_door.counters import Counters
from metamq.broker.front_door.fetch_session import FetchSession
from metamq.broker.front_door.processors import Processors
from metamq.broker.front_door.request_memory import RequestMemory
from metamq.broker.front_door.serving_role import ReplicaReadRole
from metamq.broker.front_door.slices import SlicedWork, Slices
from metamq.broker.ha.connection import HAConnection
from metamq.broker.ha.service import HAService
from metamq.broker.log.disk.files import descriptors_max
from metamq.broker.transactions.processor import TransactionalCommandProcessor
from metamq.errors import MetamqError, ProtocolError
from metamq.wire import status, sync
from metamq.wire.addresses import are_near
from metamq.wire.commands import Command, GetResult, HelloReply
from metamq.wire.connection import AT_WORK, PUSHED, ConnectionState, Greeted, Request, ServerConnection
from metamq.wire.frames import Buffer, Packed

log = logging.getLogger("metamq.broker")

FOR_OPERATORS = frozenset({Command.SYNC, Command.PROMOTE, Command.STATS, Command.BRANCHES})
"""What the places are kept for that clients do not get: see metamq.broker.front_door.admission."""
HELLO_TIMEOUT_S = 10.0
GOODBYE_TIMEOUT_S = 5.0
STALL_BYTES = 64 * 1024
"""Half a frame that goes on by less than this between two sweeps has stalled."""
WRITE_BUFFER_BYTES = 4 * 1024 * 1024
INFLIGHT_BYTES_MAX = 64 * 1024 * 1024
SLICED_MAX = 4
"""Requests of a connection that are answered in slices; behind so many none is begun, nor read."""


class Timeouts(NamedTuple):
    """How long connections may do nothing: seconds."""

    unread_s: float
    """Over bytes that they do not read."""
    idle_s: float
    """From their HELLO on, if they never ask for anything. 0 is for ever."""


@dataclass(frozen=True, slots=True)
class FrontDoor:
    """The parts that all connections of a broker share."""

    processors: Processors
    read_role: ReplicaReadRole
    transactions: TransactionalCommandProcessor
    counters: Counters
    slices: Slices
    admission: Admission
    requests: RequestMemory
    answers: AnswerMemory
    timeouts: Timeouts
    greeting: Callable[[], HelloReply]
    """Returns the answer to HELLO."""
    connections: set[BrokerProtocol] = field(default_factory=set)


class BrokerProtocol(asyncio.BufferedProtocol):
    """One connection. Made by the server for each that is accepted."""

    def __init__(self, door: FrontDoor, loop: asyncio.AbstractEventLoop) -> None:
        self._admission = door.admission
        self._answers = door.answers
        self._timeouts = door.timeouts
        self._processors = door.processors
        self._slices = door.slices
        self._counters = door.counters
        self._transactions = door.transactions
        self._memory = door.requests
        self._connections = door.connections
        self._greeting = door.greeting
        self._loop = loop
        self._writable = True
        self._reading_paused = False
        self._inflight_bytes = 0
        self._large_bytes = 0
        """The size of the large frame that is being received."""
        self._granted = True
        """Whether there is memory for it."""
        self._received_bytes = 0
        """Since the last sweep."""
        self._written_bytes = 0
        self._sent_bytes = 0
        """As of the last sweep."""
        self._sent_at = loop.time()
        """When that was less, or nothing was left to be sent."""
        self._counted_bytes = 0
        """What the memory of answers counts of this connection."""
        self._read_bytes = 0
        """How much its client had read when its unread bytes were last counted."""
        self._answer_bytes = 0
        """The size of the last answer."""
        self._empty_at_bytes = 0
        """How much had been written when all was last seen to be read."""
        self._greeted_at = math.inf
        """When it was greeted; endless once it has asked for something."""
        self._place = ConnectionFate.SERVED
        self._address = ""
        self._suspect = False
        self._waiting: deque[Request] = deque()
        """Requests that came in while the client did not read."""
        self._unpacking: Request | None = None
        """Its header is large; in this connection's turn it is unpacked."""
        self._broken: ProtocolError | None = None
        self._ended = False
        """The end of the stream was sent."""
        self._transport: asyncio.Transport | None = None
        self._link: tuple[HAConnection, HAService] | None = None
        """Set once the peer is a slave: the connection is a stream then, and its acknowledgements wait for nothing."""
        role = door.read_role
        self.fetches = FetchSession(role.find, role, self._answer_get, lambda: self._writable, loop, door.answers.room)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's do not derive from it
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        peer = transport.get_extra_info("peername")
        self.peer = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else str(peer)
        self.fetches.is_near = are_near(peer, transport.get_extra_info("sockname"))
        self._connection = ServerConnection(self.peer, self._greeting(), self._memory.rooms.take)
        self._connections.add(self)
        self._deadline = self._loop.call_later(HELLO_TIMEOUT_S, self._hello_missing)
        self._address = str(peer[0]) if isinstance(peer, tuple) else ""
        self._place = self._admission.enter(self._address)
        if self._place is ConnectionFate.CLOSED:
            self.abort()
        elif self._place is ConnectionFate.TOLD:
            self._turn_away()

    def _turn_away(self) -> None:
        """Says why, and closes once the client has read it."""
        refusal = self._admission.refusal(self._address)
        log.warning("%s is turned away: %s The limit on open files is %d.", self.peer, refusal, descriptors_max())
        self._write(self._connection.refusal(refusal))
        self._connection.close()
        self._say_goodbye()

    def _hello_missing(self) -> None:
        if self._place is ConnectionFate.KEPT and self._greeted_at == math.inf and self._connection.state in AT_WORK:
            return  # it has asked for what its place is kept for
        wanted = "HELLO" if self._place is not ConnectionFate.KEPT else "request that the last places are kept for"
        log.info("%s sent no %s within %g s: closed", self.peer, wanted, HELLO_TIMEOUT_S)
        self.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._connection.next_buffer()

    def buffer_updated(self, count: int) -> None:
        self._received_bytes += count
        try:
            for event in self._connection.received(count):
                if isinstance(event, Request):
                    self._suspect = False
                    self._greeted_at = math.inf
                    if self._place is ConnectionFate.KEPT and event.command not in FOR_OPERATORS:
                        raise self._admission.refusal(self._address)
                    if self._link is not None and event.opaque == PUSHED:
                        self._link_received(event.unpacked())
                        continue
                    self._waiting.append(event)
                    if event.body:
                        self._memory.take(len(event.body))
                else:
                    self._greeted(event)
        except ProtocolError as error:
            self._connection.close()  # the frames before it are not to come out again
            self._broken = error
        if self._connection.large_bytes != self._large_bytes:
            self._reserve(self._connection.large_bytes)
        self._work()

    def _reserve(self, size: int) -> None:
        """A large frame has begun, or has ended (0): its request's body is counted by itself then."""
        if not self._granted:
            self._memory.withdraw(self)
        elif self._large_bytes:
            self._memory.release(self._large_bytes)
        self._large_bytes = size
        self._granted = not size or self._memory.reserve(size, self)

    def granted(self) -> None:
        """There is memory for the large frame that has begun."""
        self._granted = True
        self._regulate()

    def _greeted(self, greeted: Greeted) -> None:
        if self._place is not ConnectionFate.KEPT:
            self._deadline.cancel()
        self._greeted_at = self._loop.time()
        self._write(greeted.buffers)
        if not greeted.accepted:
            log.info("%s speaks no version of the protocol that is spoken here", self.peer)
            self._say_goodbye()

    def _work(self) -> None:
        """Begins the requests that came in, as long as their answers find room."""
        while self._waiting and self._unpacking is None and self._writable and self._slices.of(self) < SLICED_MAX:
            request = self._waiting.popleft()
            if isinstance(request.header, Packed):
                self._unpack_later(request)
            else:
                self._handle(request)
        if self._broken is not None and not self._waiting and self._unpacking is None:
            log.warning("%s broke the protocol: %s", self.peer, self._broken)
            self._write(self._connection.refusal(self._broken))
            self._broken = None
            self._say_goodbye()
        self._regulate()

    def _unpack_later(self, request: Request) -> None:
        """Unpacks a large header when it is this connection's turn; its next requests wait behind it."""
        self._unpacking = request
        work = SlicedWork()
        work.steps = self._unpack(request)
        self._slices.add(self, work)

    def _unpack(self, request: Request) -> Generator[None, None, None]:
        self._unpacking = None
        try:
            self._waiting.appendleft(request.unpacked())
        except ProtocolError as error:
            self._waiting.appendleft(request)
            self._give_up_waiting()
            self._connection.close()
            self._broken = error
        yield from ()

    def _give_up_waiting(self) -> None:
        while self._waiting:
            self._memory.release(len(self._waiting.pop().body))

    def has_less_to_do(self) -> None:
        """One of its requests that are answered in slices is."""
        self._work()

    def _say_goodbye(self) -> None:
        """Ends the stream; the client's end of it, or the time-out, closes the connection."""
        self._deadline.cancel()
        self._ended = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()
            self._deadline = self._loop.call_later(GOODBYE_TIMEOUT_S, self.abort)

    def _regulate(self) -> None:
        """Pauses or resumes reading."""
        if self._transport is None or self._transport.is_closing():
            return
        inflight_max = INFLIGHT_BYTES_MAX // 2 if self._reading_paused else INFLIGHT_BYTES_MAX
        pause = self._link is None and (
            not self._granted
            or bool(self._waiting)
            or self._unpacking is not None
            or not self._writable
            or self._inflight_bytes > inflight_max
            or (self._inflight_bytes > 0 and self._memory.scarce and not self._large_bytes)
        )
        if pause and not self._reading_paused:
            self._suspect = False  # it is our turn
            self._transport.pause_reading()
        elif self._reading_paused and not pause:
            self._transport.resume_reading()
        self._reading_paused = pause

    def _handle(self, request: Request) -> None:
        self._inflight_bytes += len(request.body)
        try:
            self._processors.process(request, self)
        except MetamqError as error:
            self.answer_error(request, error)
        except Exception as error:  # a bug of ours: told to the client and logged, and no other client suffers
            log.exception("request %d of %s, command %d, failed", request.opaque, self.peer, request.command)
            self.answer_error(request, MetamqError(f"internal error of the broker: {error!r}"))

    def answer(self, request: Request, header: Any) -> None:
        """Answers `request` unless the connection is gone."""
        self._done(request)
        self._write(self._connection.respond(request, header))

    def answer_error(self, request: Request, error: MetamqError) -> None:
        """Answers `request` with an error."""
        self._done(request)
        number, fields = status.encode_error(error)
        self._write(self._connection.respond(request, fields, number=number))

    def _answer_get(self, request: Request, results: list[GetResult], bodies: list[Buffer]) -> None:
        self._done(request)
        self._counters.fetched(results)
        self._write(self._connection.respond(request, results, bodies))

    def _done(self, request: Request) -> None:
        if request.body:
            self._inflight_bytes -= len(request.body)
            self._memory.release(len(request.body))
            if self._reading_paused:
                self._regulate()

    # -- as a slave's link ------------------------------------------------------------------------------------------

    @property
    def is_link(self) -> bool:
        """Whether the peer has joined."""
        return self._link is not None

    def become_link(self, request: Request, link: HAConnection, accept: sync.Accept, service: HAService) -> None:
        """Answers a slave's JOIN; from now on both ends push."""
        self._link = link, service
        self._write(self._connection.accept_stream(request, accept))

    def _link_received(self, frame: Request) -> None:
        """Raises ProtocolError; any other failure, such as of the disk or a bug of ours, ends the link."""
        assert self._link is not None
        link, service = self._link
        try:
            service.received(link, frame.header)
        except ProtocolError:
            raise
        except MetamqError as error:
            service.leave(link, str(error))
        except Exception as error:
            log.exception("a frame of the link of %s failed", self.peer)
            service.leave(link, f"internal error: {error!r}")

    @property
    def writable(self) -> bool:
        """Whether the write buffer is below its mark."""
        return self._writable and self._transport is not None

    def push(self, header: Any, bodies: list[Buffer] | None = None) -> int:
        """Sends a frame of the stream; returns its size, 0 when the connection is gone."""
        if self._transport is None or self._ended or self._broken is not None:
            return 0
        buffers = self._connection.push(header, bodies)
        self._write(buffers)
        return sum(map(len, buffers))

    def _write(self, buffers: list[Buffer]) -> None:
        if self._transport is not None and not self._ended and not self._transport.is_closing():
            self._answer_bytes = sum(map(len, buffers))
            self._written_bytes += self._answer_bytes
            self._transport.writelines(buffers)
            self.count_unread()
            self._answers.keep_below_ceiling(self)

    def count_unread(self) -> int:
        """Returns how much this client has not read, and passes it to the memory of answers.

        That has the bytes above the mark in its budget, and the memory of all answers that are not read to their end
        below its ceiling; a slave's link has limits of its own.
        """
        unread_bytes = self._transport.get_write_buffer_size() if self._transport is not None else 0
        counted_bytes = 0 if self._writable else unread_bytes
        self._answers.changed(self._counted_bytes, counted_bytes)
        self._counted_bytes = counted_bytes
        is_held = self._transport is not None and not self._transport.is_closing() and self._link is None
        read_bytes = self._written_bytes - unread_bytes
        if not unread_bytes:
            self._empty_at_bytes = self._written_bytes
        # An answer stays in memory whole until its last byte is sent.
        held_bytes = min(unread_bytes + self._answer_bytes, self._written_bytes - self._empty_at_bytes)
        self._answers.holds(self, held_bytes if is_held else 0, has_read=read_bytes > self._read_bytes)
        self._read_bytes = read_bytes
        return unread_bytes

    def give_up(self) -> None:
        """Closes it for the memory of answers."""
        self._let_go("has read nothing for longest, and unread answers take too much memory")
        self.count_unread()

    def pause_writing(self) -> None:
        self._writable = False
        self.count_unread()
        self._regulate()

    def resume_writing(self) -> None:
        self._writable = True
        self.count_unread()
        if self._link is not None:
            self._link[0].pump()
        self.fetches.serve()
        self._work()

    def sweep(self) -> None:
        """Closes a connection that holds memory, or a place, and makes no progress. Called every now and then."""
        if self._transport is None or self._ended or self._connection.state is not ConnectionState.OPEN:
            return
        now = self._loop.time()
        unsent_bytes = self.count_unread()
        sent_bytes = self._written_bytes - unsent_bytes
        reads = sent_bytes > self._sent_bytes or not unsent_bytes
        if reads:
            self._sent_at = now
        if not self._writable:
            stalled = not reads and (self._large_bytes > 0 or bool(self._waiting) or self._answers.is_scarce)
        else:
            stalled = self._connection.in_frame and not self._reading_paused and self._received_bytes < STALL_BYTES
        self._received_bytes, self._sent_bytes = 0, sent_bytes
        if stalled and self._suspect:
            self._let_go("has left a request half done, or an answer unread, and does not go on")
        elif now - self._sent_at > self._timeouts.unread_s:
            self._let_go(f"has left {unsent_bytes:,} bytes unread for {now - self._sent_at:.0f} s")
        elif self._timeouts.idle_s and now - self._greeted_at > self._timeouts.idle_s:
            self._let_go(f"has asked for nothing in {now - self._greeted_at:.0f} s")
        self._suspect = stalled

    def _let_go(self, reason: str) -> None:
        log.warning("%s %s: closed", self.peer, reason)
        self._answers.stalled += 1
        self.abort()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.count_unread()
        self._admission.leave(self._address)
        self._deadline.cancel()
        self._reserve(0)
        if self._unpacking is not None:
            self._waiting.append(self._unpacking)
        self._give_up_waiting()
        self._connection.close()  # not with the garbage: this object is in a cycle, and half a frame may be large
        self.fetches.close()
        self._connections.discard(self)
        self._slices.drop(self)
        self._transactions.connection_lost(self)
        if self._link is not None:
            link, service = self._link
            service.closed_by_slave(link, str(exc) if exc else "it closed the connection")

    def close(self) -> None:
        """Closes after what is written has been sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Closes at once."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def idle(self) -> bool:
        """Nothing is being answered."""
        return self._inflight_bytes == 0
