"""OFFSETS by time: whatever is asked and stored, others are served meanwhile; each request has its share of time."""

from __future__ import annotations

import asyncio
import itertools
import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from metamq.broker.front_door.limits.slices import SLICE_S, SlicedWork, Slices
from metamq.errors import ProtocolError, Timeout
from metamq.testing import Cluster
from metamq.wire import columns, status
from metamq.wire.commands import LATEST, Command, OffsetsEntry, OffsetsResult, PutEntry
from metamq.wire.compression import Codec
from metamq.wire.frames import PREFIX, PREFIX_BYTES
from metamq.wire.headers import unpack_list
from tests.broker.front_door.conftest import error_of
from tests.one_zookeeper import cluster
from tests.parts import SLOW_S, LocalBroker, wait_until

COUNT = 1 << 18
MANY = 16
IDS = itertools.count(1)
"""A broker id for each test: one that comes back with another folder waits for a person."""


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with cluster() as made:
        yield made


@pytest.fixture
def local(running: Cluster, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LocalBroker]:
    settings = getattr(request, "param", {})
    with LocalBroker(running.zookeeper, tmp_path / "b", id=next(IDS), **settings) as broker:
        yield broker


def filled(running: Cluster, local: LocalBroker, client: Any) -> list[OffsetsEntry]:
    """As many batches of a few KiB, each of many timestamps; what asks for the last message of each partition."""
    topic = f"times-{local.broker_id}"
    with running.admin() as admin:
        topic_id = admin.create_topic(topic, partitions=MANY, brokers=[local.broker_id]).id
    times = [*range(COUNT - 1), 10**9]
    batch = bytes(columns.encode([b""] * COUNT, base_timestamp_us=0, timestamps_us=times, codec=Codec.ZSTD))
    for index in range(MANY):
        answer = client.ask(Command.PUT, [PutEntry(topic, topic_id, index, len(batch))], [batch])
        assert answer.header[0][0] == status.OK
    return [OffsetsEntry(topic, topic_id, index, 10**9) for index in range(MANY)]


def results(answer: Any) -> list[OffsetsResult]:
    assert answer.status == status.OK
    return unpack_list(OffsetsResult, answer.header)


@pytest.mark.slow
@pytest.mark.parametrize("local", [{"search_timeout_s": 60}], indirect=True)
def test_others_are_served_while_times_are_looked_up(
    running: Cluster, local: LocalBroker, connect_to: Callable[..., Any]
) -> None:
    """A client that asks for one thing after another is answered many times before the look-up is done."""
    asking, other = connect_to(local.port), connect_to(local.port)
    entries = filled(running, local, asking)
    plain = [entries[0]._replace(timestamp_us=LATEST)]
    opaque = asking.request(Command.OFFSETS, entries)
    answered = 0
    asking.socket.setblocking(False)
    while True:
        try:
            asking.socket.recv(1, 2)  # MSG_PEEK
            break
        except BlockingIOError:
            assert results(other.ask(Command.OFFSETS, plain))[0].offset == COUNT
            assert other.ask(Command.STATS, None).status == status.OK
            answered += 1
    asking.socket.setblocking(True)
    answer = asking.answer()
    assert answer.opaque == opaque
    assert [(one.offset, one.timestamp_us) for one in results(answer)] == [(COUNT - 1, 10**9)] * MANY
    assert answered >= 10, "one look-up in all of them held the others up"


@pytest.mark.slow
@pytest.mark.parametrize("local", [{"search_timeout_s": 0.4}], indirect=True)
def test_a_request_has_so_much_time_and_who_asks_again_goes_on(
    running: Cluster, local: LocalBroker, connect_to: Callable[..., Any]
) -> None:
    client = connect_to(local.port)
    entries = filled(running, local, client)
    deadline = time.monotonic() + SLOW_S
    while entries:
        assert time.monotonic() < deadline, "it comes further"
        answer = results(client.ask(Command.OFFSETS, entries))
        found = [one for one in answer if one.status == status.OK]
        for one in answer:
            if one.status != status.OK:
                error = status.decode_error(one.status, one.error)
                assert isinstance(error, Timeout)
                assert error.retriable
                assert "Ask again" in error.hint
        entries = entries[len(found) :]


