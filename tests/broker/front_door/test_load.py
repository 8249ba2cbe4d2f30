"""Many connections, and clients that do not read: the broker's memory stays bounded, and the others are served."""

from __future__ import annotations

import time
from typing import Any

import pytest

from metamq.wire import status
from metamq.wire.commands import Command, GetPartition, GetResult, PutEntry, PutResult
from metamq.wire.frames import PREFIX
from metamq.wire.headers import unpack_list
from metamq.wire.limits import FETCH_BYTES_MAX, FRAME_BYTES_MAX

pytestmark = pytest.mark.timeout(600)  # thousands of connections
KIB = 1024
MEBIBYTE = 1024 * KIB


CONNECTIONS = 1000


def test_a_thousand_idle_connections(front: Any) -> None:
    front.still_serves()
    before = front.rss()
    for _ in range(CONNECTIONS):
        front.connect()
    idle = front.rss() - before
    began = time.monotonic()
    for _ in range(20):
        front.still_serves()
    took_s = time.monotonic() - began
    print(f"1,000 idle connections: {idle / 1000 / KIB:.1f} KiB each; 20 round trips beside them: {took_s:.2f} s")
    assert idle < 1000 * 64 * KIB
    assert took_s < 60


@pytest.mark.slow
def test_a_thousand_connections_that_all_produce_and_fetch(front: Any) -> None:
    """All polls are parked at once, then every connection sends; each gets its own message, and each is stored once."""
    topic_id = front.topic("crowd", 4)
    clients = [front.connect() for _ in range(CONNECTIONS)]
    front.still_serves()
    before = front.rss()
    ends = [front.offset("crowd", index) for index in range(4)]
    polls: list[int] = []
    for number, client in enumerate(clients):
        index = number % 4
        opened = [GetPartition(1, "crowd", topic_id, index)]
        poll = front.get(opened=opened, armed=[(1, ends[index])], wait_ms=120_000)
        polls.append(client.request(Command.GET, poll))
    puts: list[int] = []
    for number, client in enumerate(clients):
        batch = front.batch([b"from %d" % number])
        entry = PutEntry("crowd", topic_id, number % 4, len(batch))
        puts.append(client.request(Command.PUT, [entry], [batch]))
    places: dict[tuple[int, int], bytes] = {}
    for number, client in enumerate(clients):
        answers = {answer.opaque: answer for answer in (client.answer(), client.answer())}
        (stored,) = unpack_list(PutResult, answers[puts[number]].header)
        assert stored.status == status.OK
        places[number % 4, stored.base_offset] = b"from %d" % number
        polled = answers[polls[number]]
        (result,) = unpack_list(GetResult, polled.header)
        assert result.status == status.OK
        assert front.values_in(polled.body), "a poll that was parked brings something"
    assert sorted(places) == [(index, end + n) for index, end in enumerate(ends) for n in range(CONNECTIONS // 4)]
    for number, client in enumerate(clients):
        index = number % 4
        offset = ends[index] + number // 4
        answer = client.ask(Command.GET, front.get(armed=[(1, offset)], partition_bytes_max=1))
        assert front.values_in(answer.body) == [places[index, offset]]
    grown = front.rss() - before
    print(f"1,000 connections at work: the broker grew by {grown / 1000 / KIB:.1f} KiB each")
    assert grown < CONNECTIONS * 64 * KIB


def test_a_thousand_announcements_of_large_frames(front: Any) -> None:
    before = front.rss()
    for _ in range(1000):
        front.connect().send(PREFIX.pack(FRAME_BYTES_MAX - 4, 1, Command.PUT, 0, 1, 1) + b"\xc0")
    front.still_serves()
    cost = front.rss() - before
    print(f"a length alone: {cost / 1000 / KIB:.1f} KiB")
    assert cost < 1000 * 128 * KIB


@pytest.mark.slow
def test_answers_that_are_not_read(front: Any) -> None:
    """Requests wait in the kernel while their client does not read; all are answered once it does."""
    front.topic("thousand", 1000)
    front.still_serves()
    client = front.connect(receive_buffer=64 * KIB)
    client.ask(Command.STATS, None)
    one = client.frame_sizes[-1]
    count = 60 * MEBIBYTE // one
    before = front.rss()
    frames = [client.frame(Command.STATS, None) for _ in range(count)]
    client.send(b"".join(data for _opaque, data in frames))
    began = time.monotonic()
    for _ in range(20):
        front.still_serves()
    took_s = time.monotonic() - began
    grown = front.rss() - before
    print(f"{count} answers of {one / KIB:.0f} KiB unread: the broker grew by {grown / MEBIBYTE:.1f} MiB")
    assert grown < 20 * MEBIBYTE
    assert took_s < 60
    assert [client.answer().opaque for _ in frames] == [opaque for opaque, _data in frames]


def test_a_consumer_that_never_reads(front: Any) -> None:
    """One answer is all that it costs, however often it asks."""
    topic_id = front.topic("unread")
    for _ in range(48):
        front.fill("unread", 0, [bytes(MEBIBYTE - 8)])
    client = front.connect(receive_buffer=64 * KIB)
    largest = {"bytes_max": FETCH_BYTES_MAX, "partition_bytes_max": FETCH_BYTES_MAX}
    before = front.rss()
    client.request(Command.GET, front.get(opened=[GetPartition(1, "unread", topic_id, 0)], armed=[(1, 0)], **largest))
    for n in range(100):
        client.request(Command.GET, front.get(armed=[(1, n % 40)], **largest))
    for _ in range(20):
        front.still_serves()
    grown = front.rss() - before
    print(f"a consumer that never reads: the broker grew by {grown / MEBIBYTE:.1f} MiB")
    assert grown < FETCH_BYTES_MAX + 16 * MEBIBYTE
    # A GET that arrives while a thread reads for the one before replaces it: that one has an empty answer.
    answered = (client.answer() for _ in range(101))
    result = next(result for answer in answered for result in unpack_list(GetResult, answer.header))
    assert result.status == status.OK
    assert result.size > FETCH_BYTES_MAX // 2  # an answer ends where the page cache lacks bytes


def test_what_a_client_leaves_behind_is_freed(front: Any) -> None:
    """Half a PUT, unread answers, a parked poll: gone with the connection."""
    topic_id = front.topic("left")
    front.still_serves()
    before = front.rss()
    for _ in range(40):
        client = front.connect(receive_buffer=64 * KIB)
        client.request(Command.GET, front.get(opened=[GetPartition(1, "left", topic_id, 0)], armed=[(1, 0)]))
        client.send(PREFIX.pack(8 * MEBIBYTE, 1, Command.PUT, 0, 2, 1) + b"\xc0" + bytes(4 * MEBIBYTE))
        client.close()
    front.until(lambda: front.rss() - before < 64 * MEBIBYTE)
    front.fill("left", 0, [b"nobody waits for it any more"])
