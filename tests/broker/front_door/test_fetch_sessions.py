"""Fetch sessions over a raw socket: what is armed is answered once, in turn, and only changes are sent."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from metamq.errors import Fenced, OffsetDiverged, OffsetOutOfRange, ProtocolError, TopicNotFound
from metamq.wire import status
from metamq.wire.commands import LATEST, Command, GetPartition, GetResult, OffsetsEntry, OffsetsResult
from metamq.wire.headers import unpack, unpack_list
from metamq.wire.limits import FETCH_BYTES_MAX, REQUEST_ENTRIES_MAX
from metamq.zk.names import MAX_NAME_CHARS

KIB = 1024
names = (f"fetch-{n}" for n in itertools.count())


EPOCH = 1
"""That of a broker that was started once."""


class Session:
    """One connection's fetch session, with partitions of one topic open under their numbers + 1."""

    def __init__(self, front: Any, partitions: int = 1, topic: str = "", *, opened: bool = True) -> None:
        self.front = front
        self.topic = topic or next(names)
        self.topic_id = front.topic(self.topic, partitions)
        self.client = front.connect()
        self.places = [GetPartition(n + 1, self.topic, self.topic_id, n) for n in range(partitions)]
        if opened:
            assert self.poll(wait_ms=0, opened=self.places) == []

    def put(self, partition: int, *values: bytes) -> None:
        self.front.fill(self.topic, partition, list(values))

    def ask(self, **changes: Any) -> int:
        """Sends a GET, of 0 ms unless told otherwise; returns its number."""
        return int(self.client.request(Command.GET, self.front.get(**{"wait_ms": 0, **changes})))

    def answer(self) -> tuple[int, list[tuple[int, list[bytes]]]]:
        """The next answer's number, and (handle, values) of its results."""
        frame = self.client.answer()
        assert frame.status == status.OK, self.front.error_of(frame)
        found = []
        position = 0
        for result in unpack_list(GetResult, frame.header):
            assert result.status == status.OK, status.decode_error(result.status, result.error)
            found.append((result.handle, self.front.values_in(frame.body[position : position + result.size])))
            position += result.size
        assert position == len(frame.body)
        return frame.opaque, found

    def poll(self, **changes: Any) -> list[tuple[int, list[bytes]]]:
        asked = self.ask(**changes)
        opaque, found = self.answer()
        assert opaque == asked
        return found

    def park(self, **changes: Any) -> int:
        """As ask(), but returns once the broker has the GET, and another one after it, whose number it is."""
        first = self.ask(**changes)
        second = self.ask(**{**changes, "opened": [], "armed": [], "closed": []})
        assert self.answer() == (first, [])
        return second

    def refused(self, **changes: Any) -> str:
        error = self.front.error_of(self.client.ask(Command.GET, self.front.get(**{"wait_ms": 0, **changes})))
        assert isinstance(error, ProtocolError)
        return str(error)

    def errors(self, **changes: Any) -> list[tuple[int, Exception]]:
        """(handle, error) of a poll whose partitions all fail."""
        frame = self.client.ask(Command.GET, self.front.get(**changes))
        results = unpack_list(GetResult, frame.header)
        return [(result.handle, status.decode_error(result.status, result.error)) for result in results]


def test_an_armed_partition_is_answered_once(front: Any) -> None:
    session = Session(front)
    session.put(0, b"a")
    assert session.poll(armed=[(1, 0)]) == [(1, [b"a"])]
    session.put(0, b"b")
    assert session.poll() == []
    assert session.poll(armed=[(1, 1)]) == [(1, [b"b"])]


def test_a_parked_poll_is_answered_by_what_comes(front: Any) -> None:
    session = Session(front, 2)
    session.park(wait_ms=50_000, armed=[(1, 0), (2, 0)])
    session.put(1, b"b")
    assert session.answer()[1] == [(2, [b"b"])]
    session.ask(wait_ms=50_000)
    session.put(0, b"a")
    assert session.answer()[1] == [(1, [b"a"])]


def test_a_closed_partition_is_not_answered(front: Any) -> None:
    session = Session(front, 2)
    first = session.ask(wait_ms=50_000, armed=[(1, 0), (2, 0)])
    asked = session.ask(wait_ms=50_000, closed=[1])
    assert session.answer() == (first, [])
    session.put(0, b"unwanted")
    session.put(1, b"wanted")
    assert session.answer() == (asked, [(2, [b"wanted"])])
    opened = [GetPartition(3, session.topic, session.topic_id, 0)]
    assert session.poll(opened=opened, armed=[(3, 0)]) == [(3, [b"unwanted"])]
    assert session.poll(closed=[1, 77]) == []  # to close what is not open is no error: an answer may be on its way


