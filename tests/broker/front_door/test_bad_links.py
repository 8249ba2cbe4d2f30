"""Bad input where slaves link up: before and after a JOIN. It ends that link at most, and nobody else notices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from metamq.errors import ConfigError, Fenced, ProtocolError
from metamq.wire import status, sync
from metamq.wire.commands import Command, PutEntry
from metamq.wire.frames import encode_frame
from metamq.wire.limits import ENTRIES_MAX, HAND_OVER_MS_MAX
from tests.parts import statistics

EPOCH = 1
REPLICA = 7
TOPIC = "linked"
JOIN = sync.Join(sync.JOIN, EPOCH, sync.MAGIC, 0, REPLICA, 1, "a test", False, 1)
BATCHES = 3
"""In the topic, of one message each."""


class Link:
    """A raw client that has joined as a slave, with what the test says of its log."""

    def __init__(self, front: Any) -> None:
        self.front = front
        self.topic_id = front.topic(TOPIC)
        self.client = front.connect()
        answer = self.client.ask(Command.SYNC, JOIN)
        assert answer.status == status.OK
        accept = sync.unpack_from_master(answer.header)
        assert isinstance(accept, sync.Accept)
        assert accept.epoch == EPOCH

    def push(self, header: Any, body: bytes = b"") -> None:
        self.client.send(encode_frame(1, Command.SYNC, 0, 0, header, [body] if body else None))

    def hears(self, kind: type[sync.FromMaster]) -> Any:
        """The next frame of a kind."""
        while True:
            answer = self.client.answer()
            assert (answer.command, answer.opaque, answer.status) == (Command.SYNC, 0, status.OK)
            frame = sync.unpack_from_master(answer.header)
            if isinstance(frame, kind):
                return frame

    def attach(self, end: tuple[int, int] = (0, 0), handle: int = 1) -> sync.AttachResult:
        """Tells of a log of the master's epoch that ends there; returns what becomes of it."""
        epochs = [(EPOCH, 0, 0)] if end[0] else []
        entry = sync.AttachPartition(handle, TOPIC, self.topic_id, 0, 0, 0, *end, 0, epochs)
        self.push(sync.Attach(sync.ATTACH, EPOCH, [entry]))
        (result,) = self.hears(sync.Attached).results
        assert isinstance(result, sync.AttachResult)
        return result

    def is_refused(self) -> str:
        """Waits for the end of the link; returns the reason, which is said first."""
        while (answer := self.client.answer()).command == Command.SYNC:
            pass
        assert answer.command == Command.HELLO
        error = self.front.error_of(answer)
        assert isinstance(error, ProtocolError)
        assert self.client.ended()
        self.client.close()
        return str(error)


