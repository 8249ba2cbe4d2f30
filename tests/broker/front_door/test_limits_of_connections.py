"""What connections may take: memory by not reading, places by doing nothing, and all of them by being many."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from metamq.broker.front_door import protocol
from metamq.broker.front_door.limits import admission
from metamq.broker.front_door.limits.admission import Admission, ConnectionFate
from metamq.broker.front_door.limits.answer_memory import AnswerMemory
from metamq.broker.front_door.protocol import BrokerProtocol
from metamq.broker.process import server
from metamq.client.net.blocking_connection import BlockingConnection
from metamq.client.net.transport import BrokerConnection, keep_alive
from metamq.errors import ConnectError, NotAuthorized, ProtocolError
from metamq.security.rights import NO_RULES, Access
from metamq.testing import Cluster
from metamq.wire import status
from metamq.wire.commands import Command, GetPartition, OffsetsEntry, PutEntry
from tests.broker.front_door.conftest import batch_of, get, sweep
from tests.one_zookeeper import cluster
from tests.parts import LocalBroker, wait_until

MEBIBYTE = 1024 * 1024
READERS = 12
IDS = itertools.count(1)
"""A broker id for each test: one that comes back with another folder waits for a person."""
Start = Callable[..., LocalBroker]
Connect = Callable[..., Any]


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with cluster() as made:
        yield made


@pytest.fixture
def start(running: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a broker that looks at its clients when the test says so."""
    monkeypatch.setattr(server, "STALL_S", 3600)
    with contextlib.ExitStack() as stack:
        yield lambda **settings: stack.enter_context(
            LocalBroker(running.zookeeper, tmp_path / "b", id=next(IDS), **settings)
        )


def filled(running: Cluster, local: LocalBroker, connect_to: Connect) -> Any:
    """A topic with more than an answer may have; what opens and reads it."""
    topic = f"large-{local.broker_id}"
    with running.admin() as admin:
        topic_id = admin.create_topic(topic, partitions=1, brokers=[local.broker_id]).id
    client = connect_to(local.port)
    batch = bytes(batch_of([bytes(MEBIBYTE - 100)]))
    for _ in range(3):
        entries = [PutEntry(topic, topic_id, 0, len(batch))] * 12
        assert client.ask(Command.PUT, entries, [batch] * 12).header[0][0] == status.OK
    client.close()
    return lambda bytes_max: get(
        wait_ms=0, bytes_max=bytes_max, partition_bytes_max=bytes_max,
        opened=[GetPartition(1, topic, topic_id, 0)], armed=[(1, 0)],
    )  # fmt: skip


