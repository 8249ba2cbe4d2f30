"""However many partitions a client asks for: each of its requests stays within the limits of the protocol.

By value, with the real limits, the longest names and the real encoding on both ends: only the socket is missing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from metamq.broker.front_door.statistics import page_of
from metamq.client.admin import admin_brokers
from metamq.client.fetch.fetch_queue import FetchRequest, FetchRequestQueue
from metamq.client.fetch.fetch_runner import FetchLimits, FetchRunner
from metamq.client.fetch.start_offsets import OffsetFinder
from metamq.client.net.cluster import MASTER, ClusterClient, Source
from metamq.client.net.delays import Delays
from metamq.client.producer.outgoing import OutgoingBatch
from metamq.client.producer.sender import Sender
from metamq.errors import MetamqError, StorageError, TopicNotFound
from metamq.testing import Cluster as RealCluster
from metamq.testing import cluster as real_cluster
from metamq.wire import status
from metamq.wire.commands import (
    LATEST,
    Command,
    Get,
    GetPartition,
    GetResult,
    HelloReply,
    OffsetsEntry,
    OffsetsResult,
    PutEntry,
    PutResult,
    Stats,
)
from metamq.wire.compression import Codec
from metamq.wire.connection import ClientConnection, Request, Response, ServerConnection
from metamq.wire.headers import unpack, unpack_list
from metamq.wire.limits import (
    BATCH_BYTES_MAX,
    ERROR_TEXT_CHARS_MAX,
    FETCH_PARTITIONS_MAX,
    FRAME_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    STATS_PARTITIONS_MAX,
)
from metamq.zk.cluster.topics import TopicConfig
from metamq.zk.names import MAX_NAME_CHARS, partition_name
from metamq.zk.partitions import TopicPartition
from metamq.zk.session.session import Session

TOPIC = "t" * MAX_NAME_CHARS
TOPIC_ID = "0123456789abcdef"
MANY = 25_000
"""More than fit into one header, and more than may be asked for at once."""
GREETING = HelloReply(1, 0, 3, MESSAGE_BYTES_MAX, BATCH_BYTES_MAX, FRAME_BYTES_MAX, "metamq")
Answers = Callable[[Request], Any]
LONG_ERROR = status.encode_error(StorageError("p" * ERROR_TEXT_CHARS_MAX, hint="h" * ERROR_TEXT_CHARS_MAX))


def feed(end: Any, buffers: list[Any]) -> list[Any]:
    data = memoryview(b"".join(buffers))
    found: list[Any] = []
    while data:
        buffer = end.next_buffer()
        count = min(len(buffer), len(data))
        buffer[:count] = data[:count]
        data = data[count:]
        found += end.received(count)
    return found


class Paper:
    """A connection without a socket, and the cluster that it leads to. `answers` gives a request's header."""

    address = "broker:1"
    alive = True
    producer_prefix = 0

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self.delays = Delays(self.address)
        self._client, self._server = ClientConnection(self.address, "test"), ServerConnection("test", GREETING)
        (greeted,) = feed(self._server, self._client.hello())
        assert feed(self._client, greeted.buffers) == []
        self.configs: dict[str, TopicConfig] = {}
        self.closed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def connection(self, broker_id: int, replica: int = MASTER) -> Paper:
        return self

    async def reading_connection(self, broker_id: int, topics: set[str]) -> tuple[Paper, int]:
        return self, MASTER

    def is_current(self, source: Source, address: str) -> bool:
        return True

    def send(self, command: int, header: Any, bodies: list[Any] | None = None) -> asyncio.Future[Response]:
        _opaque, buffers = self._client.request(command, header, bodies)
        (request,) = feed(self._server, buffers)
        future: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        answer = self._answers(request.unpacked())
        if answer is not None:
            (response,) = feed(self._client, self._server.respond(request, answer))
            future.set_result(response)
        return future

    async def request(self, command: int, header: Any, *, timeout_s: float) -> Any:
        response = await self.send(command, header)
        if response.status != status.OK:
            raise status.decode_error(response.status, response.header)
        return response.header

    def abort(self) -> None:
        raise AssertionError("the connection was given up")