def test_a_parked_poll_is_amended(front: Any) -> None:
    session = Session(front, 2)
    first = session.ask(wait_ms=50_000, armed=[(1, 0)])
    second = session.ask(wait_ms=50_000, armed=[(2, 0)])
    assert session.answer() == (first, [])
    session.put(0, b"armed before the amendment")
    assert session.answer() == (second, [(1, [b"armed before the amendment"])])


def test_arming_again_replaces_the_offset(front: Any) -> None:
    session = Session(front)
    session.put(0, b"a")
    session.put(0, b"b")
    session.ask(wait_ms=50_000, armed=[(1, 2)])
    asked = session.ask(wait_ms=50_000, armed=[(1, 1)])
    assert session.answer()[1] == []
    assert session.answer() == (asked, [(1, [b"b"])])
    session.put(0, b"c")
    assert session.poll(wait_ms=50) == []


def test_polls_may_be_sent_ahead(front: Any) -> None:
    session = Session(front)
    session.put(0, b"a")
    asked = [session.ask(armed=[(1, 0)]) for _ in range(50)]
    assert [session.answer() for _ in asked] == [(opaque, [(1, [b"a"])]) for opaque in asked]


def test_a_busy_partition_cannot_starve_the_others(front: Any) -> None:
    """Partition 0 always has more than an answer takes; each of the others is answered within one round."""
    session = Session(front, 10)
    for _ in range(30):
        session.put(0, bytes(8 * KIB))
    for partition in range(1, 10):
        session.put(partition, b"p%d" % partition)
    armed = [(handle, 0) for handle in range(1, 11)]
    answered: list[int] = []
    offset = 0
    for _ in range(12):
        found = session.poll(armed=armed, bytes_max=9 * KIB, partition_bytes_max=9 * KIB)
        answered += [handle for handle, _values in found]
        offset += sum(len(values) for handle, values in found if handle == 1)
        armed = [(1, offset)] if any(handle == 1 for handle, _values in found) else []
        if len(set(answered)) == 10:
            break
    assert set(answered) == set(range(1, 11))
    assert answered.count(1) <= 3


def test_what_did_not_fit_keeps_its_turn(front: Any) -> None:
    session = Session(front, 6)
    for partition in range(6):
        session.put(partition, bytes(4 * KIB))
        session.put(partition, bytes(4 * KIB))
    order = []
    armed = [(handle, 0) for handle in (3, 1, 6, 2, 5, 4)]
    while len(order) < 12:
        found = session.poll(armed=armed, bytes_max=8 * KIB, partition_bytes_max=5 * KIB)
        assert 1 <= len(found) <= 2
        order += [handle for handle, _values in found]
        armed = [(handle, order.count(handle)) for handle, _values in found]
    assert order == [3, 1, 6, 2, 5, 4] * 2


def test_bytes_min(front: Any) -> None:
    session = Session(front, 2)
    session.park(wait_ms=50_000, bytes_min=3000, armed=[(1, 0), (2, 0)])
    session.put(0, bytes(1000))
    session.put(1, bytes(1000))
    session.client.socket.settimeout(0.2)
    with pytest.raises(TimeoutError):
        session.answer()
    session.client.socket.settimeout(60)
    session.put(1, bytes(1000))
    assert [(handle, len(values)) for handle, values in session.answer()[1]] == [(1, 1), (2, 2)]


def test_bytes_min_counts_what_came_between_two_polls(front: Any) -> None:
    """Else a trickle would be answered message by message, whatever the minimum."""
    session = Session(front)
    session.put(0, b"a")
    assert session.poll(armed=[(1, 0)]) == [(1, [b"a"])]
    session.put(0, b"b")
    began = time.monotonic()
    assert session.poll(armed=[(1, 1)], bytes_min=5000, wait_ms=300) == [(1, [b"b"])]
    assert time.monotonic() - began > 0.28
    session.put(0, bytes(3000))
    session.ask(armed=[(1, 2)], bytes_min=5000, wait_ms=50_000)
    session.put(0, bytes(3000))
    assert [len(value) for value in session.answer()[1][0][1]] == [3000, 3000]


def test_data_that_lay_there_before_is_not_waited_for(front: Any) -> None:
    session = Session(front)
    session.put(0, b"a")
    # Longer than this client waits.
    assert session.poll(armed=[(1, 0)], bytes_min=2**63, wait_ms=600_000) == [(1, [b"a"])]


@pytest.mark.parametrize("wait_ms", [0, -5, 200])
def test_the_wait_ends(front: Any, wait_ms: int) -> None:
    session = Session(front)
    began = time.monotonic()
    assert session.poll(wait_ms=wait_ms, armed=[(1, 0)]) == []
    waited_s = time.monotonic() - began
    assert max(wait_ms, 0) / 1000 - 0.02 < waited_s < max(wait_ms, 0) / 1000 + 40
    session.put(0, b"a")
    assert session.poll(wait_ms=50_000) == [(1, [b"a"])]  # still armed


