"""The protocol state of both ends of a connection, without I/O: bytes in, events out; calls in, buffers out.

    state      client                                    broker
    GREETING   hello() sent, HelloReply awaited          HELLO awaited, small frames only
    LOGIN      AUTHENTICATE sent, its answer awaited     AUTHENTICATE awaited, small frames only; the state is left
               (only if HelloReply has mechanisms)       out for a client whose identity is known
    OPEN       request() any number, responses in        requests in any number, respond() in any order
               any order
    STREAMING  a SYNC request was accepted: like OPEN, and either end may push SYNC frames
    CLOSED     after a broken frame or a refused HELLO   the same; later bytes are ignored

There is no socket, clock or thread here: a transport calls `received()` and writes the results of the other calls. The
events do not depend on the pieces in which the bytes arrive: each frame is handled before the next one is read. An
error in a frame closes the connection; an error in a request is answered.

A pushed frame has the opaque 0, which no client request has, and the command SYNC, or DELAY from a broker. It appears
as a Response at the client and as a Request at the broker, and is not answered.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from metamq.errors import (
    AuthenticationFailed,
    ClosedError,
    MessageTooLarge,
    MetamqError,
    ProtocolError,
    UnsupportedVersion,
)
from metamq.wire import status
from metamq.wire.commands import Authenticate, Authenticated, Command, Delay, Hello, HelloReply
from metamq.wire.frames import Buffer, Frame, FrameReader, Packed, Scratch, encode_frame
from metamq.wire.headers import unpack
from metamq.wire.limits import (
    ANSWER_HEADER_BYTES_MAX,
    BATCH_TARGET_BYTES,
    FRAME_BYTES_MAX,
    HELLO_BYTES_MAX,
    LOGIN_STEPS_MAX,
    PROTOCOL_VERSION_MAX,
    PROTOCOL_VERSION_MIN,
    UNPACKED_BYTES_MAX,
)

OPAQUE_MAX = 0xFFFFFFFF
PUSHED = 0
"""The opaque of pushed frames, which have no request and no answer."""

NO_USER = "Set METAMQ_SECURITY_USER and METAMQ_SECURITY_PASSWORD_FILE, or give a certificate."

INITIAL_BYTES = 2 * BATCH_TARGET_BYTES
"""Bytes that a broker allocates ahead for the frame of a known client, before they arrive. It allocates twice as much
if that is the whole frame, as for the largest PUTs of this client library."""


class ConnectionState(enum.Enum):
    """The phase of a connection."""

    GREETING = "greeting"
    LOGIN = "login"
    OPEN = "open"
    STREAMING = "streaming"
    CLOSED = "closed"


class Response(NamedTuple):
    """The answer to the request numbered `opaque`: a header and a body, or an error's status and fields.

    With the opaque 0 the broker pushed it, without a request. An error then says why the broker ends the stream.
    """

    command: int
    opaque: int
    status: int
    header: Any
    body: memoryview


class Request(NamedTuple):
    """A request, to be answered by respond(request, ...). On a stream, a request with the opaque 0 has no answer.

    A header over UNPACKED_BYTES_MAX is Packed.
    """

    command: int
    opaque: int
    header: Any
    body: memoryview

    def unpacked(self) -> Request:
        """Returns the request with an unpacked header. Raises ProtocolError."""
        return self._replace(header=self.header.unpacked()) if isinstance(self.header, Packed) else self


AT_WORK = (ConnectionState.OPEN, ConnectionState.STREAMING)
"""The states in which requests are accepted."""


class Login(Protocol):
    """The client's end of a login: metamq.security.login.ClientLogin."""

    def first(self, offered: Sequence[str]) -> tuple[str, bytes]:
        """Returns the mechanism and the first message."""
        ...

    def next(self, data: bytes) -> bytes:
        """Returns the message after the broker's; empty: the login is done."""
        ...


class LoginStep(NamedTuple):
    """A message of a client's login, to be answered by login_answer() or login_refused()."""

    opaque: int
    mechanism: str
    data: bytes


