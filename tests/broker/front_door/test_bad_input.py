"""Bad input at the front door: each gets an error that names it, and nobody else notices."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from crc32c import crc32c

from metamq.client.net.transport import BrokerConnection
from metamq.errors import (
    ConfigError,
    ConnectError,
    CorruptData,
    MessageTooLarge,
    PartitionNotFound,
    ProtocolError,
    TopicNotFound,
    UnsupportedVersion,
)
from metamq.wire import connection, status
from metamq.wire.batch import HEADER_BYTES, PRODUCER_AT, PRODUCER_CRC_AT
from metamq.wire.commands import LATEST, Command, Hello, OffsetsEntry, OffsetsResult, PutEntry
from metamq.wire.frames import PREFIX, encode_frame
from metamq.wire.headers import unpack_list
from metamq.wire.limits import FRAME_BYTES_MAX, HELLO_BYTES_MAX, REQUEST_ENTRIES_MAX

MEBIBYTE = 1024 * 1024


def hello(version_min: int = 1, version_max: int = 1, client: str = "raw") -> bytes:
    return b"".join(encode_frame(1, Command.HELLO, 0, 0, Hello(version_min, version_max, client)))


@pytest.mark.parametrize(
    ("junk", "problem"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "the other side may not be metamq"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32), "over the limit of 4,096"),
        (bytes(64), "a frame of 4 bytes cannot have a header of 0"),
        (b"\xff" * 64, "a frame of 4,294,967,299 bytes"),
        (PREFIX.pack(FRAME_BYTES_MAX - 4, 1, 3, 0, 0, 1), "over the limit of 4,096"),
        (PREFIX.pack(13, 1, 1, 0, 0, 1) + b"\xc1", "is not msgpack"),
        (hello(client="x" * HELLO_BYTES_MAX), "over the limit of 4,096"),
        (b"".join(encode_frame(1, Command.STATS, 0, 1, None)), "the first frame is command 7, not HELLO"),
        (b"".join(encode_frame(1, Command.HELLO, 0, 1, {"a": 1})), "Hello has 4 fields"),
    ],
    ids=["http", "tls", "zeros", "ones", "giant", "header", "long name", "no hello", "no fields"],
)
def test_strangers(front: Any, junk: bytes, problem: str) -> None:
    client = front.connect(greet=False)
    client.send(junk)
    answer = client.answer()
    assert answer.command == Command.HELLO
    error = front.error_of(answer)
    assert isinstance(error, ProtocolError)
    assert problem in str(error)
    assert client.ended()


@pytest.mark.parametrize(
    ("junk", "problem"),
    [
        (PREFIX.pack(FRAME_BYTES_MAX, 1, 3, 0, 9, 1), "67,108,868 bytes"),
        (PREFIX.pack(2**32 - 1, 1, 3, 0, 9, 1), "4,294,967,299 bytes"),
        (PREFIX.pack(2 * MEBIBYTE, 1, 3, 0, 9, 2 * MEBIBYTE - 12), "a header of 2,097,140 bytes is over the limit"),
        (PREFIX.pack(5, 1, 3, 0, 9, 0), "cannot have a header"),
        (PREFIX.pack(20, 1, 3, 0, 9, 9) + bytes(8), "cannot have a header of 9"),
        (PREFIX.pack(1012, 1, 3, 0, 9, 1000) + b"\xdd\x00\x0f\xff\xff" * 200, "is not msgpack"),
        (b"".join(encode_frame(2, Command.STATS, 0, 9, None)), "a frame of version 2 on a connection of 1"),
    ],
    ids=["giant", "more giant", "giant header", "short", "long header", "arrays", "version"],
)
def test_broken_frames_close_the_connection(front: Any, junk: bytes, problem: str) -> None:
    """After an answer to what came before them, and though more is on its way."""
    client = front.connect()
    opaque, before = client.frame(Command.STATS, None)
    client.send(before + junk + bytes(MEBIBYTE))
    answer = client.answer()
    assert (answer.opaque, answer.status) == (opaque, status.OK)
    error = front.error_of(client.answer())
    assert isinstance(error, ProtocolError)
    assert problem in str(error)
    assert client.ended()


def test_frames_cut_off(front: Any) -> None:
    topic_id = front.topic("cut")
    batch = front.batch([b"value"])
    before = front.offset("cut")
    put = b"".join(encode_frame(1, Command.PUT, 0, 1, [PutEntry("cut", topic_id, 0, len(batch))], [batch]))
    whole = hello() + put
    for cut in (*range(0, len(whole), 7), len(whole) - 1):
        client = front.connect(greet=False)
        client.send(whole[:cut])
        client.close()
    front.still_serves()
    assert front.offset("cut") == before


@pytest.mark.parametrize("versions", [(2, 3), (0, 0), (7, 900)])
def test_a_client_of_another_version(front: Any, versions: tuple[int, int]) -> None:
    client = front.connect(greet=False)
    client.send(hello(*versions))
    error = front.error_of(client.answer())
    assert isinstance(error, UnsupportedVersion)
    assert f"it speaks protocol versions {versions[0]} to {versions[1]}, this side 1 to 1" in str(error)
    assert client.ended()


def test_our_own_client_of_another_version(front: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PROTOCOL_VERSION_MAX", 5)
    monkeypatch.setattr(connection, "Hello", lambda _low, _high, client, **_: Hello(4, 5, client))
    with pytest.raises(UnsupportedVersion, match="it speaks protocol versions 1 to 1, this side 1 to 5"):
        asyncio.run(BrokerConnection.open("127.0.0.1", front.port))


def test_a_client_of_a_newer_release_that_still_speaks_ours(front: Any) -> None:
    client = front.connect(greet=False)
    client.send(hello(1, 9))
    assert client.answer().header[0] == 1


@pytest.mark.parametrize("command", [0, 2, 12, 99, 255, Command.HELLO])
def test_an_unknown_command(front: Any, command: int) -> None:
    client = front.connect()
    for body in (None, [bytes(100)]):
        error = front.error_of(client.ask(command, {"what": "ever"}, body))
        assert str(error).startswith(f"command {command} is not known to this broker. It knows 3 PUT, 4 GET, ")
    assert client.ask(Command.STATS, None).status == status.OK


def test_bodies_of_the_wrong_size(front: Any) -> None:
    topic_id = front.topic("sizes")
    client = front.connect()
    batch = bytes(front.batch([b"value"]))
    size = len(batch)
    before = front.offset("sizes")
    for sizes in ([size - 8], [size + 8], [size, 8], [0, size], [size + 8, -8], [2**63], [-1], [size, size]):
        entries = [PutEntry("sizes", topic_id, 0, n) for n in sizes]
        error = front.error_of(client.ask(Command.PUT, entries, [batch]))
        assert isinstance(error, ProtocolError)
        assert "do not add up to the body's 104 bytes" in str(error)
    assert "a PUT without a batch" in str(front.error_of(client.ask(Command.PUT, [])))
    assert "a PUT without a batch" in str(front.error_of(client.ask(Command.PUT, [], [batch])))
    assert front.offset("sizes") == before


def test_bodies_where_none_belongs(front: Any) -> None:
    client = front.connect()
    for command, header in ((Command.GET, front.get()), (Command.OFFSETS, []), (Command.STATS, None)):
        for _ in range(20):  # more than may be under way at once, were they never counted off
            error = front.error_of(client.ask(command, header, [bytes(4 * MEBIBYTE)]))
            assert str(error) == f"{command.name} has no body, got 4,194,304 bytes"


@pytest.mark.parametrize("command", [Command.PUT, Command.GET, Command.OFFSETS])
@pytest.mark.parametrize("header", [None, 1, "text", {"a": 1}, [1], [[1]], [["t", "id", 0]], [None] * 7])
def test_headers_of_the_wrong_shape(front: Any, command: int, header: Any) -> None:
    client = front.connect()
    error = front.error_of(client.ask(command, header))
    assert isinstance(error, ProtocolError)
    assert client.ask(Command.STATS, None).status == status.OK


@pytest.mark.parametrize("header", [1, "text", {"a": 1}, [], ["t"], [1, "t"]])
def test_statistics_from_a_strange_place(front: Any, header: Any) -> None:
    assert isinstance(front.error_of(front.connect().ask(Command.STATS, header)), ProtocolError)


def test_a_deep_header(front: Any) -> None:
    client = front.connect()
    header: list[Any] = []
    for _ in range(900):
        header = [header]
    for command in (Command.PUT, Command.GET, Command.OFFSETS, Command.STATS):
        assert isinstance(front.error_of(client.ask(command, header)), ProtocolError)
    assert client.ask(Command.STATS, None).status == status.OK


def resealed(batch: bytearray, at: int, field: str, value: int) -> bytes:
    struct.pack_into(field, batch, at, value)
    crc = crc32c(bytes(batch[HEADER_BYTES:]), crc32c(bytes(batch[PRODUCER_AT:PRODUCER_CRC_AT])))
    struct.pack_into("<I", batch, PRODUCER_CRC_AT, crc)
    return bytes(batch)


def test_bad_batches_are_refused_and_the_good_ones_beside_them_stored(front: Any) -> None:
    front.topic("bad")
    client = front.connect()
    good = bytes(front.batch([b"good"]))
    flipped = bytearray(good)
    flipped[-1] ^= 1
    bad = {
        bytes(flipped): "the producer's checksum does not match",
        good[:80] + bytes(8): "does not fit",
        good + bytes(8): "size 104 is not the 112 bytes it came in",
        good[:88]: "size 104 is more than the 88 bytes",
        b"too short": "9 bytes are less than a header",
        resealed(bytearray(good), 40, "<H", 1): "magic is 0x0001",
        resealed(bytearray(good), 42, "<B", 9): "codec 9 is not known",
        resealed(bytearray(good), 43, "<B", 64): "flags 0x40 are not known",
        resealed(bytearray(good), 44, "<I", 0): "count 0 is outside",
        resealed(bytearray(good), 60, "<I", 8): "plain size 8 differs",
    }
    before = front.offset("bad")
    sent = [(0, good), *((0, batch) for batch in bad), (0, good)]
    results = front.put(client, "bad", sent)
    assert [r.base_offset for r in results if r.status == status.OK] == [before, before + 1]
    for result, problem in zip(results[1:-1], bad.values(), strict=True):
        error = status.decode_error(result.status, result.error)
        assert isinstance(error, CorruptData)
        assert problem in str(error)
    assert front.offset("bad") == before + 2


def test_places_that_are_not_there(front: Any) -> None:
    topic_id = front.topic("there")
    client = front.connect()
    batch = front.batch([b"value"])
    for topic, an_id, index, kind in (
        ("nowhere", topic_id, 0, TopicNotFound),
        ("", "", 0, TopicNotFound),
        ("there", "0" * 16, 0, TopicNotFound),
        ("there", topic_id, 1, PartitionNotFound),
        ("there", topic_id, 10**6, PartitionNotFound),
        ("there", topic_id, 2**63, ConfigError),
        ("there", topic_id, -1, ConfigError),
    ):
        header = client.ask(Command.PUT, [PutEntry(topic, an_id, index, len(batch))], [batch]).header
        assert type(status.decode_error(header[0][0], header[0][3])) is kind
        header = client.ask(Command.OFFSETS, [OffsetsEntry(topic, an_id, index, LATEST)]).header
        assert type(status.decode_error(header[0][0], header[0][6])) is kind
    header = client.ask(Command.OFFSETS, [OffsetsEntry("there", topic_id, 1, LATEST)]).header
    assert status.decode_error(header[0][0], header[0][6]).hint == "It has 1 partition at broker 0."
    for time_us in (-(2**63), -3, 0, 2**63, 2**64 - 1):
        header = client.ask(Command.OFFSETS, [OffsetsEntry("there", topic_id, 0, time_us)]).header
        assert unpack_list(OffsetsResult, header)[0].offset == 0


def test_answers_about_long_names_are_short(front: Any) -> None:
    client = front.connect()
    answer = client.ask(Command.OFFSETS, [OffsetsEntry("x" * 500_000, "y" * 500_000, 0, LATEST)])
    assert isinstance(status.decode_error(answer.header[0][0], answer.header[0][6]), TopicNotFound)
    assert client.frame_sizes[-1] < 5000


def test_more_entries_than_allowed(front: Any) -> None:
    client = front.connect()
    entry = OffsetsEntry("", "", 0, LATEST)
    answer = client.ask(Command.OFFSETS, [entry] * REQUEST_ENTRIES_MAX)
    assert len(answer.header) == REQUEST_ENTRIES_MAX
    for command, header in ((Command.OFFSETS, [entry]), (Command.PUT, [PutEntry("", "", 0, 1)])):
        many = [*header] * (REQUEST_ENTRIES_MAX + 1)
        body = [bytes(len(many))] if command == Command.PUT else None
        assert "4,001 entries" in str(front.error_of(client.ask(command, many, body)))


def test_a_repeat_with_another_count_is_answered_at_once(front: Any) -> None:
    """It waited for a place that the log does not have, and kept its body in the broker's memory for requests."""
    front.topic("repeats")
    client = front.connect()
    (first,) = front.put(client, "repeats", [(0, front.batch([b"x"], producer_id=77))])
    for count in (2, 1000, 1):
        (result,) = front.put(client, "repeats", [(0, front.batch([bytes(3000)] * count, producer_id=77))])
        if count == 1:
            assert (result.status, result.base_offset) == (status.OK, first.base_offset)
        else:
            error = status.decode_error(result.status, result.error)
            assert isinstance(error, ProtocolError)
            assert f"with 1 message, but its repeat has {count:,}" in str(error)
            assert not error.retriable
    assert front.offset("repeats") == 1


