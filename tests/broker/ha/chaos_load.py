"""The load of the chaos tests: producers, a reader, a group whose members come and go, and what each was told."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from metamq import Consumer, Producer
from metamq.errors import MetamqError
from metamq.zk.ownership import read_offset
from metamq.zk.partitions import TopicPartition
from metamq.zk.session import Session
from tests.broker.ha.history import Given, History
from tests.broker.ha.test_replication import SESSION_MS

TOPIC = "chaos"
GROUP = "chaotic"
PARTITIONS = 3
PRODUCERS = 2
MEMBERS = 2
MEMBER_S = (1.0, 6.0)
"""How long a member stays."""
SAMPLE_S = 0.2
BURST = 20


class Load:
    """Begins at once; `stop_sending`, then `stop`. What threads fail with is raised there."""

    def __init__(self, zookeeper: str, own_zookeeper: str, seed: int, *, loss_accepted: bool = False) -> None:
        """`zookeeper` is that of the clients under test, `own_zookeeper` that of what watches them."""
        self.reader = Given("the reader", loss_accepted=loss_accepted)
        self.group = Given("the group", loss_accepted=loss_accepted)
        self._histories = [History() for _ in range(PRODUCERS)]
        self._zookeeper = zookeeper
        self._own_zookeeper = own_zookeeper
        self._settings: dict[str, Any] = {"session_timeout_ms": SESSION_MS, "start": "earliest", "read_from": "any"}
        self._random = random.Random(seed)
        self._sent_enough, self._read_enough, self._seen_enough = (threading.Event() for _ in range(3))
        self._errors: list[BaseException] = []
        self._producing = [self._start(self._produce, n) for n in range(PRODUCERS)]
        self._consuming = [self._start(self._read)]
        self._consuming += [self._start(self._be_members, random.Random(seed + n)) for n in range(MEMBERS)]
        self._sampling = self._start(self._sample)

    def _start(self, work: Callable[..., None], *args: object) -> threading.Thread:
        def run() -> None:
            try:
                work(*args)
            except BaseException as error:
                self._errors.append(error)

        thread = threading.Thread(target=run, name=work.__name__)
        thread.start()
        return thread

    @property
    def history(self) -> History:
        """All that was told so far."""
        acknowledged = {value: place for one in self._histories for value, place in list(one.acknowledged.items())}
        return History(acknowledged, [*self.reader.seen, *self.group.seen])

    @property
    def faults(self) -> list[str]:
        """What consumers noticed."""
        return self.reader.faults + self.group.faults

    def stop_sending(self) -> None:
        """Producers end; what they sent has its outcome."""
        self._sent_enough.set()
        self._join(self._producing)

    def stop(self) -> None:
        """Ends everything. Members commit what they were given."""
        self._sent_enough.set()
        self._read_enough.set()
        self._join([*self._producing, *self._consuming])
        self._seen_enough.set()
        self._join([self._sampling])
        if self._errors:
            raise self._errors[0]

    def _join(self, threads: list[threading.Thread]) -> None:
        for thread in threads:
            thread.join(120)
            if thread.is_alive():
                self._errors.append(AssertionError(f"{thread.name} does not end"))

    # -- threads ------------------------------------------------------------------------------------------------------

    def _produce(self, name: int) -> None:
        """Sends numbered messages, a few at a time, and notes where the acknowledged ones are."""
        number = 0
        acknowledged = self._histories[name].acknowledged
        with Producer(self._zookeeper, delivery_timeout_s=60, request_timeout_s=2) as producer:
            while not self._sent_enough.is_set():
                sent = []
                for _ in range(BURST):
                    value = b"%d-%d" % (name, number)
                    sent.append((value, producer.send(TOPIC, value, partition=f"0-{number % PARTITIONS}")))
                    number += 1
                for value, delivery in sent:
                    with contextlib.suppress(MetamqError):
                        receipt = delivery.result(70)
                        acknowledged[value] = (receipt.partition, receipt.offset)

    def _read(self) -> None:
        """Reads all of it as it comes, without a group."""
        with Consumer(self._zookeeper, topics=[TOPIC], **self._settings) as consumer:
            self._close_when(consumer, self._read_enough.wait)
            for batch in consumer.batches():
                self.reader.batch(batch.partition, batch.offset, batch.values)

    def _be_members(self, chance: random.Random) -> None:
        """One member of the group after the other."""
        while not self._read_enough.is_set():
            stay_s = chance.uniform(*MEMBER_S)
            with contextlib.suppress(MetamqError):  # cut off from ZooKeeper it cannot begin, nor commit at its end
                self._be_member(stay_s, chance)

    def _be_member(self, stay_s: float, chance: random.Random) -> None:
        settings = {"commit_interval_ms": 100, **self._settings, "read_from": chance.choice(["any", "master"])}
        with Consumer(self._zookeeper, topics=[TOPIC], group=GROUP, **settings) as consumer:
            self._close_when(consumer, lambda: self._read_enough.wait(stay_s))
            for batch in consumer.batches():
                self.group.batch(batch.partition, batch.offset, batch.values)

    def _close_when(self, consumer: Consumer[Any], wait: Callable[[], object]) -> None:
        threading.Thread(target=lambda: (wait(), consumer.close()), daemon=True).start()

    def _sample(self) -> None:
        """Looks at what the group has committed, all the time."""

        async def look() -> None:
            session = await Session.open(self._own_zookeeper, connect_timeout_s=None)
            try:
                while not self._seen_enough.is_set():
                    for index in range(PARTITIONS):
                        with contextlib.suppress(MetamqError):
                            found = await read_offset(session, GROUP, TopicPartition(TOPIC, f"0-{index}"))
                            if found is not None and found[0].committed is not None:
                                self.group.committed(f"0-{index}", found[0].committed.offset)
                    await asyncio.sleep(SAMPLE_S)
            finally:
                await session.close()

        asyncio.run(look())

    def missed(self, logs: Mapping[str, Sequence[bytes]]) -> list[str]:
        """What of the logs the reader and the group were not given."""
        return self.reader.missed(logs) or self.group.missed(logs)