@pytest.mark.slow
def test_requests_behind_many_searches_wait_unread(
    running: Cluster, local: LocalBroker, connect_to: Callable[..., Any]
) -> None:
    """And are answered in the end; who hangs up leaves no work behind."""
    client, gone = connect_to(local.port), connect_to(local.port)
    entries = filled(running, local, client)
    sent = [client.request(Command.OFFSETS, entries[:5]) for _ in range(20)]
    for _ in range(20):
        gone.request(Command.OFFSETS, entries)
    gone.close()
    assert sorted(client.answer().opaque for _ in sent) == sent
    wait_until(lambda: local.broker._parts.door.slices.waiting == 0)


class Owner:
    def __init__(self, requests: int) -> None:
        self.left = requests
        self.finished = asyncio.Event()

    def has_less_to_do(self) -> None:
        self.left -= 1
        if not self.left:
            self.finished.set()


def test_connections_take_turns() -> None:
    """Who has asked for much waits for itself."""

    async def run() -> list[str]:
        slices, order = Slices(), []

        def steps(name: str, count: int) -> Iterator[None]:
            for _ in range(count):
                until = asyncio.get_running_loop().time() + 0.002
                while asyncio.get_running_loop().time() < until:
                    pass
                yield
            order.append(name)

        owners = {"much": Owner(2), "little": Owner(1)}
        for name, count in [("much", 50), ("much", 50), ("little", 3)]:
            work = SlicedWork()
            work.steps = steps(name, count)  # type: ignore[assignment]
            slices.add(cast(Any, owners[name]), work)
        await asyncio.gather(*(owner.finished.wait() for owner in owners.values()))
        assert slices.waiting == 0
        return order

    assert asyncio.run(run()) == ["little", "much", "much"]


def test_a_step_that_is_longer_than_a_slice_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that takes long to read uses up the time of its request, too."""

    async def run() -> float:
        now_s = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: now_s)

        def steps() -> Iterator[None]:
            nonlocal now_s
            for _ in range(10):
                now_s += 4 * SLICE_S
                yield

        owner, work = Owner(1), SlicedWork()
        work.steps = steps()  # type: ignore[assignment]
        Slices().add(cast(Any, owner), work)
        await owner.finished.wait()
        return work.used_s

    assert asyncio.run(run()) == pytest.approx(40 * SLICE_S)


def test_a_fault_of_one_request_does_not_keep_the_others_waiting() -> None:
    """Work raises nothing, by contract; who owns it may still fail when it goes on."""

    class Connection:
        def __init__(self, fails: bool) -> None:
            self.fails = fails
            self.done = 0

        def has_less_to_do(self) -> None:
            self.done += 1
            if self.fails:
                raise RuntimeError("a fault of ours")

    def work() -> SlicedWork:
        made = SlicedWork()
        made.steps = (None for _ in range(3))
        return made

    async def run() -> None:
        faults: list[str] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: faults.append(str(context["exception"])))
        slices, faulty, sound = Slices(), Connection(fails=True), Connection(fails=False)
        slices._is_slicing = True  # as if both came while others are served
        for owner in (faulty, sound):
            slices.add(cast(Any, owner), work())
        slices._is_slicing = False
        loop.call_soon(slices._slice)
        await asyncio.to_thread(wait_until, lambda: sound.done)
        assert (faulty.done, sound.done, faults) == (1, 1, ["a fault of ours"])

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("local", [{"search_timeout_s": 60}], indirect=True)
def test_others_are_served_while_large_headers_are_unpacked(local: LocalBroker, connect_to: Callable[..., Any]) -> None:
    """Each takes a large part of a second: the loop does other work after each."""
    several = 20
    probe = connect_to(local.port)
    clients = [connect_to(local.port) for _ in range(several)]
    for client in clients:
        client.request(Command.OFFSETS, [[]] * 1_000_000)
    waiting = {client.socket for client in clients}
    answered = 0
    while waiting:
        waiting -= set(select.select([*waiting], [], [], 0)[0])
        assert probe.ask(Command.STATS, None).status == status.OK
        answered += 1
    for client in clients:
        assert isinstance(error_of(client.answer()), ProtocolError)
    assert answered >= several


def test_a_large_header_that_is_no_header_ends_its_connection_and_what_came_before_is_answered(
    local: LocalBroker, connect_to: Callable[..., Any]
) -> None:
    client = connect_to(local.port)
    first = client.request(Command.STATS, None)
    broken = b"\xc1" * 100_000
    client.socket.sendall(PREFIX.pack(PREFIX_BYTES - 4 + len(broken), 1, Command.OFFSETS, 0, 77, len(broken)) + broken)
    assert client.answer().opaque == first
    assert "is not msgpack" in str(error_of(client.answer()))
    assert client.ended()