def slaves(front: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = statistics(front.cluster.broker)["replication"]["slaves"]
    return found


@pytest.fixture
def master(front: Any) -> Iterator[Any]:
    """The broker, with a topic of a few batches. Whatever happens, it has no link after the test, is alone in the set,
    and takes writes."""
    front.topic(TOPIC)
    for _ in range(BATCHES):
        front.fill(TOPIC, 0, [b"value"])
    yield front
    front.close_clients()
    front.until(lambda: slaves(front) == [])
    said = statistics(front.cluster.broker)
    assert (said["replication"]["insync"], said["writes_refused"]) == ([0], None)
    front.delete(TOPIC)


@pytest.fixture
def link(master: Any) -> Link:
    return Link(master)


@pytest.mark.parametrize(
    ("header", "kind", "problem"),
    [
        (None, ProtocolError, "begins with its kind"),
        ([], ProtocolError, "begins with its kind"),
        ([99, 1], ProtocolError, "begins with its kind"),
        ([-1], ProtocolError, "begins with its kind"),
        ({"kind": sync.JOIN}, ProtocolError, "begins with its kind"),
        (list(JOIN)[:-1], ProtocolError, "Join has 9 fields"),
        (JOIN._replace(magic=1), ProtocolError, "the magic of a Join"),
        (JOIN._replace(epoch=-1), ProtocolError, "Join.epoch"),
        (JOIN._replace(replica=2**63), ProtocolError, "Join.replica"),
        (JOIN._replace(learner=1), ProtocolError, "Join.learner"),
        (JOIN._replace(broker_id=5), ConfigError, "replica 7 of broker 5 joined broker 0"),
        (JOIN._replace(replica=0), ConfigError, "two replicas have the same number"),
        (JOIN._replace(epoch=EPOCH + 1), Fenced, "has seen epoch 2"),
        (sync.Attach(sync.ATTACH, EPOCH, []), ProtocolError, "a SYNC request is a Join, got Attach"),
        (sync.Ack(sync.ACK, EPOCH, 0, 0, []), ProtocolError, "a SYNC request is a Join, got Ack"),
        (sync.HandOver(sync.HANDOVER, EPOCH, 1), ProtocolError, "a SYNC request is a Join, got HandOver"),
        (sync.Leave(sync.LEAVE, EPOCH), ProtocolError, "a SYNC request is a Join, got Leave"),
        (sync.Beat(sync.BEAT, EPOCH, 0, []), ProtocolError, "begins with its kind"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, tuple) else None,
)
def test_who_does_not_join_properly_gets_no_link(master: Any, header: Any, kind: type[Exception], problem: str) -> None:
    """As a request, or pushed as on a link that there is not."""
    client = master.connect()
    error = master.error_of(client.ask(Command.SYNC, header))
    assert type(error) is kind
    assert problem in str(error)
    client.send(encode_frame(1, Command.SYNC, 0, 0, header))
    assert type(master.error_of(client.answer())) is kind
    assert client.ask(Command.STATS, None).status == status.OK
    assert slaves(master) == []


def test_a_join_has_no_body(master: Any) -> None:
    client = master.connect()
    assert "SYNC has no body" in str(master.error_of(client.ask(Command.SYNC, JOIN, [bytes(8)])))
    assert slaves(master) == []


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (None, "begins with its kind"),
        ("junk", "begins with its kind"),
        ([], "begins with its kind"),
        ([99, EPOCH], "begins with its kind"),
        ([True, EPOCH], "begins with its kind"),
        (list(sync.Ack(sync.ACK, EPOCH, 0, 0, []))[:-1], "Ack has 5 fields"),
        (sync.Ack(sync.ACK, EPOCH, -1, 0, []), "Ack.held_seq"),
        (sync.Attach(sync.ATTACH, EPOCH, [[1, 2]]), "AttachPartition has 10 fields"),  # type: ignore[list-item]
        (sync.Detach(sync.DETACH, EPOCH, [1] * (ENTRIES_MAX + 1)), "Detach.handles has 20,001 entries"),
        (JOIN, "sent a Join in the middle of a link"),
        (sync.Accept(sync.ACCEPT, EPOCH, 1, 1000), "begins with its kind"),
        (sync.Data(sync.DATA, EPOCH, 1, [], []), "begins with its kind"),
        (sync.Ack(sync.ACK, EPOCH + 1, 0, 0, []), "sent a Ack of epoch 2, not 1"),
        (sync.Leave(sync.LEAVE, EPOCH - 1), "sent a Leave of epoch 0, not 1"),
        (sync.Ack(sync.ACK, EPOCH, 1, 0, []), "replica 7 acknowledges 1, sent was 0"),
        (sync.Ack(sync.ACK, EPOCH, 2**63 - 1, 2**63 - 1, []), "sent was 0"),
        (sync.HandOver(sync.HANDOVER, EPOCH, HAND_OVER_MS_MAX + 1), "a HandOver waits for at most 60,000 ms"),
    ],
)
def test_a_frame_that_is_wrong_ends_the_link(link: Link, header: Any, problem: str) -> None:
    assert [slave["replica"] for slave in slaves(link.front)] == [REPLICA]
    link.push(header)
    assert problem in link.is_refused()


def test_requests_before_a_wrong_frame_are_carried_out_once(link: Link) -> None:
    """Whatever else comes behind the frame. They are answered, the refusal is the last frame, and the log is quiet."""
    front = link.front
    batch = bytes(front.batch([b"once"]))
    _opaque, put = link.client.frame(Command.PUT, [PutEntry(TOPIC, link.topic_id, 0, len(batch))], [batch])
    before = front.offset(TOPIC)
    log = front.cluster.broker.log_path
    known = log.read_text()
    link.client.send(put + b"".join(encode_frame(1, Command.SYNC, 0, 0, [99, EPOCH])))
    while (answer := link.client.answer()).command == Command.SYNC:
        pass
    assert (answer.command, answer.status, answer.header[0][0]) == (Command.PUT, status.OK, status.OK)
    for _ in range(5):  # each piece is received by itself, or the connection is closed already
        with contextlib.suppress(ConnectionError):
            link.client.send(put)
    assert "begins with its kind" in link.is_refused()
    assert front.offset(TOPIC) == before + 1
    front.still_serves()
    assert "Traceback" not in log.read_text()[len(known) :]


@pytest.mark.parametrize("held_position", [1, 2**62])
def test_an_acknowledgement_of_what_was_not_sent_ends_the_link(link: Link, held_position: int) -> None:
    """Of what is live as of what is copied."""
    end = link.front.offset(TOPIC)
    size = stored_bytes(link.front)
    result = link.attach((end, size))
    assert (result.decision, result.offset, result.position) == (sync.SyncDecision.FROM, end, size)
    link.push(sync.Ack(sync.ACK, EPOCH, 0, 0, [(1, size + held_position, 0)]))
    assert f"is acknowledged to byte {size + held_position:,}, which was not sent" in link.is_refused()


def test_an_acknowledgement_that_has_flushed_more_than_it_holds_ends_the_link(link: Link) -> None:
    link.attach((link.front.offset(TOPIC), stored_bytes(link.front)))
    link.push(sync.Ack(sync.ACK, EPOCH, 0, 1, []))
    assert "acknowledges 0, sent was 0" in link.is_refused()