def test_large_messages(front: Any) -> None:
    front.topic("large", max_message_bytes=4 * MEBIBYTE)
    value = bytes(range(256)) * (2 * MEBIBYTE // 256)
    with front.cluster.producer(max_message_bytes=4 * MEBIBYTE) as producer:
        receipt = producer.send("large", value).result(timeout=60)
    with front.cluster.consumer(group="large", topics=["large"], start="earliest") as consumer:
        assert next(iter(consumer)).value == value
    assert receipt.offset == 0


def test_a_message_over_the_limit(front: Any) -> None:
    front.topic("small", max_message_bytes=100_000)
    client = front.connect()
    before = front.offset("small")
    for size, stored in ((100_000, True), (100_100, False), (2 * MEBIBYTE, False)):
        (result,) = front.put(client, "small", [(0, front.batch([bytes(size)]))])
        assert (result.status == status.OK) == stored
    error = status.decode_error(result.status, result.error)
    assert isinstance(error, MessageTooLarge)
    assert "a message for topic 'small' has 2,097,160 bytes, the limit is 100,000" in str(error)
    assert front.offset("small") == before + 1
    with front.cluster.producer() as producer:
        producer.send("small", b"known from here on").result(timeout=60)
        with pytest.raises(MessageTooLarge, match="the limit is 100,000"):
            producer.send("small", bytes(100_001))
        producer.flush(timeout=60)
    assert front.offset("small") == before + 2


def test_a_batch_over_the_limit(front: Any) -> None:
    front.topic("small", max_message_bytes=100_000)
    client = front.connect()
    claims = resealed(front.batch([b"x"]), 60, "<I", 2**31)
    (result,) = front.put(client, "small", [(0, claims)])
    assert isinstance(status.decode_error(result.status, result.error), MessageTooLarge)


@contextmanager
def listener(*answers: bytes) -> Iterator[int]:
    """A server on the port, for one connection: whenever it gets something it sends the next of `answers`."""

    def serve() -> None:
        accepted, _address = server.accept()
        with accepted:
            for answer in answers:
                accepted.recv(65536)
                accepted.sendall(answer)
            while accepted.recv(65536):
                pass

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        thread.join()


def test_our_client_meets_somebody_else() -> None:
    """A server that is not a broker, and one that says nothing."""
    with listener(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        with pytest.raises(ConnectError, match="the other side may not be metamq") as caught:
            asyncio.run(BrokerConnection.open("127.0.0.1", port))
        assert type(caught.value) is ConnectError
    with listener() as port, pytest.raises(ConnectError, match=r"no answer within 0\.2 s"):
        asyncio.run(BrokerConnection.open("127.0.0.1", port, timeout_s=0.2))


def test_our_client_meets_nobody_and_names_the_address_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(ConnectError) as caught:
            asyncio.run(BrokerConnection.open("127.0.0.1", port))  # on asyncio's own loop, as metamq.aio may be
        assert caught.value.problem == f"no connection to 127.0.0.1:{port}: Connection refused"


def test_our_client_when_the_broker_answers_what_was_not_asked() -> None:
    """What was under way on the connection may have been done: its outcome is unknown."""

    async def meet(port: int) -> ConnectError:
        opened = await BrokerConnection.open("127.0.0.1", port)
        with pytest.raises(ConnectError, match="answered request 77, command 3, which was not made") as caught:
            await opened.request(Command.STATS, None, timeout_s=60)
        assert not opened.alive
        assert opened.closed.result() is caught.value
        await opened.close()
        return caught.value

    greeting = b"".join(encode_frame(1, Command.HELLO, 0, 0, [1, 0, 1, 1, 1, FRAME_BYTES_MAX, "odd"]))
    with listener(greeting, b"".join(encode_frame(1, Command.PUT, 0, 77, None))) as port:
        assert asyncio.run(meet(port)).outcome == "unknown"
