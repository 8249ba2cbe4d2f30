"""The two ends of a connection, without the connection: bytes in, events out; calls in, buffers out.

    state      client                                    broker
    GREETING   hello() sent, HelloReply awaited          HELLO awaited, small frames only
    OPEN       request() any number, responses in        requests in any number, respond() in any order
               any order
    CLOSED     after a broken frame or close()           the same

No socket, clock or thread is in here, and both ends share the class: a transport feeds `received()` and writes what
the other calls return. An error in a frame closes; an error in a request is answered.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

from metamq.errors import ClosedError, ProtocolError, UnsupportedVersion
from metamq.wire import status
from metamq.wire.commands import Command, Hello, HelloReply, unpack
from metamq.wire.frames import Buffer, Frame, FrameReader, encode_frame
from metamq.wire.limits import (
    BATCH_TARGET_BYTES,
    FRAME_BYTES_MAX,
    HELLO_BYTES_MAX,
    PROTOCOL_VERSION_MAX,
    PROTOCOL_VERSION_MIN,
)

OPAQUE_MAX = 0xFFFFFFFF


class State(enum.Enum):
    """Where a connection is in its life."""

    GREETING = "greeting"
    OPEN = "open"
    CLOSED = "closed"


class Response(NamedTuple):
    """An answer to the request numbered `opaque`: a header and a body, or an error's status and fields."""

    command: int
    opaque: int
    status: int
    header: Any
    body: memoryview


class Request(NamedTuple):
    """A request to be answered with respond(opaque, ...)."""

    command: int
    opaque: int
    header: Any
    body: memoryview


class ClientConnection:
    """The requesting end."""

    def __init__(self, address: str, client: str) -> None:
        self.state = State.GREETING
        self.address = address
        self.greeting: HelloReply | None = None
        self._client = client
        self._opaque = 0
        self._waiting: dict[int, int] = {}
        # What a broker announces is trusted up to the frame limit: large bodies are received without growing.
        self._reader = FrameReader(initial_bytes=FRAME_BYTES_MAX)
        self.next_buffer = self._reader.next_buffer

    def hello(self) -> list[Buffer]:
        """The first bytes to send."""
        assert self.state is State.GREETING
        greeting = Hello(PROTOCOL_VERSION_MIN, PROTOCOL_VERSION_MAX, self._client)
        return encode_frame(PROTOCOL_VERSION_MIN, Command.HELLO, 0, 0, greeting)

    def request(self, command: int, header: Any, bodies: list[Buffer] | None = None) -> tuple[int, list[Buffer]]:
        """(opaque, buffers to send). Raises ClosedError unless the connection is open."""
        if self.state is not State.OPEN or self.greeting is None:
            raise ClosedError(f"connection to {self.address}")
        self._opaque = self._opaque % OPAQUE_MAX + 1
        assert self._opaque not in self._waiting
        self._waiting[self._opaque] = command
        return self._opaque, encode_frame(self.greeting.version, command, 0, self._opaque, header, bodies)

    def received(self, count: int) -> list[Response]:
        """The responses that are complete after `count` more bytes.

        The HELLO's response opens the connection and is not returned. Raises ProtocolError or UnsupportedVersion,
        after which the connection is closed.
        """
        try:
            return [r for frame in self._reader.received(count) if (r := self._response(frame)) is not None]
        except Exception:
            self.state = State.CLOSED
            raise

    def _response(self, frame: Frame) -> Response | None:
        if self.state is State.GREETING:
            self._greeted(frame)
            return None
        if self._waiting.pop(frame.opaque, None) != frame.command:
            raise ProtocolError(
                f"{self.address} answered request {frame.opaque}, command {frame.command}, which was not made"
            )
        return Response(frame.command, frame.opaque, frame.status, frame.header, frame.body)

    def _greeted(self, frame: Frame) -> None:
        if frame.command != Command.HELLO:
            raise ProtocolError(f"{self.address} answered HELLO with command {frame.command}")
        if frame.status != status.OK:
            error = status.decode_error(frame.status, frame.header)
            if isinstance(error, UnsupportedVersion):
                theirs = frame.header.get("version_min", 0), frame.header.get("version_max", 0)
                error = UnsupportedVersion(self.address, (PROTOCOL_VERSION_MIN, PROTOCOL_VERSION_MAX), theirs)
            raise error
        self.greeting = unpack(HelloReply, frame.header)
        self.state = State.OPEN


class ServerConnection:
    """The answering end."""

    def __init__(self, peer: str, greeting: HelloReply) -> None:
        self.state = State.GREETING
        self.peer = peer
        self.client = ""
        self._greeting = greeting
        self._reader = FrameReader(
            frame_bytes_max=HELLO_BYTES_MAX, buffer_bytes=16 * 1024, initial_bytes=2 * BATCH_TARGET_BYTES
        )
        self.next_buffer = self._reader.next_buffer

    @property
    def pending_bytes(self) -> int:
        """Bytes received of a request that is not complete."""
        return self._reader.pending_bytes

    def received(self, count: int) -> tuple[list[Request], list[Buffer]]:
        """(requests that are complete now, bytes to send at once): the latter answer a HELLO.

        Raises ProtocolError on a broken frame; the caller sends `refusal(error)` and closes.
        """
        requests: list[Request] = []
        answers: list[Buffer] = []
        try:
            for frame in self._reader.received(count):
                if self.state is State.GREETING:
                    answers += self._greet(frame)
                elif self.state is State.OPEN:
                    requests.append(self._request(frame))
        except Exception:
            self.state = State.CLOSED
            raise
        return requests, answers

    def _request(self, frame: Frame) -> Request:
        if frame.version != self._greeting.version:
            raise ProtocolError(f"a frame of version {frame.version} on a connection of {self._greeting.version}")
        return Request(frame.command, frame.opaque, frame.header, frame.body)

    def _greet(self, frame: Frame) -> list[Buffer]:
        if frame.command != Command.HELLO:
            raise ProtocolError(f"the first frame is command {frame.command}, not HELLO")
        hello = unpack(Hello, frame.header)
        self.client = hello.client
        if not hello.version_min <= self._greeting.version <= hello.version_max:
            return self._refuse_version(hello)
        self._reader.frame_bytes_max = self._greeting.frame_bytes_max
        self.state = State.OPEN
        return encode_frame(PROTOCOL_VERSION_MIN, Command.HELLO, status.OK, frame.opaque, self._greeting)

    def _refuse_version(self, hello: Hello) -> list[Buffer]:
        self.state = State.CLOSED
        ours = PROTOCOL_VERSION_MIN, PROTOCOL_VERSION_MAX
        error = UnsupportedVersion(self.peer, ours, (hello.version_min, hello.version_max))
        number, fields = status.encode_error(error)
        fields["version_min"], fields["version_max"] = ours
        return encode_frame(PROTOCOL_VERSION_MIN, Command.HELLO, number, 0, fields)

    def respond(
        self, request: Request, header: Any, bodies: list[Buffer] | None = None, number: int = status.OK
    ) -> list[Buffer]:
        """The bytes that answer `request`."""
        return encode_frame(self._greeting.version, request.command, number, request.opaque, header, bodies)

    def refusal(self, error: ProtocolError) -> list[Buffer]:
        """The last bytes on a connection whose peer broke the protocol."""
        number, fields = status.encode_error(error)
        return encode_frame(PROTOCOL_VERSION_MIN, Command.HELLO, number, 0, fields)