def test_what_is_out_of_order_or_of_nothing_known_changes_nothing(link: Link) -> None:
    """Frames that may cross on the way: acknowledgements of what is detached, a partition that is attached twice."""
    end = link.front.offset(TOPIC), stored_bytes(link.front)
    link.push(sync.Ack(sync.ACK, EPOCH, 0, 0, [(1, 10, 10), (2**62, 2**62, 0)]))
    link.push(sync.Detach(sync.DETACH, EPOCH, [1, 2, 2**62]))
    for handle in (1, 1, 2):
        assert link.attach(end, handle).decision == sync.SyncDecision.FROM
    link.push(sync.Detach(sync.DETACH, EPOCH, [1]))
    link.push(sync.Ack(sync.ACK, EPOCH, 0, 0, [(1, 2**62, 2**62), (2, end[1], end[1])]))
    link.push(sync.Leave(sync.LEAVE, EPOCH))
    link.push(sync.Ack(sync.ACK, EPOCH, 0, 0, []))
    link.push(sync.Ack(sync.ACK, EPOCH, 0, 0, []), bytes(100))
    link.push(sync.Attach(sync.ATTACH, EPOCH, []))
    assert link.hears(sync.Attached).results == []
    (slave,) = slaves(link.front)
    assert (slave["replica"], slave["stage"]) == (REPLICA, "catching up")


def test_topics_that_are_not_there_are_waited_for(link: Link) -> None:
    names = [("nowhere", "x" * 16), (TOPIC, "another-id"), (TOPIC, link.topic_id)]
    asked = [
        sync.AttachPartition(n, topic, topic_id, 10**6 * (n == 2), 0, 0, 5, 500, 5, [])
        for n, (topic, topic_id) in enumerate(names)
    ]
    link.push(sync.Attach(sync.ATTACH, EPOCH, asked))
    results = link.hears(sync.Attached).results
    assert [(result.handle, result.decision) for result in results] == [(n, sync.SyncDecision.WAIT) for n in range(3)]


@pytest.mark.parametrize(("more_offsets", "more_bytes"), [(0, 8), (0, -1), (1, 0), (-1, 0), (-1, -8)])
def test_a_log_that_ends_where_no_batch_of_the_master_does_is_refused_and_the_masters_served(
    link: Link, more_offsets: int, more_bytes: int
) -> None:
    """It would be sent from the middle of a batch, or counted by offsets that are not the master's."""
    size = stored_bytes(link.front)
    one = size // BATCHES
    result = link.attach((2 + more_offsets, 2 * one + more_bytes))
    assert result.decision == sync.SyncDecision.REFUSE, result.reason
    assert "no batch of the master's begins there" in result.reason
    assert link.attach((2, 2 * one)).decision == sync.SyncDecision.FROM, "as it really is"
    copy = link.hears(sync.Copy)
    assert [entry[:2] for entry in copy.entries] == [[1, 2 * one]]
    assert link.front.cluster.broker.running
    link.front.fill(TOPIC, 0, [b"it is served still"])


def test_a_connection_is_one_link(link: Link) -> None:
    error = link.front.error_of(link.client.ask(Command.SYNC, JOIN._replace(replica=8)))
    assert isinstance(error, ProtocolError)
    assert "is a link already" in str(error)
    assert [slave["replica"] for slave in slaves(link.front)] == [REPLICA]
    assert link.attach().decision == sync.SyncDecision.FROM


def test_who_joins_again_elsewhere_leaves_the_former_link(link: Link) -> None:
    again = Link(link.front)
    with pytest.raises(EOFError):
        link.client.answer()
    assert [slave["replica"] for slave in slaves(link.front)] == [REPLICA]
    assert again.attach().decision == sync.SyncDecision.FROM


def test_half_a_frame_and_then_the_end(link: Link) -> None:
    frame = b"".join(encode_frame(1, Command.SYNC, 0, 0, sync.Ack(sync.ACK, EPOCH, 0, 0, [])))
    link.client.send(frame + frame[:-3])
    link.client.close()
    link.front.until(lambda: slaves(link.front) == [])


def test_a_slave_that_asks_for_the_role_and_vanishes_stops_writes_for_no_longer_than_that(link: Link) -> None:
    """It does not hold everything: so it is not waited for once its link is gone."""
    link.push(sync.HandOver(sync.HANDOVER, EPOCH, HAND_OVER_MS_MAX))
    link.front.until(lambda: statistics(link.front.cluster.broker)["writes_refused"])
    link.client.close()
    link.front.until(lambda: statistics(link.front.cluster.broker)["writes_refused"] is None)


def stored_bytes(front: Any) -> int:
    (size,) = (p["size_bytes"] for p in statistics(front.cluster.broker)["partitions"] if p["topic"] == TOPIC)
    return int(size)