def test_misuse_is_refused_and_changes_nothing(front: Any) -> None:
    session = Session(front, 3, opened=False)
    one, two, three = session.places
    assert session.poll(opened=[one, two]) == []
    session.put(0, b"a")
    session.put(1, b"b")
    session.put(2, b"c")
    parked = session.ask(wait_ms=50_000)
    for changes, problem in (
        ({"opened": [one]}, "fetch handle 1 is in use"),
        ({"opened": [three, three]}, "fetch handle 3 is in use"),
        ({"opened": [three, one._replace(partition=2)], "armed": [(3, 0)]}, "fetch handle 1 is in use"),
        ({"armed": [(1, 0), (99, 0)]}, "fetch handle 99 is not open"),
        ({"armed": [(1, 0)], "closed": [1]}, "fetch handle 1 is not open"),
        ({"armed": [(1, 0), (2, 0), (1, 0)]}, "fetch handle 1 is armed twice in one GET"),
        ({"armed": [(1, 0)] * (REQUEST_ENTRIES_MAX + 1)}, "Get.armed has 4,001 entries, the limit is 4,000"),
        ({"closed": [1] * (REQUEST_ENTRIES_MAX + 1)}, "Get.closed has 4,001 entries, the limit is 4,000"),
        ({"opened": [three._replace(topic="x" * 1000)]}, "fetch handle 3: a name has at most"),
        ({"opened": [[1, 2]], "armed": [(1, 0)]}, "GetPartition has 6 fields"),
        ({"opened": [three, three._replace(handle="x")]}, "GetPartition.handle must be"),  # type: ignore[arg-type]
    ):
        assert problem in session.refused(**changes)
    asked = session.ask(armed=[(2, 0)])
    assert session.answer() == (parked, [])
    assert session.answer() == (asked, [(2, [b"b"])])
    assert session.poll(opened=[three], armed=[(3, 0)]) == [(3, [b"c"])]
    assert session.poll(closed=[1], opened=[one], armed=[(1, 0)]) == [(1, [b"a"])]


def test_absurd_limits(front: Any) -> None:
    session = Session(front)
    for _ in range(40):
        session.put(0, bytes(1024 * KIB))
    for limit in (0, -1, -(2**63)):
        assert len(session.poll(armed=[(1, 0)], bytes_max=limit, partition_bytes_max=2**63)[0][1]) == 1
        assert len(session.poll(armed=[(1, 0)], bytes_max=2**63, partition_bytes_max=limit)[0][1]) == 1
    found = session.poll(armed=[(1, 0)], bytes_max=2**64 - 1, partition_bytes_max=2**64 - 1, bytes_min=2**64 - 1)
    assert 1 <= len(found[0][1]) <= FETCH_BYTES_MAX // (1024 * KIB)
    assert max(session.client.frame_sizes) <= FETCH_BYTES_MAX + 1024


def test_offsets_that_are_not_there(front: Any) -> None:
    session = Session(front)
    session.put(0, b"a")
    for offset in (2, 10**12, -1, -(2**63), 2**63, 2**64 - 1):
        ((handle, error),) = session.errors(armed=[(1, offset)], wait_ms=50_000)
        assert handle == 1
        assert isinstance(error, OffsetOutOfRange)
        assert (error.offset, error.start, error.end) == (offset, 0, 1)
    assert session.poll(armed=[(1, 0)]) == [(1, [b"a"])]


def test_a_reader_of_another_epoch_is_told_up_to_where_they_agree(front: Any) -> None:
    """Once a place is found to agree it is not looked at again; who comes from a later master than this is sent on."""
    session = Session(front, opened=False)
    session.put(0, b"a", b"b")
    place = session.places[0]
    for handle, epoch in enumerate((0, EPOCH + 1), start=2):
        opened = [place._replace(handle=handle, epoch=epoch)]
        ((_, error),) = session.errors(opened=opened, armed=[(handle, 1)], wait_ms=50_000)
        if epoch:
            assert isinstance(error, Fenced)
        else:
            assert isinstance(error, OffsetDiverged)
            assert (error.offset, error.agreed, error.epoch) == (1, 0, -1)
    agreeing = [place._replace(handle=4, epoch=EPOCH)]
    assert session.poll(opened=agreeing, armed=[(4, 1)]) == [(4, [b"a", b"b"])]
    assert session.poll(armed=[(4, 0)]) == [(4, [b"a", b"b"])]


