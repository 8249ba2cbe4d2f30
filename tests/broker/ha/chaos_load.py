"""The load of the chaos tests: producers, readers, a group whose members come and go, and what each was told."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from metamq import Consumer, Producer
from metamq.client.settings import security_config
from metamq.errors import ClosedError, MetamqError, OffsetDiverged, OffsetOutOfRange
from metamq.security.tls import client_security
from metamq.zk.groups.ownership import read_offset
from metamq.zk.partitions import TopicPartition
from metamq.zk.session.session import Session
from tests.broker.ha.history import Given, History, Place, faults
from tests.broker.ha.test_replication import SESSION_MS

PARTITIONS = 3
PRODUCERS = 4
MEMBERS = 3
MEMBER_S = (1.0, 6.0)
"""How long a member stays."""
SAMPLE_S = 0.2
BURST = 20
PAUSE_S = (0.0, 0.1)
"""Between two bursts: two cores carry all of it, and ten minutes of it fit into memory."""


class Load:
    """The load of one topic. Begins at once; `stop_sending`, then `stop`. What threads fail with is raised there."""

    def __init__(
        self,
        topic: str,
        zookeeper: str,
        own_zookeeper: str,
        seed: int,
        *,
        is_sync: bool = True,
        losses: bool = False,
        producers: int = PRODUCERS,
        members: int = MEMBERS,
    ) -> None:
        """`zookeeper` is that of the clients under test, `own_zookeeper` that of what watches them.

        `is_sync`: what the topic is, so that what is acknowledged is there. `losses`: some are accepted; one reader is
        told by an error, the other one and the group only go on.
        """
        self.topic = topic
        self.strict = Given(f"the reader of {topic}")
        self.other = Given(f"the other reader of {topic}", may_change=losses)
        self.group = Given(f"the group of {topic}", may_change=losses)
        self.served: dict[str, float] = {}
        """By partition, when a message was acknowledged first that was sent after this was replaced."""
        self._told: list[list[dict[bytes, Place]]] = []
        """By period and producer, what was acknowledged that was sent in it."""
        self._producers = producers
        self._is_sync = is_sync
        self._losses = losses
        self._zookeeper = zookeeper
        self._own_zookeeper = own_zookeeper
        self._settings: dict[str, Any] = {"session_timeout_ms": SESSION_MS, "start": "earliest"}
        self._sent_enough, self._read_enough, self._seen_enough = (threading.Event() for _ in range(3))
        self._errors: list[BaseException] = []
        self._opened = threading.Semaphore(0)
        self.begin_period()
        self._producing = [self._start(self._produce, n, random.Random(seed + n)) for n in range(producers)]
        self._consuming = [self._start(self._read, self.strict, "any"), self._start(self._read, self.other, "master")]
        self._consuming += [self._start(self._be_members, random.Random(seed + n)) for n in range(members)]
        self._sampling = self._start(self._sample)
        for _ in range(
            producers + 2
        ):  # before anything breaks: a client that has never reached ZooKeeper gives up soon
            self._opened.acquire(timeout=60)

    def _start(self, work: Callable[..., None], *args: object) -> threading.Thread:
        def run() -> None:
            try:
                work(*args)
            except BaseException as error:
                self._errors.append(error)

        thread = threading.Thread(target=run, name=f"{work.__name__} {self.topic}")
        thread.start()
        return thread

    def begin_period(self) -> None:
        """What is sent from now on is looked at by itself."""
        self._told.append([{} for _ in range(self._producers)])

    def acknowledged(self) -> dict[bytes, Place]:
        """What was sent and acknowledged in this period, and is to be there."""
        if not self._is_sync:
            return {}
        return {value: place for one in self._told[-1] for value, place in list(one.items())}

    @property
    def all_acknowledged(self) -> int:
        """How many messages were, in all periods."""
        return sum(len(one) for period in self._told for one in period)

    def found(self, logs: Mapping[str, Sequence[bytes]]) -> list[str]:
        """What is wrong, with the logs at the end. Nobody sends or reads any more."""
        givens = [self.strict] if self._losses else [self.strict, self.other, self.group]
        taken_back = [fault for given in givens for fault in given.taken_back(logs)]
        return self.faults + faults(History(self.acknowledged()), logs) + taken_back

    @property
    def faults(self) -> list[str]:
        """What consumers noticed."""
        return self.strict.faults + self.other.faults + self.group.faults

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

    def _produce(self, name: int, chance: random.Random) -> None:
        """Sends numbered messages, a few at a time, and notes where the acknowledged ones are."""
        number = 0
        with Producer(self._zookeeper, delivery_timeout_s=60, request_timeout_s=2) as producer:
            self._opened.release()
            while not self._sent_enough.wait(chance.uniform(*PAUSE_S)):
                sent = []
                acknowledged = self._told[-1][name]  # what is sent from here on
                served = self.served
                for _ in range(BURST):
                    value = b"%d-%d" % (name, number)
                    sent.append((value, producer.send(self.topic, value, partition=f"0-{number % PARTITIONS}")))
                    number += 1
                for value, delivery in sent:
                    with contextlib.suppress(MetamqError):
                        receipt = delivery.result(70)
                        acknowledged[value] = (receipt.partition, receipt.offset)
                        served.setdefault(receipt.partition, time.monotonic())

    def _read(self, given: Given, read_from: Literal["any", "master"]) -> None:
        """Reads all of it as it comes, without a group. Whoever is strict about it is told of losses by an error."""
        on_data_loss = "fail" if given is self.strict else "earliest"
        settings = {**self._settings, "read_from": read_from, "on_data_loss": on_data_loss}
        with Consumer(self._zookeeper, topics=[self.topic], **settings) as consumer:
            self._opened.release()
            self._close_when(consumer, self._read_enough.wait)
            while not self._read_enough.is_set():
                try:
                    for batch in consumer.batches():
                        given.batch(batch.partition, batch.offset, batch.values)
                except OffsetDiverged as error:
                    if not self._losses:
                        raise
                    with contextlib.suppress(ClosedError):
                        self._go_on(consumer, given, error)

    def _go_on(self, consumer: Consumer[Any], given: Given, error: OffsetDiverged) -> None:
        """Where the error says; or from the start, should a further loss have taken that away."""
        given.told(error.partition, error.agreed)
        try:
            consumer.seek((error.topic, error.partition), error.agreed)
        except OffsetOutOfRange:
            given.told(error.partition, 0)
            consumer.seek((error.topic, error.partition), 0)

    def _be_members(self, chance: random.Random) -> None:
        """One member of the group after the other."""
        while not self._read_enough.is_set():
            stay_s = chance.uniform(*MEMBER_S)
            with contextlib.suppress(MetamqError):  # cut off from ZooKeeper it cannot begin, nor commit at its end
                self._be_member(stay_s, chance)

    def _be_member(self, stay_s: float, chance: random.Random) -> None:
        settings = {"commit_interval_ms": 100, **self._settings, "read_from": chance.choice(["any", "master"])}
        with Consumer(self._zookeeper, topics=[self.topic], group=self.topic, **settings) as consumer:
            self._close_when(consumer, lambda: self._read_enough.wait(stay_s))
            for batch in consumer.batches():
                self.group.batch(batch.partition, batch.offset, batch.values)

    def _close_when(self, consumer: Consumer[Any], wait: Callable[[], object]) -> None:
        threading.Thread(target=lambda: (wait(), consumer.close()), daemon=True).start()

    def _sample(self) -> None:
        """Looks at what the group has committed, all the time."""

        async def look() -> None:
            session = await Session.open(
                self._own_zookeeper, connect_timeout_s=None, security=client_security(security_config(None))
            )
            try:
                while not self._seen_enough.is_set():
                    for index in range(PARTITIONS):
                        with contextlib.suppress(MetamqError):
                            tp = TopicPartition(self.topic, f"0-{index}")
                            found = await read_offset(session, self.topic, tp)
                            if found is not None and found[0].committed is not None:
                                self.group.committed(tp.partition, found[0].committed.offset)
                    await asyncio.sleep(SAMPLE_S)
            finally:
                await session.close()

        asyncio.run(look())

    def missed(self, logs: Mapping[str, Sequence[bytes]]) -> list[str]:
        """What of the logs the readers and the group were not given."""
        return self.strict.missed(logs) or self.other.missed(logs) or self.group.missed(logs)

    def figures(self) -> str:
        """What there was of it."""
        return (
            f"{self.topic}: {self.all_acknowledged:,} acknowledged, {self.strict.count:,} read, "
            f"{self.group.count:,} handled by the group, {self.group.again:,} of them again, "
            f"{self.group.commits:,} commits seen, a reader told of losses {self.strict.losses_told} times"
        )
