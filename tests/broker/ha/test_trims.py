"""Messages that were deleted by Admin.trim(): gone on every replica, and they stay gone, whatever happens to it.

The invariant: after the answer no reader gets a deleted message, from any replica, and no running replica has it on its
disk. Messages from the offset on are all there.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from metamq.client.admin.admin_model import PartitionTrim, TrimBefore
from metamq.errors import ConfigError, MetamqError, OffsetOutOfRange, Timeout
from metamq.testing import BrokerProcess
from metamq.zk.cluster.trims import Trim, check_trims_follow
from metamq.zk.partitions import TopicPartition
from tests.broker.ha.test_replication import Group, a_sync_topic, replica_group
from tests.parts import SLOW_S, statistics, values_to_end, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
TOPIC = "t"
TP = TopicPartition(TOPIC, "0-0")
COUNT = 300


@pytest.fixture
def group() -> Iterator[Group]:
    with replica_group() as made:
        yield made


def values(first: int = 0, end: int = COUNT) -> list[bytes]:
    return [b"secret-%06d-" % number for number in range(first, end)]


def send(group: Group, first: int = 0, end: int = COUNT, each: int = 1) -> None:
    """Sends the messages, `each` in a batch: then their offsets are their numbers."""
    with group.cluster.producer(delivery_timeout_s=SLOW_S) as producer:
        for at in range(first, end, each):
            producer.send_many(TOPIC, values(at, min(at + each, end)))
            producer.flush(SLOW_S)


def trim(group: Group, before: TrimBefore, timeout_s: float = SLOW_S) -> PartitionTrim:
    with group.cluster.admin() as admin:
        (done,) = admin.trim(TOPIC, before, timeout_s=timeout_s)
    return done


def on_disk(replica: BrokerProcess, wanted: list[bytes]) -> list[bytes]:
    """The values that are in a file of the topic's partitions."""
    files = [path for path in (replica.data / "topics").glob(f"{TOPIC}@*/*/*") if path.is_file()]
    found = b"".join(path.read_bytes() for path in files)
    return [value for value in wanted if value in found]


def read(group: Group) -> list[bytes]:
    with group.cluster.consumer(topics=[TOPIC], start="earliest", idle_timeout_s=0.5) as consumer:
        return [bytes(value) for value in values_to_end(consumer)]


def check(group: Group, begin: int, *replicas: int, end: int = COUNT) -> None:
    assert read(group) == values(begin, end)
    with group.cluster.admin() as admin:
        (part,) = admin.describe_topic(TOPIC).partitions
    assert (part.start_offset, part.stable_offset) == (begin, end)
    for number in replicas:
        replica = group.replicas[number]
        wait_until(partial(_is_gone, replica, begin), what=f"no deleted message at replica {number}")


def _is_gone(replica: BrokerProcess, begin: int) -> bool:
    return not on_disk(replica, values(0, begin))


def begun(group: Group, *, segment_bytes: int = 4096, slaves: int = 1) -> None:
    a_sync_topic(group, TOPIC, 1, segment_bytes=segment_bytes)
    for _ in range(slaves):
        group.add_slave()
    group.wait_insync(*range(slaves + 1))


def test_deleted_messages_are_gone_on_each_replica_and_after_a_promotion(group: Group) -> None:
    begun(group)
    send(group)
    with group.cluster.admin() as admin:
        (plan,) = admin.trim(TOPIC, {TP: 123}, dry_run=True)
        assert (plan.begin_before, plan.begin, plan.messages) == (0, 123, 123)
        assert plan.bytes is not None
        assert plan.bytes > 123 * 100
        assert admin.trim(TOPIC, 0)[0].messages == 0
    done = trim(group, {TP: 123})
    assert (done.begin_before, done.begin, done.messages, done.kept_on_disk) == (0, 123, 123, 0)
    for replica in group.replicas:
        assert on_disk(replica, values(0, 123)) == []  # at once: the answer says so
    check(group, 123, 0, 1)
    assert trim(group, {TP: 100}).begin == 123  # never back, and again after a lost answer
    group.promote(1)
    check(group, 123, 0, 1)
    send(group, COUNT, COUNT + 50)
    assert trim(group, "latest").begin == COUNT + 50
    check(group, COUNT + 50, 0, 1, end=COUNT + 50)
    send(group, COUNT + 50, COUNT + 60)
    group.replicas[1].kill()
    group.replicas[1].start()
    check(group, COUNT + 50, 1, end=COUNT + 60)


def test_an_offset_inside_of_a_batch_hides_its_messages_and_keeps_the_batch(group: Group) -> None:
    begun(group, slaves=0)
    send(group, each=10)
    done = trim(group, 125)
    assert (done.begin, done.kept_on_disk) == (125, 5)
    assert read(group) == values(125)
    assert on_disk(group.replicas[0], values(0, 120)) == []
    group.replicas[0].kill()
    group.replicas[0].start()
    check(group, 125)