def as_cluster(paper: Paper) -> ClusterClient:
    return cast(ClusterClient, paper)


async def until(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s:g} s"
        await asyncio.sleep(0)


class Sink:
    """Where the runner's answers go."""

    def __init__(self) -> None:
        self.errors: list[MetamqError] = []
        self.results: list[GetResult] = []

    def fetched(self, request: FetchRequest, result: GetResult, data: memoryview) -> None:
        self.results.append(result)

    def sent(self, requests: list[FetchRequest]) -> None:
        pass

    def fetch_failed(self, request: FetchRequest, error: MetamqError) -> None:
        self.errors.append(error)


class Gets:
    """What the GETs that were sent open and arm, and answers them: the armed of one GET when the next comes."""

    def __init__(self) -> None:
        self.opened: list[GetPartition] = []
        self.armed: list[tuple[int, int]] = []
        self.closed: list[int] = []

    def answer(self, request: Request) -> list[GetResult]:
        get = unpack(Get, request.header)
        self.opened += [unpack(GetPartition, entry) for entry in get.opened]
        self.armed += get.armed
        self.closed += get.closed
        return []


def fetch_requests(count: int) -> list[FetchRequest]:
    return [
        FetchRequest(TopicPartition(TOPIC, partition_name(0, n)), TOPIC_ID, Source(0), n, 10**15 + n)
        for n in range(count)
    ]


def test_a_consumer_of_very_many_partitions_opens_and_closes_them_in_pieces() -> None:
    async def run() -> None:
        gets, sink = Gets(), Sink()
        paper = Paper(lambda request: gets.answer(request) if len(gets.opened) < MANY else None)
        queue = FetchRequestQueue(lambda _: None)
        requests = fetch_requests(MANY)
        for request in requests:
            queue.put(request, 0.0)
        limits = FetchLimits(500, 1, 1 << 20, 1 << 18)
        runner = FetchRunner(Source(0), queue, as_cluster(paper), sink, lambda: limits)
        running = asyncio.ensure_future(runner.run())
        await until(lambda: sink.errors or running.done() or len(gets.opened) >= MANY)
        assert sink.errors == []
        assert [entry.partition for entry in gets.opened] == list(range(MANY))
        handles = [entry.handle for entry in gets.opened]
        assert len(set(handles)) == MANY <= FETCH_PARTITIONS_MAX
        assert [(handle, offset) for handle, offset in gets.armed] == [
            (handle, 10**15 + n) for n, handle in enumerate(handles)
        ]
        paper._answers = gets.answer
        for request in requests:
            runner.cancel(request)
        await until(lambda: running.done() or len(gets.closed) >= MANY)
        assert sorted(gets.closed) == handles
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())


def offset_answers(request: Request) -> list[OffsetsResult]:
    entries = unpack_list(OffsetsEntry, request.header)
    return [OffsetsResult(status.OK, entry.partition, -1, 0, 2**62, 1, None, []) for entry in entries]


def partitions(count: int) -> list[TopicPartition]:
    return [TopicPartition(TOPIC, partition_name(0, n)) for n in range(count)]


@pytest.mark.slow
def test_offsets_of_very_many_partitions_are_asked_in_pieces() -> None:
    async def run() -> None:
        asked = partitions(MANY)
        finder = OffsetFinder(as_cluster(Paper(offset_answers)), "latest")
        assert await finder.ends(dict.fromkeys(asked, TOPIC_ID)) == {tp: n for n, tp in enumerate(asked)}
        found = await admin_brokers.ask_offsets(
            as_cluster(Paper(offset_answers)), dict.fromkeys(asked, (TOPIC_ID, LATEST))
        )
        assert [one.offset for one in found.values() if isinstance(one, OffsetsResult)] == list(range(MANY))

    asyncio.run(run())


