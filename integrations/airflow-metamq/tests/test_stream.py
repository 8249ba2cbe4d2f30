"""The commits of a trigger, with Airflow's own manager of streams and a real cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from airflow.providers.common.messaging.triggers.msg_queue import MessageQueueTrigger
from airflow.sdk import Connection
from airflow.triggers.base import TriggerEvent
from airflow.triggers.shared_stream import SharedStreamManager
from airflow_metamq.hook import MetamqHook, settings_of
from airflow_metamq.trigger import UNSTORED_MAX, MetamqTrigger

from metamq import Message, SecurityConfig
from metamq.errors import ConfigError
from metamq.security.certificates import make_all
from metamq.testing import Cluster, cluster

LIMIT_S = 30


class Triggerer:
    """The part of a triggerer that runs one trigger of an asset."""

    def __init__(self, trigger: MetamqTrigger, **settings: int) -> None:
        self._manager = SharedStreamManager(**settings)
        trigger.trigger_id = 1
        self._key = trigger.shared_stream_key()
        stream = self._manager.subscribe(trigger_id=1, trigger=trigger, key=self._key)
        self._events: AsyncIterator[TriggerEvent] = trigger.filter_shared_stream(stream)

    async def fire(self) -> TriggerEvent:
        """Receives an event, and loses it."""
        async with asyncio.timeout(LIMIT_S):
            return await anext(self._events)

    async def receive(self) -> tuple[TriggerEvent, int | None]:
        """Receives an event, and returns it with its number for confirm()."""
        event = await self.fire()
        return event, self._manager.bind_pending_event(trigger_id=1, key=self._key)

    def confirm(self, *numbers: int | None) -> None:
        self._manager.confirm_persisted([number for number in numbers if number is not None])

    async def end(self) -> None:
        """Ends the trigger. Airflow makes the commits that are due before that."""
        await self._manager.unsubscribe(1, self._key)


def sent(cluster: Cluster, *values: str) -> str:
    """Returns a new topic with these messages."""
    topic = cluster.new_topic(partitions=1)
    with cluster.producer() as producer:
        for value in values:
            producer.send(topic, value.encode())
    return topic


async def committed(cluster: Cluster, group: str) -> int | None:
    """Returns the committed offset of a group that reads one partition."""

    def ask() -> int | None:
        with cluster.admin() as admin:
            (partition,) = admin.describe_group(group).partitions
            return partition.committed

    return await asyncio.to_thread(ask)


def trigger_of(cluster: Cluster, topic: str) -> MetamqTrigger:
    return MetamqTrigger(topics=topic, group=topic, consumer={"zookeeper": cluster.zookeeper})


@pytest.mark.asyncio
async def test_messages_are_committed_in_order_once_their_events_are_stored(metamq_cluster: Cluster) -> None:
    topic = sent(metamq_cluster, "a", "b", "c")
    triggerer = Triggerer(trigger_of(metamq_cluster, topic))
    numbers = [(await triggerer.receive())[1] for _ in "abc"]
    triggerer.confirm(*numbers[1:])
    await triggerer.end()
    assert not await committed(metamq_cluster, topic), "the first one is not stored"
    triggerer = Triggerer(trigger_of(metamq_cluster, topic))
    numbers = [(await triggerer.receive())[1] for _ in "abc"]
    triggerer.confirm(*numbers[:2])
    await triggerer.end()
    assert await committed(metamq_cluster, topic) == 2


@pytest.mark.asyncio
async def test_a_trigger_that_ends_before_the_triggerer_has_the_event(metamq_cluster: Cluster) -> None:
    """Airflow counts such a message as accepted without an event."""
    topic = sent(metamq_cluster, "a")
    triggerer = Triggerer(trigger_of(metamq_cluster, topic))
    await triggerer.fire()
    await triggerer.end()
    assert not await committed(metamq_cluster, topic)  # at most the place where the group began


@pytest.mark.asyncio
async def test_a_trigger_reads_no_faster_than_events_are_stored(metamq_cluster: Cluster) -> None:
    """Airflow fails a trigger whose queue is full."""
    texts = [str(number) for number in range(5 * UNSTORED_MAX)]
    topic = sent(metamq_cluster, *texts)
    triggerer = Triggerer(trigger_of(metamq_cluster, topic), max_subscriber_queue=UNSTORED_MAX)
    values = []
    for _ in texts:
        event, number = await triggerer.receive()
        values.append(event.payload["value"])
        triggerer.confirm(number)
    assert values == texts
    await triggerer.end()


class Urgent(MetamqTrigger):
    def payload_of(self, message: Message[bytes]) -> str | None:
        return "urgent" if message.value == b"!" else None


@pytest.mark.asyncio
async def test_messages_without_an_event_are_committed(metamq_cluster: Cluster) -> None:
    topic = sent(metamq_cluster, "a", "!", "b", "!")
    triggerer = Triggerer(Urgent(topics=topic, group=topic, consumer={"zookeeper": metamq_cluster.zookeeper}))
    _event, number = await triggerer.receive()
    assert (await triggerer.fire()).payload == "urgent"
    triggerer.confirm(number)
    await triggerer.end()
    assert await committed(metamq_cluster, topic) == 3


@pytest.mark.asyncio
async def test_an_event_has_the_record_of_the_message(metamq_cluster: Cluster) -> None:
    topic = metamq_cluster.new_topic(partitions=1)
    with metamq_cluster.producer() as producer:
        receipt = producer.send(topic, b"\xff", key=b"k", headers={"source": b"web", "odd": b"\xfe"}).result()
    triggerer = Triggerer(trigger_of(metamq_cluster, topic))
    event = await triggerer.fire()
    await triggerer.end()
    assert event.payload == {
        "topic": topic, "partition": receipt.partition, "offset": 0, "timestamp_us": receipt.timestamp,
        "key": "k", "value": None, "value_base64": "/w==", "headers": {"source": "web", "odd": None},
        "headers_base64": {"odd": "/g=="},
    }  # fmt: skip
    assert TriggerEvent.model_validate_json(event.model_dump_json()) == event


def test_the_scheme_has_the_arguments_of_the_trigger() -> None:
    trigger = MessageQueueTrigger(scheme="metamq", topics="orders", group="bills")
    arguments = {"topics": ["orders"], "group": "bills", "metamq_conn_id": None, "consumer": {}}
    assert trigger.serialize() == ("airflow_metamq.trigger.MetamqTrigger", arguments)
    assert MetamqTrigger(**arguments).serialize() == trigger.serialize()


def test_a_connection_names_the_cluster() -> None:
    plain = settings_of(Connection(conn_id="c", conn_type="metamq", host="zk1", port=2181, extra='{"root": "/shop"}'))
    assert plain == {"zookeeper": "zk1:2181", "root": "/shop", "security": SecurityConfig()}
    assert settings_of(Connection(conn_id="c", conn_type="metamq"))["zookeeper"] is None


def test_a_login_needs_the_authority_of_the_brokers() -> None:
    with pytest.raises(ConfigError, match="the authority of the brokers is not known"):
        settings_of(Connection(conn_id="c", conn_type="metamq", login="etl", password="a password"))


@pytest.mark.asyncio
async def test_a_connection_with_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_all(tmp_path, ("localhost", "127.0.0.1"))
    admin_security = SecurityConfig(dir=str(tmp_path), role="admin", zookeeper_tls=False)
    with cluster(security=admin_security) as secure:
        with secure.admin() as admin:
            admin.set_user("etl", "the password of etl")
            topic = sent(secure, "a")
            admin.add_rules("allow", "etl", "read", f"topic:{topic}")
        extra = {"security": {"ca": str(tmp_path / "ca.crt"), "zookeeper_tls": False}}
        connection = Connection(
            conn_id="shop", conn_type="metamq", host=secure.zookeeper, login="etl", extra=json.dumps(extra)
        )
        for password, works in (("another password", False), ("the password of etl", True)):
            connection.password = password
            monkeypatch.setenv("AIRFLOW_CONN_SHOP", connection.as_json())
            answer, text = await asyncio.to_thread(MetamqHook("shop").test_connection)
            assert answer == works, text
        triggerer = Triggerer(MetamqTrigger(topics=topic, group="bills", metamq_conn_id="shop"))
        assert (await triggerer.fire()).payload["value"] == "a"
        await triggerer.end()
