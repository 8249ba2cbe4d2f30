"""The broker's end of one TCP connection: asyncio on one side, the sans-IO ServerConnection on the other.

Backpressure works in both directions. If a client sends faster than the disk writes, its bytes stay in the kernel:
reading pauses while more than INFLIGHT_BYTES_MAX of its requests are unanswered, or while the memory of all requests is
short (metamq.broker.front_door.limits.request_memory), or a client is above its quota (limits.throttle). If a client
does not read, its data stays on disk: while the write buffer of the transport is above its mark, the broker begins no
request of the client, answers no long poll, and reads no bytes.

Each request gets one answer. A PUT is answered when each of its batches is stored as its topic asks, perhaps after an
fsync; a GET when its fetch session has data, or its long poll ends; OFFSETS in slices; the others at once.

A client that holds memory must make progress. It must continue a frame that it has begun. It must read answers if a
request waits for that, or if the memory of all answers is used up (metamq.broker.front_door.limits.answer_memory).
sweep() looks at all connections at intervals, and closes a connection without progress in two intervals; so no frame
needs a timer. Other answers may stay unread for longer: a task may still work on the answer before. A connection that
holds no memory may be silent without limit, once it has sent a request.

A client that breaks the protocol gets an error and the end of the stream. For a moment the broker still reads and
discards its bytes: closing a socket with unread bytes resets the connection, and the client would not get the error.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, cast

from metamq.broker.front_door.acceptor import peer_is_gone
from metamq.broker.front_door.audit import CLIENT_CHARS_MAX, COMMAND, LOGIN, REFUSED
from metamq.broker.front_door.authorisation import check
from metamq.broker.front_door.connection_login import ConnectionLogin
from metamq.broker.front_door.fetch_session import FetchSession
from metamq.broker.front_door.limits.admission import ConnectionFate
from metamq.broker.front_door.limits.answer_memory import UnreadAnswers, write_in_pieces
from metamq.broker.front_door.limits.slices import SlicedWork
from metamq.broker.front_door.limits.throttle import Throttle
from metamq.broker.log.disk.files import descriptors_max
from metamq.errors import AuthenticationFailed, MetamqError, NotAuthorized, ProtocolError
from metamq.security.login import MECHANISMS
from metamq.security.quotas import READ_BYTES, REQUESTS, WRITE_BYTES, QuotaWait
from metamq.security.rights import NO_RULES, READ, Access, producer_prefix
from metamq.security.tls import principal_of
from metamq.threads import scratch
from metamq.wire import status, sync
from metamq.wire.addresses import are_near
from metamq.wire.commands import Command, Delay, GetResult
from metamq.wire.connection import AT_WORK, PUSHED, ConnectionState, Greeted, LoginStep, Request, ServerConnection
from metamq.wire.frames import Buffer, Packed

if TYPE_CHECKING:
    from metamq.broker.front_door.door import FrontDoor, Processor
    from metamq.broker.ha.connection import HAConnection
    from metamq.broker.ha.service import HAService

log = logging.getLogger("metamq.broker")

AUDITED = frozenset({Command.SYNC, Command.PROMOTE})
"""Commands that change roles."""
PUT, KEPT = int(Command.PUT), ConnectionFate.KEPT  # in the hot path: a member of an enumeration takes 80 ns
WITH_BODY = frozenset({Command.PUT, Command.TX})
FOR_OPERATORS = frozenset({Command.SYNC, Command.PROMOTE, Command.STATS, Command.BRANCHES})
"""The commands on kept connections, see metamq.broker.front_door.limits.admission."""
HELLO_TIMEOUT_S = 10.0
GOODBYE_TIMEOUT_S = 5.0
STALL_BYTES = 64 * 1024
"""A frame that grows by less than this between two sweeps has stalled."""
WRITE_BUFFER_BYTES = 4 * 1024 * 1024
INFLIGHT_BYTES_MAX = 64 * 1024 * 1024
SLICED_MAX = 4
"""Requests of a connection in slices. At this number its next request is not begun, and its bytes are not read."""


class BrokerProtocol(asyncio.BufferedProtocol):
    """One connection. The server makes it when it accepts a client."""

    def __init__(self, door: FrontDoor, loop: asyncio.AbstractEventLoop) -> None:
        self._door = door
        self._loop = loop
        self._writable = True
        self._reading_paused = False
        self._inflight_bytes = 0
        self._large_bytes = 0  # the size of the large frame in progress; 0: none
        self._granted = True  # False: its memory is not reserved yet
        self._throttle = Throttle(loop, self._delayed, self._goes_on)
        self._paid: Request | None = None
        """A request whose frame was large: it was counted when the frame began."""
        self._received_bytes = 0  # since the last sweep
        self._unread = UnreadAnswers(door.answers, self, loop.time())
        self._unsent: list[Buffer] = []  # small answers of this turn of the loop
        self._greeted_at = math.inf  # the time of its HELLO; infinite before HELLO and after the first request
        self._place = ConnectionFate.SERVED
        self._address = ""
        self._suspect = False
        self._waiting: deque[Request] = deque()
        """Received requests that are not begun, as while the client does not read."""
        self._unpacking: Request | None = None  # A request with a large header, which is unpacked in a slice
        self._broken: ProtocolError | None = None
        self._ended = False  # True: the end of the stream was sent
        self.principal = ""
        """The name of the client, by its certificate or its login; empty: security is off."""
        self.access = Access("", NO_RULES)
        """The rights of the client: none until its name is known."""
        self.owner = ""
        """The principal, or the IP address of a client that has none: the owner of the memory of its requests."""
        self._is_known = False
        self._user = ""
        """The name in the client's login: its principal, or the name of a token."""
        self._login: ConnectionLogin | None = None
        self._transport: asyncio.Transport | None = None
        self._link: tuple[HAConnection, HAService] | None = None
        """The link, if the peer is a slave. The connection is a stream then, and acknowledgements wait for nothing."""
        self.fetches = FetchSession(
            door.read_role, self._answer_get, lambda: self._writable, loop, door.answers.available_bytes,
            lambda topic: self.access.refusal(READ, topic),
        )  # fmt: skip

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's do not derive from it
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        peer = transport.get_extra_info("peername")
        self.peer = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else str(peer)
        self.fetches.is_near = are_near(peer, transport.get_extra_info("sockname"))
        self._tls = transport.get_extra_info("ssl_object")
        self.principal = principal_of(self._tls)
        greeting = self._door.greeting()
        if self._tls is not None and not self.principal:
            tokens = self._door.users.tokens
            greeting = greeting._replace(mechanisms=[*MECHANISMS, *([tokens.mechanism] if tokens is not None else [])])
        elif self.principal:
            greeting = greeting._replace(producer_prefix=producer_prefix(self.principal))
        self._connection = ServerConnection(self.peer, greeting, self._door.requests.rooms.take, scratch=scratch)
        self._door.connections.add(self)
        self._deadline = self._loop.call_later(HELLO_TIMEOUT_S, self._hello_missing)
        self._address = str(peer[0]) if isinstance(peer, tuple) else ""
        self.owner = self.principal or self._address
        self._place = self._door.admission.enter(self._address)
        if self._place is ConnectionFate.CLOSED:
            self.abort()
        elif self._place is ConnectionFate.REFUSED:
            self._turn_away(self._door.admission.refusal(self._address))

    def _turn_away(self, refusal: ProtocolError) -> None:
        """Sends the reason, and closes when the client has read it."""
        log.warning("%s is refused: %s The limit on open files is %d.", self.peer, refusal, descriptors_max())
        self._write(self._connection.refusal(refusal))
        self._connection.close()
        self._say_goodbye()

    def _hello_missing(self) -> None:
        if self._place is KEPT and self._greeted_at == math.inf and self._connection.state in AT_WORK:
            return  # it has sent a request that kept connections may send
        wanted = "HELLO" if self._place is not KEPT else "request of a kind with reserved connections"
        if self._connection.state is ConnectionState.LOGIN:
            wanted = "login"
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
                    if self._place is KEPT and event.command not in FOR_OPERATORS:
                        raise self._door.admission.refusal(self._address)
                    if self._link is not None and event.opaque == PUSHED:
                        self._link_received(event.unpacked())
                        continue
                    self._waiting.append(event)
                    if event.body:
                        self._door.requests.take(len(event.body), self.owner)
                    if self._large_bytes:  # the frame in progress is the first to be complete
                        self._paid = event
                        self._reserve(0)
                elif isinstance(event, LoginStep):
                    self._log_in(event)
                else:
                    self._greeted(event)
        except ProtocolError as error:
            self._connection.close()  # it must not return the frames before the error again
            self._broken = error
        if self._connection.large_bytes != self._large_bytes:
            self._reserve(self._connection.large_bytes)
        self._work()

    def _reserve(self, size: int) -> None:
        """Reserves memory for a large frame that has begun. At its end (0) its body is counted separately."""
        if not self._granted:
            self._door.requests.withdraw(self)
        elif self._large_bytes:
            self._door.requests.release(self._large_bytes, self.owner)
        self._large_bytes = size
        if size:
            self._greeted_at = math.inf  # it has sent a request, however long that waits
        self._granted = not size or self._is_reserved()

    def _is_reserved(self) -> bool:
        if self._throttle.must_wait():
            return False
        self._throttle.take(WRITE_BYTES, self._large_bytes)
        return self._door.requests.reserve(self._large_bytes, self)

    def granted(self) -> None:
        """Continues with the large frame: its memory is reserved."""
        self._granted = True
        self._regulate()

    def _greeted(self, greeted: Greeted) -> None:
        if self._connection.state in AT_WORK:
            self._is_open()
        self._write(greeted.buffers)
        if not greeted.accepted:
            log.info("%s speaks no protocol version that this broker supports", self.peer)
            self._say_goodbye()

    def _is_open(self) -> None:
        self._is_known = True
        if (refusal := self._door.admission.identify(self.principal)) is not None:
            self._turn_away(refusal)
            return
        self._user = self._user or self.principal
        if self.principal:
            client = self._connection.client[:CLIENT_CHARS_MAX]
            client += f" by {self._user}" if self._user != self.principal else ""
            self.decided(client, LOGIN)
        self._take_rights()
        if self._place is not KEPT:
            self._deadline.cancel()
        self._greeted_at = self._loop.time()

    def rights_changed(self) -> None:
        """Applies the present rules, also to partitions that the client has opened."""
        if self._is_known:
            self._take_rights()
            self.fetches.rights_changed()

    def _take_rights(self) -> None:
        if self._door.users.owner(self._user) is None:
            log.info("%s: %s has ended: closed", self.peer, self._user)
            self.close()
        self.access = self._door.users.access(self._user, self._refused)
        self._throttle.change(self._door.users.meter(self.principal, self._loop.time()))

    def _delayed(self, wait: QuotaWait) -> None:
        """Informs the client that its requests wait for its quota."""
        self._door.counters.delayed(self.principal, wait.wait_s)
        if self._writable:
            self._write(self._connection.delay(Delay(math.ceil(wait.wait_s * 1000), wait.limit, wait.per_second)))

    def _goes_on(self) -> None:
        if self._large_bytes and not self._granted and not self._door.requests.is_queued(self):
            self._granted = self._is_reserved()
        self._work()

    def _refused(self, refusal: NotAuthorized) -> None:
        self._door.counters.refusals += 1
        self._door.audit.record(
            REFUSED, self.principal, self.peer, f"{refusal.right} {refusal.resource}", allowed=False
        )

    def decided(self, what: str, kind: str = COMMAND) -> None:
        """Notes an allowed act in the audit log: a command of an operator unless `kind` is another."""
        self._door.audit.record(kind, self.principal, self.peer, what, allowed=True)

    @property
    def has_token(self) -> bool:
        """True if the client has logged in by a token of a delegation."""
        return self._user != self.principal

    @property
    def login_ends_s(self) -> float:
        """The end of the client's own login, in seconds since 1970; 0: it has none."""
        return self._login.expires_s if self._login is not None else 0.0

    @property
    def who(self) -> str:
        """The principal, or the address of a client that has none."""
        return self.principal or self.peer

    def _log_in(self, step: LoginStep) -> None:
        if self._login is None:
            self._login = ConnectionLogin(self._door, self.peer, self._address, self._tls)
        try:
            data, is_done = self._login.next(step)
        except AuthenticationFailed as error:
            self._write(self._connection.login_refused(step, error))
            self._say_goodbye()
            return
        if is_done:
            self._user = self._login.user
            self.principal = self.owner = self._door.users.owner(self._user) or self._user
            self._is_open()
        if self._ended:  # its principal has too many connections
            return
        prefix = producer_prefix(self.principal) if is_done else 0
        proof = self._door.users.zookeeper_proof(self._user) if is_done else ""
        self._write(self._connection.login_answer(step, data, is_done, prefix, proof))
        if is_done:
            self._login.end_at_expiry(self._loop, self.close)

    def _work(self) -> None:
        """Begins received requests, while their answers can be written, and the quota of the client allows it."""
        while self._waiting and self._unpacking is None and self._writable and self._door.slices.of(self) < SLICED_MAX:
            if self._waiting[0] is not self._paid and self._throttle.must_wait():
                break
            request = self._waiting.popleft()
            if isinstance(request.header, Packed):
                self._unpack_later(request)
            else:
                self._handle(request)
        if self._broken is not None and not self._waiting and self._unpacking is None:
            self._door.store_puts()
            log.warning("%s broke the protocol: %s", self.peer, self._broken)
            self._write(self._connection.refusal(self._broken))
            self._broken = None
            self._say_goodbye()
        self._regulate()

    def _unpack_later(self, request: Request) -> None:
        """Unpacks a large header in a slice. The next requests of the connection wait behind it."""
        self._unpacking = request
        work = SlicedWork()
        work.steps = self._unpack(request)
        self._door.slices.add(self, work)

    def _unpack(self, request: Request) -> Generator[None, None, None]:
        self._unpacking = None
        try:
            unpacked = request.unpacked()
            self._paid = unpacked if request is self._paid else self._paid
            self._waiting.appendleft(unpacked)
        except ProtocolError as error:
            self._waiting.appendleft(request)
            self._give_up_waiting()
            self._connection.close()
            self._broken = error
        yield from ()

    def _give_up_waiting(self) -> None:
        self._paid = None
        while self._waiting:
            self._door.requests.release(len(self._waiting.pop().body), self.owner)

    def has_less_to_do(self) -> None:
        """Continues with waiting requests, because one request in slices is done."""
        self._work()

    def _say_goodbye(self) -> None:
        """Ends the stream. The client's end of the stream, or the time-out, closes the connection."""
        self._deadline.cancel()
        self._ended = True
        if self._transport is not None and not self._transport.is_closing():
            if self._transport.can_write_eof():
                self._transport.write_eof()
            else:  # TLS has an end of its own, which also reads and discards
                self._transport.close()
            self._deadline = self._loop.call_later(GOODBYE_TIMEOUT_S, self.abort)

    def _regulate(self) -> None:
        """Pauses or resumes reading."""
        inflight_max = INFLIGHT_BYTES_MAX // 2 if self._reading_paused else INFLIGHT_BYTES_MAX
        pause = self._link is None and (
            not self._granted
            or bool(self._waiting)
            or self._unpacking is not None
            or not self._writable
            or self._inflight_bytes > inflight_max
            or (self._inflight_bytes > 0 and self._door.requests.scarce and not self._large_bytes)
        )
        if pause is self._reading_paused or self._transport is None or self._transport.is_closing():
            return
        self._reading_paused = pause
        if pause:
            self._suspect = False  # the client cannot make progress now
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _handle(self, request: Request) -> None:
        if self._inflight_bytes and request.command != PUT:  # the requests of a connection begin in their order
            self._door.store_puts()
        self._inflight_bytes += len(request.body)
        if self._throttle.meter is not None:
            self._throttle.take(REQUESTS, 1)
            if request is not self._paid:
                self._throttle.take(WRITE_BYTES, len(request.body))
        if request is self._paid:
            self._paid = None
        try:
            self._processor_of(request)(request, self)
        except MetamqError as error:
            self.answer_error(request, error)
            if self._place is KEPT and isinstance(error, NotAuthorized):
                self._connection.close()
                self._say_goodbye()
        except Exception as error:  # a bug here: the client gets an error, the others are served
            log.exception("request %d of %s, command %d, failed", request.opaque, self.peer, request.command)
            self.answer_error(request, MetamqError(f"internal error of the broker: {error!r}"))

    def _processor_of(self, request: Request) -> Processor:
        processor = self._door.processors.get(request.command)
        if processor is None:
            known = ", ".join(f"{command} {Command(command).name}" for command in self._door.processors)
            raise ProtocolError(f"command {request.command} is not known to this broker", hint=f"It knows {known}.")
        if request.body and request.command not in WITH_BODY:
            raise ProtocolError(f"{Command(request.command).name} has no body, got {len(request.body):,} bytes")
        check(request.command, self.access)
        if request.command in AUDITED:
            self.decided(Command(request.command).name)
        return processor

    def answer(self, request: Request, header: Any) -> None:
        """Answers `request` unless the connection is closed."""
        self._done(request)
        self._write(self._connection.respond(request, header))

    def answer_soon(self, request: Request, header: Any) -> None:
        """Answers `request` at the end of this turn of the loop, together with other requests."""
        self._done(request)
        if not self._unsent:
            self._door.writes.add(self)
        self._unsent += self._connection.respond(request, header)

    def answer_error(self, request: Request, error: MetamqError) -> None:
        """Answers `request` with an error."""
        self._done(request)
        number, fields = status.encode_error(error)
        self._write(self._connection.respond(request, fields, number=number))

    def _answer_get(self, request: Request, results: list[GetResult], bodies: list[Buffer]) -> None:
        self._done(request)
        self._door.counters.fetched(results)
        self._throttle.take(READ_BYTES, sum(result.size for result in results))
        self._write(self._connection.respond(request, results, bodies))

    def _done(self, request: Request) -> None:
        if request.body:
            self._inflight_bytes -= len(request.body)
            self._door.requests.release(len(request.body), self.owner)
            if self._reading_paused:
                self._regulate()

    # -- as a slave's link ------------------------------------------------------------------------------------------

    @property
    def is_link(self) -> bool:
        """True if the peer has joined as a slave."""
        return self._link is not None

    def become_link(self, request: Request, link: HAConnection, accept: sync.Accept, service: HAService) -> None:
        """Answers a slave's JOIN. From then on both ends push."""
        self._link = link, service
        self._write(self._connection.accept_stream(request, accept))

    def _link_received(self, frame: Request) -> None:
        """Raises ProtocolError. Any other failure, of the disk or by a bug, ends the link."""
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
        """True if the write buffer is below its mark."""
        return self._writable and self._transport is not None

    def push(self, header: Any, bodies: list[Buffer] | None = None) -> int:
        """Sends a frame of the stream; returns its size, or 0 if the connection is closed."""
        if self._transport is None or self._ended or self._broken is not None:
            return 0
        buffers = self._connection.push(header, bodies)
        self._write(buffers)
        return sum(map(len, buffers))

    def flush(self) -> None:
        """Sends the answers of this turn."""
        if self._unsent:
            self._write([])

    def _write(self, buffers: list[Buffer]) -> None:
        if self._unsent:
            buffers, self._unsent = [b"".join(self._unsent), *buffers], []
        if self._transport is not None and not self._ended and not self._transport.is_closing():
            self._unread.wrote(sum(map(len, buffers)))
            if self._tls is None:
                self._transport.writelines(buffers)
            else:
                write_in_pieces(self._transport, buffers)
            if self.count_unread():
                self._door.answers.keep_below_ceiling(self)

    def count_unread(self) -> int:
        """Returns the number of unread bytes, and passes it to the memory of answers. A link has limits of its own."""
        is_open = self._transport is not None and not self._transport.is_closing()
        unread_bytes = self._transport.get_write_buffer_size() if self._transport is not None else 0
        self._unread.count(unread_bytes, is_above_mark=not self._writable, is_held=is_open and self._link is None)
        return unread_bytes

    def give_up(self) -> None:
        """Closes the connection, on request of the memory of answers."""
        self._drop("has read nothing for the longest time, and unread answers take too much memory")
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
        """Closes the connection if it holds memory, or a place, and makes no progress. Called at intervals."""
        if self._transport is None or self._ended or self._connection.state is not ConnectionState.OPEN:
            return
        now = self._loop.time()
        unread_bytes = self.count_unread()
        reads = self._unread.reads(now)
        if not self._writable:
            stalled = not reads and (self._large_bytes > 0 or bool(self._waiting) or self._door.answers.is_scarce)
        else:
            stalled = self._connection.in_frame and not self._reading_paused and self._received_bytes < STALL_BYTES
        self._received_bytes = 0
        if self._reading_paused and not self._transport.is_closing() and peer_is_gone(self._transport):
            self.abort()
        elif stalled and self._suspect:
            self._drop("has left a request incomplete, or an answer unread, and does not continue")
        elif now - self._unread.read_at > self._door.timeouts.unread_s:
            self._drop(f"has left {unread_bytes:,} bytes unread for {now - self._unread.read_at:.0f} s")
        elif self._door.timeouts.idle_s and now - self._greeted_at > self._door.timeouts.idle_s:
            self._drop(f"has sent no request in {now - self._greeted_at:.0f} s")
        self._suspect = stalled

    def _drop(self, reason: str) -> None:
        log.warning("%s %s: closed", self.peer, reason)
        self._door.answers.stalled += 1
        self.abort()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.count_unread()
        self._door.admission.leave(self._address, self.principal if self._is_known else "")
        self._deadline.cancel()
        if self._login is not None:
            self._login.close()
        self._tls = self._login = None  # now, too: OpenSSL has up to a megabyte for a connection
        self._throttle.close()
        self._reserve(0)
        if self._unpacking is not None:
            self._waiting.append(self._unpacking)
        self._give_up_waiting()
        self._connection.close()  # now: this object is in a cycle, and a part of a frame may be large
        self.fetches.close()
        self._door.connections.discard(self)
        self._door.slices.drop(self)
        self._door.transactions.connection_lost(self)
        if self._link is not None:
            link, service = self._link
            service.closed_by_slave(link, str(exc) if exc else "it closed the connection")

    def close(self) -> None:
        """Closes the connection when all written bytes are sent."""
        self.flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Closes the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def idle(self) -> bool:
        """True if no request with a body is unanswered."""
        return self._inflight_bytes == 0