def test_partitions_that_begin_together_ask_as_one_and_each_gets_its_own_answer() -> None:
    questions: list[int] = []
    number, fields = LONG_ERROR

    def answer(request: Request) -> list[OffsetsResult]:
        questions.append(len(request.header))
        results = offset_answers(request)
        return [results[0]._replace(status=number, error=fields), *results[1:]]

    async def run() -> None:
        finder = OffsetFinder(as_cluster(Paper(answer)), "latest")
        asked = partitions(500)
        finds = [asyncio.ensure_future(finder.find(tp, TOPIC_ID, "latest")) for tp in asked]
        await asyncio.sleep(0)
        finds[2].cancel()
        found = await asyncio.gather(*finds, return_exceptions=True)
        assert isinstance(found[0], StorageError)
        assert isinstance(found[2], asyncio.CancelledError)
        assert [found[1], *found[3:]] == [1, *range(3, 500)]
        assert questions == [500]

    asyncio.run(run())


def test_times_are_looked_up_a_few_at_once() -> None:
    """The broker searches its files for each, and does nothing else meanwhile."""
    questions: list[int] = []

    def answer(request: Request) -> list[OffsetsResult]:
        questions.append(len(request.header))
        return offset_answers(request)

    async def run() -> None:
        finder = OffsetFinder(as_cluster(Paper(answer)), "latest")
        found = await finder.ask(dict.fromkeys(partitions(100), TOPIC_ID), 1_700_000_000_000_000)
        assert [result.offset for result in found.values()] == list(range(100))
        assert questions == [32, 32, 32, 4]

    asyncio.run(run())


@pytest.mark.slow
def test_that_none_of_them_is_there_can_be_said() -> None:
    """An error is longer than its partition's name."""

    async def run() -> None:
        number, fields = LONG_ERROR
        paper = Paper(
            lambda request: [OffsetsResult(number, -1, -1, -1, -1, 0, fields, []) for _entry in request.header]
        )
        found = await admin_brokers.ask_offsets(as_cluster(paper), dict.fromkeys(partitions(MANY), (TOPIC_ID, LATEST)))
        assert len(found) == MANY
        assert all(isinstance(one, StorageError) for one in found.values())

    asyncio.run(run())


def test_a_producer_to_very_many_partitions_puts_in_pieces() -> None:
    """One small message for each, as a burst after an outage leaves them."""

    async def run() -> None:
        stored: list[int] = []
        number, fields = LONG_ERROR

        def answer(request: Request) -> list[PutResult]:
            entries = unpack_list(PutEntry, request.header)
            stored.extend(entry.partition for entry in entries)
            return [PutResult(number, -1, -1, {**fields, "outcome": "not_done", "retriable": False}) for _ in entries]

        paper = Paper(answer)
        paper.configs[TOPIC] = TopicConfig(TOPIC, {0: 1})
        sender = Sender(as_cluster(paper), Codec.NONE, delivery_timeout_s=60, request_timeout_s=30)
        failed: list[OutgoingBatch] = []
        sender.on_done = failed.append
        count = 10_000
        batches = []
        for partition in range(count):
            batch = OutgoingBatch(TOPIC)
            batch.broker_id, batch.partition, batch.values = 0, partition, [b"x"]
            batch.created_ns = time.monotonic_ns()
            batches.append(batch)
        sender.add(batches)
        for _ in range(1000):
            sender.pump()
            await asyncio.sleep(0)
        assert len(failed) == count
        assert sorted(stored) == list(range(count))
        await sender.close()

    asyncio.run(run())


class Figures:
    """A partition, as STATS sees one."""

    def __init__(self, topic: str, index: int) -> None:
        self.topic = topic
        self.index = index


def walk(topics: dict[str, dict[int, Any]], size: int) -> list[list[tuple[str, int]]]:
    pages = []
    start: Stats | None = Stats("", 0)
    while start is not None:
        page, start = page_of(topics, start, size)
        pages.append([(one.topic, one.index) for one in page])
    return pages