def test_a_slave_that_was_away_shows_no_deleted_message_when_it_comes_back_as_the_master(group: Group) -> None:
    begun(group)
    send(group)
    group.replicas[1].stop()
    assert trim(group, 250).begin == 250  # the slave is not registered
    assert on_disk(group.replicas[1], values(0, 250)) == values(0, 250)
    group.replicas[0].stop()
    group.replicas[1].start(wait=False)
    group.promote(1, accept_loss=True)
    check(group, 250, 1)
    group.replicas[0].start()
    group.wait_insync(0, 1, master=1)
    check(group, 250, 0, 1)


def test_a_slave_that_hangs_is_named_and_carries_out_the_deletion_later(group: Group) -> None:
    begun(group, slaves=0)
    group.add_slave(session_timeout_ms=60_000)  # it stays registered
    group.wait_insync(0, 1)
    send(group)
    group.replicas[1].freeze()
    try:
        with pytest.raises(Timeout, match="replica 1 of broker 0"):
            trim(group, 250, timeout_s=15)
    finally:
        group.replicas[1].thaw()
    assert trim(group, 250).begin == 250
    check(group, 250, 0, 1)


def test_a_group_before_the_begin_goes_on_as_after_retention(group: Group) -> None:
    begun(group, slaves=0)
    send(group)
    with group.cluster.consumer(topics=[TOPIC], group="g", start="earliest") as consumer:
        assert next(iter(consumer)).offset == 0
    trim(group, 250)
    fails = group.cluster.consumer(topics=[TOPIC], group="g", start="earliest", on_data_loss="fail")
    with fails as consumer, pytest.raises(OffsetOutOfRange, match="250"):
        next(iter(consumer))
    with group.cluster.consumer(topics=[TOPIC], group="g", start="earliest", idle_timeout_s=0.5) as consumer:
        assert [bytes(value) for value in values_to_end(consumer)] == values(250)


def test_messages_of_a_transaction_do_not_come_back_by_a_crash_after_it(group: Group) -> None:
    begun(group, slaves=0)
    with group.cluster.producer() as producer, producer.transaction():
        for value in values():
            producer.send(TOPIC, value)
    assert trim(group, "latest").begin == COUNT  # waits until the journal does not need the messages
    group.replicas[0].kill()
    group.replicas[0].start()
    check(group, COUNT, 0)


def test_deletions_with_a_producer_retention_and_kills(group: Group) -> None:
    begun(group, segment_bytes=2048)
    dice, is_over = random.Random(7), threading.Event()
    sent: list[bytes] = []

    def produce() -> None:
        with group.cluster.producer(delivery_timeout_s=4 * SLOW_S) as producer:
            while not is_over.is_set():
                value = values(len(sent), len(sent) + 1)[0]
                producer.send(TOPIC, value).result(4 * SLOW_S)
                sent.append(value)

    writer = threading.Thread(target=produce)
    writer.start()
    begin = 0
    try:
        for number in range(8):
            wait_until(partial(has_grown, sent, begin + 60), what="more messages")
            wanted = dice.randrange(begin, len(sent) - 10)
            killed = group.replicas[number % 2]
            killer = threading.Timer(dice.random() * 0.1, killed.kill)
            killer.start()
            stored = answered(partial(trim, group, wanted, 1))
            killer.join()
            killed.start()
            begin = wanted if stored else begin
            if stored is None:
                wait_until(partial(answered, partial(trim, group, wanted, 10)), what="the deletion")
                begin = wanted
            with group.cluster.admin() as admin:
                admin.alter(TOPIC, retention_bytes=None if number % 2 else 1 << 20)
    finally:
        is_over.set()
        writer.join()
    trim(group, begin)
    group.wait_insync(0, 1)
    check(group, begin, 0, 1, end=len(sent))
    group.wait_equal(0, 1)


def has_grown(sent: list[bytes], count: int) -> bool:
    return len(sent) > count


def answered(ask: Callable[[], object]) -> object:
    """The answer, or None if it was lost, or did not come in time."""
    try:
        return ask()
    except MetamqError:
        return None


def test_a_trim_in_the_configuration_does_not_go_back() -> None:
    before = {"0-0": Trim(100, 5)}
    check_trims_follow(TOPIC, before, {"0-0": Trim(101, 3), "0-1": Trim(1, 1)})
    check_trims_follow(TOPIC, before, {"0-0": Trim(90, 6)})  # another history, after an accepted loss
    for after in ({}, {"0-0": Trim(99, 5)}, {"0-0": Trim(0, 4)}):
        with pytest.raises(ConfigError, match="cannot come back"):
            check_trims_follow(TOPIC, before, after)


def test_a_topic_knows_its_trims_in_the_cluster_export(group: Group) -> None:
    begun(group, slaves=0)
    send(group)
    trim(group, 50)
    with group.cluster.admin() as admin:
        assert admin.topics()[TOPIC].trims["0-0"].offset == 50
        with pytest.raises(OffsetOutOfRange, match="300"):
            admin.trim(TOPIC, COUNT + 1)
        with pytest.raises(ConfigError, match="earliest"):
            admin.trim(TOPIC, "earliest")  # type: ignore[arg-type]
        assert '"trims"' in str(admin.export_cluster()).replace("'", '"').replace("\\", "")
    assert statistics(group.replicas[0])["partitions"][0]["trimmed"][0] == 50
