"""Both ends of a connection, fed to each other byte by byte or all at once."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metamq.errors import ClosedError, ConfigError, MessageTooLarge, MetamqError, ProtocolError, UnsupportedVersion
from metamq.wire import connection as both
from metamq.wire import status
from metamq.wire.commands import Command, Hello, HelloReply
from metamq.wire.connection import ClientConnection, ConnectionState, Greeted, Request, Response, ServerConnection
from metamq.wire.frames import PREFIX, Buffer, encode_frame
from metamq.wire.limits import ANSWER_HEADER_BYTES_MAX, FRAME_BYTES_MAX, HEADER_BYTES_MAX, HELLO_BYTES_MAX
from tests.examples import examples

BROKER = HelloReply(1, 0, 5, 4_000_000, 16_000_000, FRAME_BYTES_MAX, "metamq test")


def joined(buffers: list[Buffer]) -> bytes:
    return b"".join(buffers)


def feed(end: ClientConnection | ServerConnection, data: bytes, piece: int = 1 << 30) -> list[Any]:
    """What comes out of an end for `data` received in pieces of at most `piece` bytes. Raises its error."""
    events, error = until_error(end, data, piece)
    if error is not None:
        raise error
    return events


def until_error(
    end: ClientConnection | ServerConnection, data: bytes, piece: int
) -> tuple[list[Any], MetamqError | None]:
    """As feed(), with the error beside what came before it."""
    events: list[Any] = []
    at = 0
    while at < len(data):
        buffer = end.next_buffer()
        count = min(len(buffer), len(data) - at, piece)
        buffer[:count] = data[at : at + count]
        at += count
        try:
            for event in end.received(count):
                events.append(event)  # noqa: PERF402  # what came before the error counts
        except MetamqError as error:
            return events, error
    return events, None


def hello(version_min: int = 1, version_max: int = 1, client: str = "me", opaque: int = 0) -> bytes:
    return joined(encode_frame(1, Command.HELLO, 0, opaque, Hello(version_min, version_max, client)))


def opened() -> tuple[ClientConnection, ServerConnection]:
    client, server = ClientConnection("broker:1", "me"), ServerConnection("peer", BROKER)
    (greeted,) = feed(server, joined(client.hello()))
    assert isinstance(greeted, Greeted)
    assert greeted.accepted
    assert feed(client, joined(greeted.buffers)) == []
    return client, server


def test_greeting() -> None:
    client, server = opened()
    assert client.greeting == BROKER
    assert server.client == "me"
    assert (client.state, server.state) == (ConnectionState.OPEN, ConnectionState.OPEN)


@settings(deadline=None, max_examples=examples(100))
@given(st.lists(st.binary(max_size=100), max_size=12), st.randoms(use_true_random=False), st.integers(1, 200))
def test_many_requests_at_once_answered_in_any_order(bodies: list[bytes], chance: random.Random, piece: int) -> None:
    client, server = opened()
    asked = {}
    data = b""
    for n, body in enumerate(bodies):
        opaque, buffers = client.request(Command.PUT, ["entry", n], [body] if body else None)
        asked[opaque] = (n, body)
        data += joined(buffers)
    requests = feed(server, data, piece)
    assert [(r.opaque, r.header[1], bytes(r.body)) for r in requests] == [(o, n, b) for o, (n, b) in asked.items()]
    chance.shuffle(requests)
    answers = b"".join(joined(server.respond(r, [r.header[1]], [bytes(r.body)] if r.body else None)) for r in requests)
    responses = feed(client, answers, piece)
    assert [(r.opaque, r.header, bytes(r.body), r.status) for r in responses] == [
        (r.opaque, [asked[r.opaque][0]], asked[r.opaque][1], status.OK) for r in requests
    ]


def test_what_comes_out_does_not_depend_on_the_pieces() -> None:
    """Also with a frame too large for a HELLO right behind it, and with junk at the end."""
    after = encode_frame(1, Command.PUT, 0, 1, None, [bytes(2 * HELLO_BYTES_MAX)])
    data = hello() + joined(after) + joined(encode_frame(1, Command.STATS, 0, 2, None)) + b"junk, junk, junk!"
    seen = []
    for piece in (1, 7, 16, 4096, len(data)):
        server = ServerConnection("peer", BROKER)
        events, error = until_error(server, data, piece)
        seen.append(([type(e).__name__ for e in events], [e.opaque for e in events[1:]], str(error)))
        assert server.state is ConnectionState.CLOSED
    assert seen == [seen[0]] * 5
    assert seen[0][:2] == (["Greeted", "Request", "Request"], [1, 2])


def test_an_unknown_command_is_a_request_like_any_other() -> None:
    client, server = opened()
    opaque, buffers = client.request(99, {"what": "ever"})
    (request,) = feed(server, joined(buffers))
    assert (request.command, request.header) == (99, {"what": "ever"})
    number, fields = status.encode_error(ProtocolError("no such command"))
    (response,) = feed(client, joined(server.respond(request, fields, number=number)))
    assert (response.opaque, response.status) == (opaque, number)
    assert str(status.decode_error(response.status, response.header)) == "no such command"
    assert (client.state, server.state) == (ConnectionState.OPEN, ConnectionState.OPEN)


@pytest.mark.parametrize(
    ("theirs", "ours", "upgrade"),
    [((2, 9), (1, 1), "Upgrade this side"), ((0, 0), (1, 1), "Upgrade the other side")],
)
def test_a_client_of_another_version(theirs: tuple[int, int], ours: tuple[int, int], upgrade: str) -> None:
    server = ServerConnection("peer", BROKER)
    (greeted,) = feed(server, hello(*theirs, opaque=3))
    assert not greeted.accepted
    assert server.state is ConnectionState.CLOSED
    client = ClientConnection("broker:1", "me")
    with pytest.raises(UnsupportedVersion) as caught:
        feed(client, joined(greeted.buffers))
    assert client.state is ConnectionState.CLOSED
    assert (caught.value.theirs, caught.value.ours) == (ours, (1, 1))
    frame = feed_frame(joined(greeted.buffers))
    error = status.decode_error(frame.status, frame.header)
    assert isinstance(error, UnsupportedVersion)
    assert (error.ours, error.theirs) == (ours, theirs)  # as the broker says it
    assert f"it speaks protocol versions {theirs[0]} to {theirs[1]}, this side 1 to 1" in str(error)
    assert error.hint.startswith(upgrade)
    assert feed(server, joined(encode_frame(1, Command.STATS, 0, 1, None))) == []


def feed_frame(data: bytes) -> Any:
    from metamq.wire.frames import FrameReader

    reader = FrameReader(initial_bytes=1024)
    reader.next_buffer()[: len(data)] = data
    (frame,) = reader.received(len(data))
    return frame


def test_the_highest_version_that_both_speak(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = BROKER._replace(version=3)
    for client_max, settled in ((1, 1), (2, 2), (3, 3), (200, 3)):
        server = ServerConnection("peer", newer)
        events = feed(server, hello(1, client_max) + joined(encode_frame(settled, Command.STATS, 0, 1, None)))
        assert feed_frame(joined(events[0].buffers)).header[0] == settled
        assert isinstance(events[1], Request)
        assert feed_frame(joined(server.respond(events[1], None))).version == settled
    monkeypatch.setattr(both, "PROTOCOL_VERSION_MIN", 2)
    (greeted,) = feed(ServerConnection("peer", newer), hello(1, 1))
    assert feed_frame(joined(greeted.buffers)).header["ours"] == [2, 3]


@pytest.mark.parametrize("version", [0, 2, 300, -1])
def test_a_broker_that_chooses_a_version_that_was_not_offered(version: int) -> None:
    client = ClientConnection("broker:1", "me")
    with pytest.raises(UnsupportedVersion, match=f"speaks protocol versions {version} to {version}, this side 1 to 1"):
        feed(client, joined(encode_frame(1, Command.HELLO, status.OK, 0, BROKER._replace(version=version))))


@pytest.mark.parametrize("fields", [{}, {"version_min": "x"}, {"version_min": None, "version_max": [1]}])
def test_a_refusal_without_versions(fields: dict[str, Any]) -> None:
    number, known = status.encode_error(UnsupportedVersion("a", (1, 1), (2, 2)))
    with pytest.raises(UnsupportedVersion, match="versions 0 to 0"):
        feed(ClientConnection("b", "me"), joined(encode_frame(1, Command.HELLO, number, 0, {**known, **fields})))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (joined(encode_frame(1, Command.STATS, 0, 1, None)), "first frame is command 7, not HELLO"),
        (joined(encode_frame(1, Command.HELLO, 0, 1, None)), "Hello has 4 fields, got None"),
        (joined(encode_frame(1, Command.HELLO, 0, 1, [1, 1])), "Hello has 4 fields"),
        (joined(encode_frame(1, Command.HELLO, 0, 1, ["1", 1, "me"])), "Hello.version_min must be"),
        (joined(encode_frame(1, Command.HELLO, 0, 1, [True, 1, "me"])), "Hello.version_min must be"),
        (hello(client="x" * HELLO_BYTES_MAX), "over the limit of 4,096"),
        (PREFIX.pack(913, 1, 1, 0, 0, 901) + b"\x91" * 900 + b"\xc0", "Hello has 4 fields"),
        (hello() + joined(encode_frame(2, Command.STATS, 0, 1, None)), "version 2 on a connection of 1"),
    ],
    ids=["no HELLO", "nil", "two fields", "str", "bool", "long", "deep", "other version"],
)
def test_what_a_broker_refuses_to_read_on(data: bytes, problem: str) -> None:
    server = ServerConnection("peer", BROKER)
    _events, error = until_error(server, data, 1 << 20)
    assert isinstance(error, ProtocolError)
    assert problem in str(error)
    assert server.state is ConnectionState.CLOSED
    refusal = joined(server.refusal(error))
    assert len(refusal) <= HELLO_BYTES_MAX
    with pytest.raises(ProtocolError) as caught:
        feed(ClientConnection("broker:1", "me"), refusal)
    assert problem in str(caught.value)
    assert feed(server, hello()) == []


def test_a_refusal_on_an_open_connection_is_told() -> None:
    client, server = opened()
    client.request(Command.STATS, None)
    with pytest.raises(ProtocolError, match="broker:1 closes: a frame of 9 bytes"):
        feed(client, joined(server.refusal(ProtocolError("a frame of 9 bytes"))))
    assert client.state is ConnectionState.CLOSED


@pytest.mark.parametrize(
    ("command", "opaque", "version", "problem"),
    [
        (Command.STATS, 2, 1, "answered request 2, command 7, which was not made"),
        (Command.GET, 1, 1, "answered request 1, command 4, which was not made"),
        (Command.STATS, 0, 1, "answered request 0"),
        (Command.STATS, 1, 9, "sent a frame of version 9, not 1"),
    ],
)
def test_a_response_to_a_request_that_was_not_made(command: int, opaque: int, version: int, problem: str) -> None:
    client, _server = opened()
    client.request(Command.STATS, None)
    with pytest.raises(ProtocolError, match=problem):
        feed(client, joined(encode_frame(version, command, 0, opaque, None)))
    assert client.state is ConnectionState.CLOSED


def test_a_second_response_to_one_request() -> None:
    client, server = opened()
    _opaque, buffers = client.request(Command.STATS, None)
    (request,) = feed(server, joined(buffers))
    answer = joined(server.respond(request, {}))
    events, error = until_error(client, answer + answer, 1 << 20)
    assert [type(event) for event in events] == [Response]
    assert "which was not made" in str(error)


@pytest.mark.parametrize("piece", [1, 50, 10**6])
def test_who_refuses_a_frame_gets_no_frame_twice(piece: int) -> None:
    """The caller has seen the frames before it: they do not come out again with the next bytes."""
    _client, server = opened()
    frames = [joined(encode_frame(1, Command.STATS, 0, number, None)) for number in (1, 2, 3)]
    seen: list[int] = []
    data = b"".join(frames) + frames[0] + bytes(7)
    for at in range(0, len(data), piece):
        part = data[at : at + piece]
        server.next_buffer()[: len(part)] = part
        for event in server.received(len(part)):
            assert isinstance(event, Request)
            seen.append(event.opaque)
            if event.opaque == 2:
                break
    assert seen == [1, 2]
    assert server.state is ConnectionState.CLOSED


def test_data_after_the_end_is_ignored() -> None:
    client, server = opened()
    _opaque, buffers = client.request(Command.STATS, None)
    (request,) = feed(server, joined(buffers))
    _events, error = until_error(client, b"\x00" * 16, 16)
    assert error is not None
    assert feed(client, joined(server.respond(request, {})) * 5000) == []
    with pytest.raises(ClosedError):
        client.request(Command.STATS, None)


def streaming() -> tuple[ClientConnection, ServerConnection]:
    client, server = opened()
    _opaque, buffers = client.request(Command.SYNC, ["join"])
    (request,) = feed(server, joined(buffers))
    (response,) = feed(client, joined(server.accept_stream(request, ["accept"])))
    assert (response.status, response.header) == (status.OK, ["accept"])
    return client, server


@settings(deadline=None, max_examples=examples(50))
@given(st.lists(st.tuples(st.booleans(), st.binary(max_size=100)), max_size=12), st.integers(1, 200))
def test_on_a_stream_both_ends_push(pushed: list[tuple[bool, bytes]], piece: int) -> None:
    client, server = streaming()
    assert (client.state, server.state) == (ConnectionState.STREAMING, ConnectionState.STREAMING)
    for end, other in ((client, server), (server, client)):
        mine = [body for by_client, body in pushed if by_client == (end is client)]
        data = b"".join(joined(end.push([n], [body] if body else None)) for n, body in enumerate(mine))
        got = feed(other, data, piece)
        assert [(g.command, g.opaque, g.header, bytes(g.body)) for g in got] == [
            (Command.SYNC, 0, [n], body) for n, body in enumerate(mine)
        ]


def test_on_a_stream_requests_go_on() -> None:
    client, server = streaming()
    opaque, buffers = client.request(Command.STATS, None)
    (request,) = feed(server, joined(client.push(["a"])) + joined(buffers))[1:]
    events = feed(client, joined(server.push(["b"])) + joined(server.respond(request, {"c": 1})))
    assert [(event.opaque, event.header) for event in events] == [(0, ["b"]), (opaque, {"c": 1})]


def test_a_push_right_behind_the_acceptance_counts() -> None:
    client, server = opened()
    _opaque, buffers = client.request(Command.SYNC, ["join"])
    (request,) = feed(server, joined(buffers))
    data = joined(server.accept_stream(request, None)) + joined(server.push(["first"]))
    for piece in (1, len(data)):
        other, _server = opened()
        other.request(Command.SYNC, ["join"])
        assert [event.header for event in feed(other, data, piece)] == [None, ["first"]]


def test_before_it_is_accepted_nobody_pushes() -> None:
    client, server = opened()
    pushed = joined(streaming()[1].push(["early"]))
    for end in (client, server):
        with pytest.raises(ClosedError):
            end.push(["early"])
    with pytest.raises(ProtocolError, match="answered request 0, command 5, which was not made"):
        feed(client, pushed)


def test_a_join_that_is_refused_begins_no_stream() -> None:
    client, server = opened()
    _opaque, buffers = client.request(Command.SYNC, ["join"])
    (request,) = feed(server, joined(buffers))
    number, fields = status.encode_error(ConfigError("another broker's"))
    (response,) = feed(client, joined(server.respond(request, fields, number=number)))
    assert str(status.decode_error(response.status, response.header)) == "another broker's"
    assert (client.state, server.state) == (ConnectionState.OPEN, ConnectionState.OPEN)


@pytest.mark.parametrize(
    ("command", "opaque", "version"),
    [(Command.PUT, 0, 1), (Command.SYNC, 7, 1), (Command.HELLO, 0, 1), (Command.SYNC, 0, 2)],
)
def test_on_a_stream_nothing_else_comes_unasked(command: int, opaque: int, version: int) -> None:
    client, _server = streaming()
    with pytest.raises(ProtocolError):
        feed(client, joined(encode_frame(version, command, 0, opaque, None)))
    assert client.state is ConnectionState.CLOSED
    with pytest.raises(ClosedError):
        client.push([])


def test_a_broker_may_say_why_it_ends_the_stream() -> None:
    client, server = streaming()
    number, fields = status.encode_error(ConfigError("another is the master"))
    (last,) = feed(client, joined(server.push(fields, number=number)))
    assert (last.opaque, str(status.decode_error(last.status, last.header))) == (0, "another is the master")


def test_no_request_before_the_greeting() -> None:
    with pytest.raises(ClosedError):
        ClientConnection("broker:1", "me").request(Command.STATS, None)


def test_any_error_may_refuse_a_hello() -> None:
    number, fields = status.encode_error(ConfigError("not from your network"))
    with pytest.raises(ConfigError, match="not from your network"):
        feed(ClientConnection("b", "me"), joined(encode_frame(1, Command.HELLO, number, 0, fields)))


@pytest.mark.parametrize("header", [None, [], [1, 2, 3], ["x"] * 7, {"version": 1}])
def test_a_greeting_that_is_none(header: Any) -> None:
    with pytest.raises(ProtocolError, match="HelloReply"):
        feed(ClientConnection("b", "me"), joined(encode_frame(1, Command.HELLO, 0, 0, header)))
    with pytest.raises(ProtocolError, match="answered HELLO with command 3"):
        feed(ClientConnection("b", "me"), joined(encode_frame(1, Command.PUT, 0, 0, header)))


def test_requests_keep_the_brokers_limits() -> None:
    client = ClientConnection("broker:1", "me")
    feed(client, joined(encode_frame(1, Command.HELLO, 0, 0, BROKER._replace(frame_bytes_max=1000))))
    with pytest.raises(MessageTooLarge, match="a frame has 1,024 bytes, the limit is 1,000"):
        client.request(Command.PUT, None, [bytes(1000)])
    with pytest.raises(MessageTooLarge, match="a frame's header"):
        client.request(Command.PUT, "x" * HEADER_BYTES_MAX)
    opaque, _buffers = client.request(Command.PUT, None, [bytes(100)])
    assert opaque == 1


def test_numbers_of_requests_begin_again_at_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(both, "OPAQUE_MAX", 3)
    client, server = opened()
    opaques = []
    for _ in range(5):
        opaque, buffers = client.request(Command.STATS, None)
        opaques.append(opaque)
        feed(client, joined(server.respond(feed(server, joined(buffers))[0], None)))
    assert opaques == [1, 2, 3, 1, 2]


def test_an_answer_may_have_a_larger_header_but_not_any() -> None:
    client, server = opened()
    for size, fits in ((2 * HEADER_BYTES_MAX, True), (ANSWER_HEADER_BYTES_MAX, False)):
        _opaque, buffers = client.request(Command.STATS, None)
        (request,) = feed(server, joined(buffers))
        (response,) = feed(client, joined(server.respond(request, "x" * size)))
        assert (response.status == status.OK) == fits
    error = status.decode_error(response.status, response.header)
    assert isinstance(error, MessageTooLarge)
    assert "8,388,613 bytes, the limit is 8,388,608" in str(error)


def test_a_broker_that_announces_the_moon_costs_little() -> None:
    client, _server = opened()
    client.request(Command.GET, None)
    announced = PREFIX.pack(FRAME_BYTES_MAX - 4, 1, Command.GET, 0, 1, 1) + b"\xc0"
    tracemalloc.start()
    try:
        assert feed(client, announced) == []
        assert tracemalloc.get_traced_memory()[1] < 4 * 1024 * 1024
    finally:
        tracemalloc.stop()


@settings(deadline=None, max_examples=examples(300))
@given(st.binary(max_size=300), st.sampled_from([None, opened, streaming]), st.integers(1, 300))
def test_junk_is_refused_or_waits_for_more(junk: bytes, begin: Any, piece: int) -> None:
    server = ServerConnection("peer", BROKER)
    client = ClientConnection("broker:1", "me")
    if begin is not None:
        client, server = begin()
    for end in (client, server):
        _events, error = until_error(end, junk, piece)
        assert error is None or isinstance(error, MetamqError)
        assert (end.state is ConnectionState.CLOSED) == (error is not None)


def test_a_client_makes_room_for_a_whole_answer_at_once_and_a_broker_does_not() -> None:
    """What a broker that was greeted announces is received where it stays."""
    client, server = opened()
    for opaque in (1, 2):
        client.request(Command.GET, None)
        answer = joined(encode_frame(1, Command.GET, 0, opaque, [], [bytes(4 << 20)]))
        assert feed(client, answer[:1000]) == []
        assert len(client.next_buffer()) == len(answer) - 1000
        assert len(feed(client, answer[1000:])) == 1
    put = joined(encode_frame(1, Command.PUT, 0, 1, [], [bytes(4 << 20)]))
    assert feed(server, put[:1000]) == []
    assert len(server.next_buffer()) < 100_000


@pytest.mark.parametrize("rest", [0, 1, 20_000, 1 << 20])
def test_after_a_request_that_closes_there_is_still_room_to_throw_the_rest_into(rest: int) -> None:
    """The frame is whole, only what it says is wrong: the reader itself has seen no error."""
    for spoiled in (encode_frame(2, Command.STATS, 0, 1, None), encode_frame(1, Command.HELLO, 0, 1, None)):
        end = opened()[1] if spoiled[0][4] == 2 else ServerConnection("peer", BROKER)
        _events, error = until_error(end, joined(spoiled) + bytes(rest), 1 << 30)
        assert isinstance(error, ProtocolError)
        for _ in range(3):
            assert feed(end, bytes(100_000)) == []