@pytest.mark.parametrize(
    ("sizes", "pages"), [([], 1), ([1], 1), ([3, 3], 2), ([7, 0, 1, 1], 3), ([6], 2), ([1] * 7, 3)]
)
def test_pages_have_every_partition_once_in_order(sizes: list[int], pages: int) -> None:
    topics = {f"t{n}": {i: Figures(f"t{n}", i) for i in reversed(range(size))} for n, size in enumerate(sizes)}
    found = walk(dict(reversed(topics.items())), 3)
    assert len(found) == pages
    assert [one for page in found for one in page] == [(name, i) for name in topics for i in range(len(topics[name]))]


def test_pages_go_on_where_topics_come_and_go() -> None:
    topics = {name: {0: Figures(name, 0)} for name in ("a", "c", "e")}
    page, following = page_of(cast(Any, topics), Stats("", 0), 2)
    assert ([one.topic for one in page], following) == (["a", "c"], Stats("e", 0))
    assert following is not None
    del topics["e"]
    topics["b"], topics["f"] = {0: Figures("b", 0)}, {0: Figures("f", 0)}
    page, following = page_of(cast(Any, topics), following, 2)
    assert ([one.topic for one in page], following) == (["f"], None)


def test_a_page_of_the_longest_names_can_be_sent() -> None:
    names = [f"{n:04}".ljust(MAX_NAME_CHARS, "x") for n in range(STATS_PARTITIONS_MAX)]
    entry = dict.fromkeys(("start_offset", "stable_offset", "end_offset", "size_bytes", "last_append_us"), 2**62)
    page = {
        "counters": {name: dict.fromkeys(names, 2**62) for name in ("messages_in", "bytes_in", "batches_in")},
        "partitions": [{"topic": name, "partition": 2**31, **entry} for name in names],
        "next": Stats(names[-1], 2**31),
    }

    async def run() -> None:
        assert (await Paper(lambda _: page).request(Command.STATS, None, timeout_s=1)).keys() == page.keys()

    asyncio.run(run())


# -- with a real broker ----------------------------------------------------------------------


async def ask_for_nothing(cluster: ClusterClient, count: int) -> tuple[int, int]:
    """(offsets, fetches) that a broker says it has no partition for."""
    absent = dict.fromkeys(partitions(count), (TOPIC_ID, LATEST))
    offsets = await admin_brokers.ask_offsets(cluster, absent)
    queue, sink = FetchRequestQueue(lambda _: None), Sink()
    for request in fetch_requests(count):
        queue.put(request, 0.0)
    runner = FetchRunner(Source(0), queue, cluster, sink, lambda: FetchLimits(500, 1, 1 << 20, 1 << 18))
    running = asyncio.ensure_future(runner.run())
    await until(lambda: len(sink.errors) >= count)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return (
        sum(isinstance(one, TopicNotFound) for one in offsets.values()),
        sum(isinstance(error, TopicNotFound) for error in sink.errors),
    )


@pytest.fixture(scope="module")
def running() -> Iterator[RealCluster]:
    with real_cluster() as one:
        yield one


@pytest.mark.slow
def test_a_real_broker_is_asked_for_more_than_fits_into_one_request(running: RealCluster) -> None:
    async def ask(zookeeper: str) -> tuple[int, int]:
        async with await Session.open(zookeeper) as session:
            cluster = ClusterClient(session)
            try:
                return await ask_for_nothing(cluster, 21_000)
            finally:
                await cluster.close()

    assert asyncio.run(ask(running.zookeeper)) == (21_000, 21_000)


@pytest.mark.slow
def test_statistics_of_more_partitions_than_a_page_has(running: RealCluster) -> None:
    for name, count in (("a", 500), ("b", 520), ("c", 1)):
        running.create_topic(name, partitions=count)
    with running.producer() as producer:
        for name in ("a", "c"):
            producer.send(name, b"x", partition="0-0").result(60)
    with running.admin() as admin:
        found = admin.statistics(0)
    assert len(found.partitions) == len({(one.topic, one.partition) for one in found.partitions}) == 1021
    assert found.messages_in == {"a": 1, "c": 1}
    assert [one.end_offset for one in found.partitions if one.partition == "0-0"] == [1, 0, 1]