class Greeted(NamedTuple):
    """The result of a HELLO: send `buffers`, then close the connection unless it was `accepted`."""

    buffers: list[Buffer]
    accepted: bool


class ClientConnection:
    """The client's end. `greeting` is the broker's HelloReply, None before it."""

    def __init__(
        self,
        address: str,
        client: str,
        allocate: Callable[[int], bytearray] = bytearray,
        *,
        scratch: Scratch | None = None,
    ) -> None:
        """`allocate` returns memory for a large frame, and `scratch` saves that of an idle connection: see
        FrameReader."""
        self.state = ConnectionState.GREETING
        self.login: Callable[[], Login | None] = lambda: None
        """Returns the login if the broker asks for one, or None if this client has no user."""
        self._login: Login | None = None
        self._mechanism = ""
        self._outgoing: list[Buffer] = []
        self.address = address
        self.greeting: HelloReply | None = None
        self.producer_prefix = 0
        """The first bits of the producer ids that this client may use; 0: any."""
        self.zookeeper_proof = ""
        """This client's proof of identity for ZooKeeper, by the scheme `digest`; empty: the broker gives none."""
        self._client = client
        self._opaque = 0
        self._waiting: dict[int, int] = {}
        self._reader = FrameReader(
            frame_bytes_max=HELLO_BYTES_MAX,
            header_bytes_max=ANSWER_HEADER_BYTES_MAX,
            scratch=scratch,
            initial_bytes=INITIAL_BYTES,
            allocate=allocate,
        )
        self.next_buffer = self._reader.next_buffer

    @property
    def missing_bytes(self) -> int:
        """Minimum number of missing bytes of a large answer; 0 if none has begun."""
        return self._reader.missing_bytes

    def hello(self) -> list[Buffer]:
        """The first buffers to send."""
        assert self.state is ConnectionState.GREETING
        greeting = Hello(PROTOCOL_VERSION_MIN, PROTOCOL_VERSION_MAX, self._client, takes_delays=True)
        return encode_frame(PROTOCOL_VERSION_MIN, Command.HELLO, 0, 0, greeting)

    @property
    def is_open(self) -> bool:
        """True if requests can be sent."""
        return self.state in AT_WORK

    def outgoing(self) -> list[Buffer]:
        """Returns the buffers of the login to send now, once. Call it after received(), until the connection is
        open."""
        found, self._outgoing = self._outgoing, []
        return found

    def close(self) -> None:
        """Notes that the connection is closed; frees the received bytes."""
        self.state = ConnectionState.CLOSED
        self._reader.close()

    def request(self, command: int, header: Any, bodies: list[Buffer] | None = None) -> tuple[int, list[Buffer]]:
        """(opaque, buffers to send). Raises MessageTooLarge; ClosedError unless the connection is open."""
        opaque = self._opaque % OPAQUE_MAX + 1
        assert opaque not in self._waiting
        buffers = self._encode(command, opaque, header, bodies)
        self._opaque = opaque
        self._waiting[opaque] = command
        return opaque, buffers

    def push(self, header: Any, bodies: list[Buffer] | None = None) -> list[Buffer]:
        """The buffers of a pushed SYNC frame. Raises MessageTooLarge; ClosedError unless streaming."""
        if self.state is not ConnectionState.STREAMING:
            raise ClosedError(f"stream to {self.address}")
        return self._encode(Command.SYNC, PUSHED, header, bodies)

    def _encode(self, command: int, opaque: int, header: Any, bodies: list[Buffer] | None) -> list[Buffer]:
        greeting = self.greeting
        if self.state not in AT_WORK or greeting is None:
            raise ClosedError(f"connection to {self.address}")
        limit = greeting.frame_bytes_max
        return encode_frame(greeting.version, command, 0, opaque, header, bodies, frame_bytes_max=limit)

    def received(self, count: int) -> Iterator[Response]:
        """The responses that are complete after `count` more bytes.

        The response to HELLO opens the connection and is not returned. After the earlier responses, it raises
        ProtocolError, UnsupportedVersion or another error by which the broker refuses a HELLO. The connection is then
        closed; it is also closed if the caller ends the iteration early.
        """
        if self.state is ConnectionState.CLOSED:
            return
        try:
            for frame in self._reader.received(count):
                if self.state in AT_WORK:
                    yield self._response(frame)
                elif self.state is ConnectionState.GREETING:
                    self._greeted(frame)
                elif self.state is ConnectionState.LOGIN:
                    self._logged_in(frame)
        except (MetamqError, GeneratorExit):
            self.close()
            raise

    def _response(self, frame: Frame) -> Response:
        assert self.greeting is not None
        if frame.command == Command.HELLO and frame.status != status.OK:
            raise ProtocolError(f"{self.address} closes: {status.decode_error(frame.status, frame.header)}")
        if frame.version != self.greeting.version:
            raise ProtocolError(f"{self.address} sent a frame of version {frame.version}, not {self.greeting.version}")
        if not self._is_pushed(frame) and self._waiting.pop(frame.opaque, None) != frame.command:
            raise ProtocolError(
                f"{self.address} answered request {frame.opaque}, command {frame.command}, which was not made"
            )
        if frame.command == Command.SYNC and frame.status == status.OK:
            self.state = ConnectionState.STREAMING
        return Response(frame.command, frame.opaque, frame.status, frame.header, frame.body)

    def _is_pushed(self, frame: Frame) -> bool:
        if frame.command == Command.SYNC:
            return frame.opaque == PUSHED and self.state is ConnectionState.STREAMING
        return frame.command == Command.DELAY and frame.opaque == PUSHED

    def _greeted(self, frame: Frame) -> None:
        if frame.command != Command.HELLO:
            raise ProtocolError(f"{self.address} answered HELLO with command {frame.command}")
        if frame.status != status.OK:
            error = status.decode_error(frame.status, frame.header)
            if isinstance(error, UnsupportedVersion):
                theirs = _version(frame.header, "version_min"), _version(frame.header, "version_max")
                error = UnsupportedVersion(self.address, (PROTOCOL_VERSION_MIN, PROTOCOL_VERSION_MAX), theirs)
            raise error
        greeting = unpack(HelloReply, frame.header)
        if not PROTOCOL_VERSION_MIN <= greeting.version <= PROTOCOL_VERSION_MAX:
            theirs = greeting.version, greeting.version
            raise UnsupportedVersion(self.address, (PROTOCOL_VERSION_MIN, PROTOCOL_VERSION_MAX), theirs)
        self.greeting = greeting
        self.producer_prefix = greeting.producer_prefix
        if greeting.mechanisms:
            self._begin_login(greeting.mechanisms)
        else:
            self._opened()

    def _opened(self) -> None:
        self._reader.frame_bytes_max = FRAME_BYTES_MAX
        self._reader.trust()
        self.state = ConnectionState.OPEN

    def _begin_login(self, offered: list[str]) -> None:
        self._login = self.login()
        if self._login is None:
            raise AuthenticationFailed(self.address, "it requires a user", hint=NO_USER)
        self._mechanism, data = self._login.first(offered)
        self.state = ConnectionState.LOGIN
        self._send_login(data)

    def _send_login(self, data: bytes) -> None:
        assert self.greeting is not None
        step = Authenticate(self._mechanism, data)
        self._outgoing += encode_frame(self.greeting.version, Command.AUTHENTICATE, 0, 0, step)

    def _logged_in(self, frame: Frame) -> None:
        if frame.status != status.OK:
            error = status.decode_error(frame.status, frame.header)
            if isinstance(error, AuthenticationFailed):
                reason = getattr(error, "reason", error.problem)  # the peer may leave a field out
                raise AuthenticationFailed(self.address, reason, hint=error.hint)
            raise error
        if frame.command != Command.AUTHENTICATE:
            raise ProtocolError(f"{self.address} answered AUTHENTICATE with command {frame.command}")
        assert self._login is not None
        answer = unpack(Authenticated, frame.header)
        data = self._login.next(answer.data)
        if answer.is_done != (not data):
            raise ProtocolError(f"{self.address} ends the login at the wrong step")
        if answer.is_done:
            self.producer_prefix = answer.producer_prefix
            self.zookeeper_proof = answer.zookeeper_proof
            self._opened()
        else:
            self._send_login(data)


