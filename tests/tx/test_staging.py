"""What a transaction gathers before it goes to brokers: batches by partition, the same however the messages come."""

from __future__ import annotations

import random

import pytest

from metamq.client.producer.outgoing import AnyMessage, CheckedMessage
from metamq.client.producer.partitioner import by_key_hash
from metamq.errors import MessageTooLarge
from metamq.tx.app.staging import Routes, Staging
from metamq.wire.batch import HEADER_BYTES, read_header
from metamq.wire.columns import decode
from metamq.wire.compression import Codec
from metamq.wire.limits import ENTRIES_TARGET
from metamq.zk.cluster.topics import TopicConfig

TOPIC = TopicConfig("orders", {0: 2, 3: 1}, max_message_bytes=2000)


def staging(batch_bytes: int, only: set[int] | None = None) -> Staging:
    return Staging(Routes(batch_bytes, 1 << 20, by_key_hash, Codec.NONE, only))


def taken_out(staged: Staging) -> dict[tuple[int, int], list[bytes]]:
    """The values of each partition, in order; no batch is empty."""
    found: dict[tuple[int, int], list[bytes]] = {}
    for broker_id in TOPIC.partitions:
        for one in staged.rest(broker_id):
            values = decode(memoryview(one.batch), read_header(one.batch)).values.tolist()
            assert len(one.batch) > HEADER_BYTES
            assert len(values) == one.messages > 0
            found.setdefault((broker_id, one.entry.partition), []).extend(values)
    return found


def any_messages(chance: random.Random) -> list[AnyMessage]:
    keys = [None, None, None, b"a", b"b"] if chance.random() < 0.5 else [None]
    made: list[AnyMessage] = []
    for _ in range(chance.choice([1, 2, 10, 60])):
        value, key = chance.randbytes(chance.randrange(100)), chance.choice(keys)
        made.append(value if key is None and chance.random() < 0.9 else CheckedMessage(value, key))
    return made


def test_many_at_once_are_staged_as_one_by_one() -> None:
    for seed in range(200):
        print("seed", seed)
        chance = random.Random(seed)
        batch_bytes = chance.choice([1, 500, 5000])
        at_once, singly = staging(batch_bytes), staging(batch_bytes)
        for one in (at_once, singly):  # both begin at the same partition
            one._turn[TOPIC.topic] = 1
        for _ in range(5):
            messages = any_messages(chance)
            taken = 0
            while taken < len(messages):
                taken = at_once.add_many(TOPIC, messages, taken)
                assert taken == len(messages) or at_once.full_at
            for message in messages:
                singly.add(TOPIC, message)
        assert at_once.taken == singly.taken
        assert taken_out(at_once) == taken_out(singly)


def test_batches_without_keys_take_turns_over_all_partitions() -> None:
    staged = staging(batch_bytes=1000)
    for _ in range(6):  # each fills a batch
        assert staged.add_many(TOPIC, [bytes(1000)], 0) == 1
    assert {place: len(values) for place, values in taken_out(staged).items()} == {(0, 0): 2, (0, 1): 2, (3, 0): 2}


def test_what_is_too_large_leaves_no_trace() -> None:
    staged = staging(batch_bytes=10_000)
    with pytest.raises(MessageTooLarge):
        staged.add_many(TOPIC, [bytes(3000)], 0)
    assert not staged.taken
    assert taken_out(staged) == {}


def test_another_configuration_is_another_route() -> None:
    staged = staging(batch_bytes=10_000, only={3})
    staged.add(TOPIC, b"1")
    altered = TopicConfig("orders", {3: 2}, id=TOPIC.id)
    staged.add(altered, CheckedMessage(b"2", partition="3-1"))
    assert taken_out(staged) == {(3, 0): [b"1"], (3, 1): [b"2"]}


def test_open_batches_are_bounded_by_their_number() -> None:
    """Each is an entry in the header of a request, whose size is bounded, too."""
    wide = TopicConfig("w" * 200, {0: 3 * ENTRIES_TARGET})
    staged = staging(batch_bytes=10_000)
    sent = []
    for index in range(3 * ENTRIES_TARGET - 1):
        staged.add_many(wide, [CheckedMessage(b"1", partition=f"0-{index}")], 0)
        if staged.full_at:
            sent.append(len(staged.full(0)))
    assert [*sent, len(staged.rest(0))] == [ENTRIES_TARGET, ENTRIES_TARGET, ENTRIES_TARGET - 1]