def test_who_asks_for_offsets_is_told_too_whether_the_log_is_that_of_its_place(front: Any) -> None:
    session = Session(front, opened=False)
    session.put(0, b"a", b"b")
    place = session.places[0]

    def ask(offset: int, epoch: int) -> OffsetsResult:
        entry = OffsetsEntry(place.topic, place.topic_id, place.partition, LATEST, offset, epoch)
        return unpack(OffsetsResult, session.client.ask(Command.OFFSETS, [entry]).header[0])

    for offset, epoch, told in (0, -1, [[EPOCH, 2]]), (1, EPOCH, [[EPOCH, 2]]), (2, EPOCH, []), (-1, -1, []):
        answer = ask(offset, epoch)
        assert (answer.status, answer.offset, answer.epochs) == (status.OK, 2, told)
    for offset, epoch, kind in (1, 0, OffsetDiverged), (3, EPOCH, OffsetDiverged), (1, EPOCH + 1, Fenced):
        answer = ask(offset, epoch)
        assert isinstance(status.decode_error(answer.status, answer.error), kind)


def test_a_topic_that_comes_later(front: Any) -> None:
    """A partition that is not there answers with its error at once, armed or not, and its handle is not open."""
    topic = next(names)
    session = Session(front, topic="pulse", opened=False)
    opened = [GetPartition(1, topic, "0" * 16, 0), GetPartition(2, topic, "0" * 16, 1)]
    errors = session.errors(opened=opened, armed=[(1, 0)], wait_ms=50_000, bytes_min=2**63)
    assert [handle for handle, _error in errors] == [1, 2]
    assert all(isinstance(error, TopicNotFound) for _handle, error in errors)
    assert session.refused(armed=[(1, 0)]) == "fetch handle 1 is not open"
    topic_id = front.topic(topic)
    ((_handle, error),) = session.errors(opened=opened[:1])
    assert "created again" in str(error)
    ((_handle, error),) = session.errors(opened=[GetPartition(1, topic, topic_id, 1)])
    assert "no partition '0-1'" in str(error)
    with front.cluster.admin() as admin:
        admin.alter(topic, partitions=2)
    front.fill(topic, 1, [b"a"])
    assert session.poll(opened=[GetPartition(1, topic, topic_id, 1)], armed=[(1, 0)]) == [(1, [b"a"])]


def test_a_topic_that_goes_ends_the_wait(front: Any) -> None:
    session = Session(front, 2)
    asked = session.park(wait_ms=50_000, bytes_min=10**6, armed=[(1, 0), (2, 0)])
    with front.cluster.admin() as admin:
        admin.delete(session.topic)
    frame = session.client.answer()
    assert frame.opaque == asked
    results = unpack_list(GetResult, frame.header)
    assert results
    assert all(isinstance(status.decode_error(r.status, r.error), TopicNotFound) for r in results)


def test_many_failures_fit_into_their_answer(front: Any) -> None:
    """Nothing of 4,000 partitions that are not there is kept for a later answer, even with the longest names."""
    name = "n" * MAX_NAME_CHARS
    session = Session(front, topic="pulse", opened=False)
    opened = [GetPartition(n, name, "0" * MAX_NAME_CHARS, n) for n in range(1500)]
    assert [handle for handle, _error in session.errors(opened=opened)] == list(range(1500))
    opened = [GetPartition(n, "gone", "0" * 16, n) for n in range(REQUEST_ENTRIES_MAX)]
    errors = session.errors(opened=opened, armed=[(n, 0) for n in range(REQUEST_ENTRIES_MAX)])
    assert [handle for handle, _error in errors] == list(range(REQUEST_ENTRIES_MAX))


@pytest.mark.slow
def test_a_thousand_partitions_in_one_poll(front: Any) -> None:
    """Once all are open and armed, what is sent is in proportion to what changes."""
    count = 1000
    session = Session(front, count, topic="thousand", opened=False)
    client = session.client
    armed = [(place.handle, 0) for place in session.places]
    _opaque, request = client.frame(Command.GET, front.get(wait_ms=50_000, opened=session.places, armed=armed))
    assert len(request) < 40 * count
    client.send(request)
    began = time.monotonic()
    changed = [7, 500, 999]
    for number in range(5):
        value = b"round %d" % number
        batch_bytes = len(front.batch([value]))
        for partition in changed:
            session.put(partition, value)
        got: list[tuple[int, list[bytes]]] = []
        while len(got) < len(changed):
            _opaque, found = session.answer()
            assert client.frame_sizes[-1] < 24 + len(found) * (20 + batch_bytes)
            armed = [(handle, number + 1) for handle, _values in found]
            _opaque, request = client.frame(Command.GET, front.get(wait_ms=50_000, armed=armed))
            assert len(request) < 40 + 6 * len(armed)
            client.send(request)
            got += found
        assert sorted(got) == [(partition + 1, [value]) for partition in changed]
    print(f"five rounds of three changes in {count} partitions: {time.monotonic() - began:.3f} s")
    front.delete("thousand")