def _version(fields: dict[str, Any], name: str) -> int:
    version = fields.get(name)
    return version if type(version) is int else 0


class ServerConnection:
    """The broker's end. `client` is the name that the client gave."""

    def __init__(
        self,
        peer: str,
        greeting: HelloReply,
        allocate: Callable[[int], bytearray] = bytearray,
        *,
        scratch: Scratch | None = None,
    ) -> None:
        """`greeting.version` is the highest supported version; HELLO may choose a lower one.

        `allocate` returns memory for a large frame, and `scratch` saves that of an idle connection: see
        FrameReader.
        """
        self.state = ConnectionState.GREETING
        self.peer = peer
        self.client = ""
        self._takes_delays = False
        self._greeting = greeting
        self._login_steps = 0
        self._reader = FrameReader(
            frame_bytes_max=HELLO_BYTES_MAX,
            buffer_bytes=16 * 1024,
            scratch=scratch,
            initial_bytes=INITIAL_BYTES,
            unpacked_bytes_max=UNPACKED_BYTES_MAX,
            allocate=allocate,
        )
        self.next_buffer = self._reader.next_buffer

    def received(self, count: int) -> Iterator[Greeted | LoginStep | Request]:
        """The events that are complete after `count` more bytes.

        Raises ProtocolError on a broken frame, after the earlier events; the caller then sends `refusal(error)` and
        closes the connection. Later bytes are ignored. The same applies if the caller refuses a frame itself and ends
        the iteration there.
        """
        if self.state is ConnectionState.CLOSED:
            return
        try:
            for frame in self._reader.received(count):
                if self.state in AT_WORK:
                    yield self._request(frame)
                elif self.state is ConnectionState.GREETING:
                    yield self._greet(frame)
                elif self.state is ConnectionState.LOGIN:
                    yield self._login_step(frame)
        except (ProtocolError, GeneratorExit):
            self.close()
            raise

    @property
    def large_bytes(self) -> int:
        """The size of a large frame that has begun, for which next_buffer() allocates memory; 0 if none has."""
        return self._reader.large_bytes

    @property
    def in_frame(self) -> bool:
        """True if a part of a frame has arrived."""
        return self._reader.in_frame

    def close(self) -> None:
        """Notes that the connection is closed; frees the received bytes."""
        self.state = ConnectionState.CLOSED
        self._reader.close()

    def _request(self, frame: Frame) -> Request:
        if frame.version != self._greeting.version:
            raise ProtocolError(f"a frame of version {frame.version} on a connection of {self._greeting.version}")
        return Request(frame.command, frame.opaque, frame.header, frame.body)

    def _greet(self, frame: Frame) -> Greeted:
        if frame.command != Command.HELLO:
            raise ProtocolError(f"the first frame is command {frame.command}, not HELLO")
        hello = unpack(Hello, frame.header)
        self.client = hello.client
        self._takes_delays = hello.takes_delays
        version = min(hello.version_max, self._greeting.version)
        if version < max(hello.version_min, PROTOCOL_VERSION_MIN):
            return self._refuse_version(frame, hello)
        self._greeting = self._greeting._replace(version=version)
        if self._greeting.mechanisms:
            self.state = ConnectionState.LOGIN
        else:
            self._opened()
        answer = encode_frame(PROTOCOL_VERSION_MIN, Command.HELLO, status.OK, frame.opaque, self._greeting)
        return Greeted(answer, accepted=True)

    def _opened(self) -> None:
        self._reader.frame_bytes_max = self._greeting.frame_bytes_max
        self.state = ConnectionState.OPEN

    def _login_step(self, frame: Frame) -> LoginStep:
        if frame.command != Command.AUTHENTICATE:
            raise ProtocolError(f"command {frame.command} came before the login")
        self._login_steps += 1
        if self._login_steps > LOGIN_STEPS_MAX:
            raise ProtocolError(f"a login has at most {LOGIN_STEPS_MAX} messages")
        step = unpack(Authenticate, self._request(frame).header)
        return LoginStep(frame.opaque, step.mechanism, step.data)

    def login_answer(
        self, step: LoginStep, data: bytes, is_done: bool, producer_prefix: int = 0, zookeeper_proof: str = ""
    ) -> list[Buffer]:
        """The buffers that answer a message of a login. With `is_done` requests are accepted from now on."""
        assert self.state is ConnectionState.LOGIN
        if is_done:
            self._opened()
        answer = Authenticated(data, is_done, producer_prefix, zookeeper_proof)
        return encode_frame(self._greeting.version, Command.AUTHENTICATE, status.OK, step.opaque, answer)

    def login_refused(self, step: LoginStep, error: AuthenticationFailed) -> list[Buffer]:
        """The last buffers of a connection whose login fails."""
        self.close()
        number, fields = status.encode_error(error)
        return encode_frame(self._greeting.version, Command.AUTHENTICATE, number, step.opaque, fields)

    def _refuse_version(self, frame: Frame, hello: Hello) -> Greeted:
        self.state = ConnectionState.CLOSED
        ours = PROTOCOL_VERSION_MIN, self._greeting.version
        error = UnsupportedVersion(self.peer, ours, (hello.version_min, hello.version_max))
        number, fields = status.encode_error(error)
        fields["version_min"], fields["version_max"] = ours
        answer = encode_frame(PROTOCOL_VERSION_MIN, Command.HELLO, number, frame.opaque, fields)
        return Greeted(answer, accepted=False)

    def respond(
        self, request: Request, header: Any, bodies: list[Buffer] | None = None, number: int = status.OK
    ) -> list[Buffer]:
        """The buffers that answer `request`. If the answer is too large, an error that says so replaces it."""
        version, command, opaque = self._greeting.version, request.command, request.opaque
        limit = ANSWER_HEADER_BYTES_MAX
        try:
            return encode_frame(version, command, number, opaque, header, bodies, header_bytes_max=limit)
        except MessageTooLarge as error:
            number, fields = status.encode_error(error)
            return encode_frame(version, command, number, opaque, fields)

    def accept_stream(self, request: Request, header: Any) -> list[Buffer]:
        """The buffers that answer a SYNC request with OK. From now on both ends may push."""
        assert request.command == Command.SYNC
        buffers = self.respond(request, header)
        self.state = ConnectionState.STREAMING
        return buffers

    def push(self, header: Any, bodies: list[Buffer] | None = None, number: int = status.OK) -> list[Buffer]:
        """The buffers of a pushed SYNC frame. Raises MessageTooLarge; ClosedError unless streaming."""
        if self.state is not ConnectionState.STREAMING:
            raise ClosedError(f"stream to {self.peer}")
        version, limit = self._greeting.version, ANSWER_HEADER_BYTES_MAX
        return encode_frame(version, Command.SYNC, number, PUSHED, header, bodies, header_bytes_max=limit)

    def delay(self, delay: Delay) -> list[Buffer]:
        """The buffers that inform the client of a delay; none if it does not understand them."""
        if not self._takes_delays:
            return []
        return encode_frame(self._greeting.version, Command.DELAY, status.OK, PUSHED, delay)

    @staticmethod
    def refusal(error: ProtocolError) -> list[Buffer]:
        """The last buffers on a connection whose peer broke the protocol."""
        number, fields = status.encode_error(error)
        return encode_frame(PROTOCOL_VERSION_MIN, Command.HELLO, number, 0, fields)
