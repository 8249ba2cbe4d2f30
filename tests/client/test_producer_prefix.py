"""Producer ids that begin with the prefix of their user."""

from __future__ import annotations

from metamq.client.producer.partition_queue import PartitionQueue
from metamq.security.rights import PRODUCER_RANDOM_BITS
from metamq.wire.compression import Codec
from tests.client.test_sender import a_batch


def test_an_id_begins_with_the_prefix_of_the_connection() -> None:
    queue = PartitionQueue("t", "0123456789abcdef", 0, 0)
    batches = [a_batch() for _ in range(4)]
    queue.waiting.extend(batches)
    assert queue.next_batch(Codec.NONE, 0.0, 5) is batches[0]
    first = queue.producer_id
    assert first >> PRODUCER_RANDOM_BITS == 5
    queue.stored(batches[0], 0.0)
    queue.next_batch(Codec.NONE, 0.0, 5)
    queue.next_batch(Codec.NONE, 0.0, 6)
    assert (queue.producer_id, queue.next_sequence) == (first, 3), "what is in flight has the former one"
    for batch in batches[1:3]:
        queue.stored(batch, 0.0)
    queue.next_batch(Codec.NONE, 0.0, 6)
    assert (queue.producer_id >> PRODUCER_RANDOM_BITS, queue.next_sequence) == (6, 1)