def test_answers_that_nobody_reads_share_one_budget(running: Cluster, start: Start, connect_to: Connect) -> None:
    """A reader that reads is served all the same, and those that do not are let go."""
    budget = 64 * MEBIBYTE
    local = start(answer_memory_bytes=budget)
    poll = filled(running, local, connect_to)
    answers = local.broker._answers
    idle = [connect_to(local.port, receive_buffer=4096) for _ in range(READERS)]
    for client in idle:
        client.request(Command.GET, poll(32 * MEBIBYTE))
    counters = local.broker._parts.door.counters
    wait_until(lambda: counters.snapshot()["fetches"] == READERS)
    assert budget - 8 * MEBIBYTE < answers.used_bytes < budget + READERS * 2 * MEBIBYTE
    reader = connect_to(local.port)
    answer = reader.ask(Command.GET, poll(32 * MEBIBYTE))
    assert answer.status == status.OK
    assert 0 < len(answer.body) <= 8 * MEBIBYTE, "a batch at a time, or little more"
    answers.limit_bytes = answers.used_bytes  # some less than the budget may be used: a part is in the kernel
    for _ in range(3):
        sweep(local)
    wait_until(lambda: answers.used_bytes < budget // 2)  # from then on the others may take their time
    assert answers.stalled >= 2
    assert len(reader.ask(Command.GET, poll(1)._replace(opened=[])).body) > MEBIBYTE // 2


def test_unread_answers_have_a_ceiling(running: Cluster, start: Start, connect_to: Connect) -> None:
    """One large batch for each of many idle readers is too much, before any sweep. A reader that reads gets its own."""
    local = start(answer_memory_bytes=MEBIBYTE)
    with running.admin() as admin:
        topic_id = admin.create_topic("ceiling", partitions=1, brokers=[local.broker_id]).id
    batch = bytes(batch_of([bytes(MEBIBYTE - 100)] * 15))
    writer = connect_to(local.port)
    assert writer.ask(Command.PUT, [PutEntry("ceiling", topic_id, 0, len(batch))], [batch]).header[0][0] == status.OK
    poll = get(
        wait_ms=0, bytes_max=1, partition_bytes_max=1, opened=[GetPartition(1, "ceiling", topic_id, 0)], armed=[(1, 0)]
    )
    answers = local.broker._answers
    counters = local.broker._parts.door.counters
    idle = [connect_to(local.port, receive_buffer=4096) for _ in range(READERS)]
    for number, client in enumerate(idle, 1):
        client.request(Command.GET, poll)
        wait_until(lambda number=number: counters.snapshot()["fetches"] == number)
        # Read in another thread: the answer may be counted a moment before connections are closed for it.
        wait_until(lambda: answers.held_bytes <= answers.ceiling_bytes)
    assert answers.stalled >= READERS // 3
    assert len(connect_to(local.port).ask(Command.GET, poll).body) == len(batch)
    open_connections = local.broker._connections
    assert answers.held_bytes <= answers.ceiling_bytes
    wait_until(lambda: len(open_connections) <= READERS + 2 - answers.stalled)


class Reader:
    """What the memory of answers knows of a connection."""

    def __init__(self, answers: AnswerMemory) -> None:
        self.answers = answers
        self.unread_bytes = 0
        self.is_closed = False
        self._counted_bytes = 0

    def get(self, size: int) -> None:
        self.unread_bytes += size
        self._counted_bytes += size
        self.count_unread()
        self.answers.keep_below_ceiling(cast(Any, self))

    def count_unread(self) -> int:
        has_read = self.unread_bytes < self._counted_bytes
        self._counted_bytes = self.unread_bytes
        self.answers.holds(cast(Any, self), self.unread_bytes, has_read=has_read)
        return self.unread_bytes

    def give_up(self) -> None:
        self.is_closed = True
        self.unread_bytes = 0
        self.count_unread()


def test_many_small_buffers_have_a_ceiling_and_readers_that_read_are_kept() -> None:
    answers = AnswerMemory(256 * MEBIBYTE)
    readers = [Reader(answers) for _ in range(1000)]
    for number, reader in enumerate(readers):
        reader.get(4 * MEBIBYTE)
        if number % 8 == 0:
            reader.unread_bytes = 0
        assert answers.held_bytes <= answers.ceiling_bytes == 512 * MEBIBYTE
        assert not reader.is_closed
    assert sum(reader.unread_bytes for reader in readers) <= answers.held_bytes
    closed = [number for number, reader in enumerate(readers) if reader.is_closed]
    assert closed
    assert not any(number % 8 == 0 for number in closed)
    first_open = next(n for n, reader in enumerate(readers) if n % 8 and not reader.is_closed)
    assert max(closed) < first_open, "those that have read nothing for longest"


def test_answers_that_are_read_take_nothing_of_the_budget(running: Cluster, start: Start, connect_to: Connect) -> None:
    """Else a few hundred readers that read would get one batch at a time."""
    local = start()
    poll = filled(running, local, connect_to)
    answers = local.broker._answers
    client = connect_to(local.port, receive_buffer=4096)
    client.request(Command.GET, poll(32 * MEBIBYTE))
    wait_until(lambda: answers.used_bytes > 8 * MEBIBYTE)
    assert client.answer().status == status.OK
    wait_until(lambda: answers.used_bytes == 0)


def test_answers_may_lie_unread_for_a_while(running: Cluster, start: Start, connect_to: Connect) -> None:
    """A task works on the answer before. Only after `unread_timeout_s` it is let go."""
    local = start(unread_timeout_s=1)
    poll = filled(running, local, connect_to)
    client = connect_to(local.port, receive_buffer=4096)
    client.request(Command.GET, poll(32 * MEBIBYTE))
    wait_until(lambda: local.broker._answers.used_bytes > 8 * MEBIBYTE)
    (connection,) = local.broker._connections
    with_timeouts(connection, unread_s=3600)
    for _ in range(4):
        sweep(local)
    assert local.broker._answers.stalled == 0
    with_timeouts(connection, unread_s=0)
    sweep(local)
    wait_until(lambda: local.broker._answers.used_bytes == 0)
    assert local.broker._answers.stalled == 1


def test_who_never_asks_for_anything_is_closed_in_the_end(start: Start, connect_to: Connect) -> None:
    local = start(idle_timeout_s=600)
    silent, patient = connect_to(local.port), connect_to(local.port)
    assert patient.ask(Command.STATS, None).status == status.OK
    sweep(local)
    assert len(local.broker._connections) == 2
    for connection in list(local.broker._connections):
        with_timeouts(connection, idle_s=1e-9)
    sweep(local)
    assert silent.ended() in (True, False)
    assert patient.ask(Command.STATS, None).status == status.OK, "it has asked before, and may be silent for ever"


def with_timeouts(connection: BrokerProtocol, **limits: float) -> None:
    """Gives one connection other limits on its silence."""
    door = connection._door
    connection._door = replace(door, timeouts=door.timeouts._replace(**limits))


def refusal_of(client: Any) -> str:
    """What a raw client is told, before the end of the stream."""
    while (answer := client.answer()).command != Command.HELLO or answer.status == status.OK:
        pass
    error = status.decode_error(answer.status, answer.header)
    assert isinstance(error, ProtocolError)
    assert client.ended()
    return str(error)


def test_a_full_broker_says_so_and_keeps_places_for_those_who_run_it(
    start: Start, connect_to: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "SLOTS_KEPT", 2)
    local = start(connections_max=3)
    served = [connect_to(local.port) for _ in range(3)]
    operator, client = connect_to(local.port), connect_to(local.port)
    assert operator.ask(Command.STATS, None).status == status.OK
    client.request(Command.OFFSETS, [OffsetsEntry("t", "x", 0, -1)])
    said = refusal_of(client)
    assert "busy: the broker has 3 connections already, its limit" in said
    assert "connections_max" in said
    client.close()
    wait_until(lambda: len(local.broker._connections) == 4)
    connect_to(local.port)  # the last place that is kept
    beyond = connect_to(local.port, greet=False)
    assert "its limit" in refusal_of(beyond)
    beyond.close()
    assert operator.ask(Command.STATS, None).status == status.OK
    assert served[0].ask(Command.OFFSETS, []).status == status.OK
    served[0].close()
    operator.close()
    wait_until(lambda: len(local.broker._connections) == 3)


def test_our_client_is_told_that_a_broker_is_full(start: Start, connect_to: Connect) -> None:
    """As of any broker that cannot be reached at present: it tries again."""
    local = start(connections_per_address_max=1)
    connect_to(local.port)
    for open_it in (
        lambda: asyncio.run(BrokerConnection.open("127.0.0.1", local.port)),
        lambda: BlockingConnection.open("127.0.0.1", local.port),
    ):
        with pytest.raises(ConnectError, match=r"127\.0\.0\.1 has 1 connection already, the limit for one") as caught:
            open_it()  # type: ignore[no-untyped-call]
        assert caught.value.retriable
        assert "connections_per_address_max" in caught.value.hint


def test_a_place_that_is_kept_is_lost_by_silence(
    start: Start, connect_to: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HELLO_TIMEOUT_S", 0.5)
    local = start(connections_max=1)
    first, silent, operator = connect_to(local.port), connect_to(local.port), connect_to(local.port)
    assert operator.ask(Command.STATS, None).status == status.OK
    assert silent.ended() in (True, False)
    assert operator.ask(Command.STATS, None).status == status.OK
    assert first.ask(Command.STATS, None).status == status.OK


def test_a_place_that_is_kept_is_lost_by_a_refusal(
    start: Start, connect_to: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = start(connections_max=1)
    connect_to(local.port)
    monkeypatch.setattr(local.broker._users, "access", lambda principal, refused: Access("etl", NO_RULES))
    stranger = connect_to(local.port)
    answer = stranger.ask(Command.STATS, None)
    assert isinstance(status.decode_error(answer.status, answer.header), NotAuthorized)
    assert stranger.ended()


def test_what_becomes_of_each() -> None:
    counted = Admission(2, per_address_max=30)
    found = [counted.enter(f"host {n}") for n in range(2 + admission.SLOTS_KEPT + admission.LINGERING_MAX + 1)]
    expected = [ConnectionFate.SERVED] * 2 + [ConnectionFate.KEPT] * admission.SLOTS_KEPT
    assert found == [*expected, *[ConnectionFate.REFUSED] * admission.LINGERING_MAX, ConnectionFate.CLOSED]
    for n in range(len(found)):
        counted.leave(f"host {n}")
    assert [counted.enter("one") for _ in range(2)] == [ConnectionFate.SERVED] * 2
    assert counted._by_address == {"one": 2}


def test_both_ends_ask_the_kernel_whether_the_other_is_there(start: Start, connect_to: Connect) -> None:
    with socket.socket() as sock:
        assert not sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        keep_alive(sock)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    local = start()
    connect_to(local.port)
    (connection,) = local.broker._connections
    assert connection._transport is not None
    assert connection._transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
