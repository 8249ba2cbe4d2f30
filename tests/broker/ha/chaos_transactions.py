"""Transactions in the chaos tests: local ones, and ones in two phases whose decision falls while faults go on.

Every transaction sends one message to each partition. At the end each is whole or absent, as its client was told.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable

from metamq import Producer
from metamq.errors import BranchNotKnown, MetamqError

COMMITTED, ROLLED_BACK, UNKNOWN = "committed", "rolled back", "unknown"
LOCAL, TWO_PHASE = 2, 2
TIMEOUT_S = 20.0
PREPARED_S = 3.0
"""The longest time between the preparation of a transaction and its decision."""
END_S = 180.0
"""A decision must be carried out within this time, through all faults."""
PAUSE_S = (0.0, 0.2)


class Transactions:
    """Threads that commit and roll back, from the start until stop()."""

    def __init__(self, topic: str, partitions: int, zookeeper: str, seed: int) -> None:
        self.topic = topic
        self.outcomes: dict[bytes, str] = {}
        """What a client was told, by the value of the transaction's messages."""
        self.decided: Counter[str] = Counter()
        """How many in two phases ended so."""
        self.lost: list[str] = []
        """Prepared transactions that were not there any more."""
        self._partitions = [f"0-{number}" for number in range(partitions)]
        self._zookeeper = zookeeper
        self._enough = threading.Event()
        self._errors: list[BaseException] = []
        self._opened = threading.Semaphore(0)
        works = [self._send_local] * LOCAL + [self._send_in_two_phases] * TWO_PHASE
        self._threads = [self._start(work, number, random.Random(seed + number)) for number, work in enumerate(works)]
        for _ in works:
            assert self._opened.acquire(timeout=60), f"a producer does not start: {self._errors}"

    def _start(
        self, work: Callable[[Producer[bytes], bytes, random.Random], None], name: int, chance: random.Random
    ) -> threading.Thread:
        def run() -> None:
            try:
                with Producer(self._zookeeper, request_timeout_s=2, delivery_timeout_s=60) as producer:
                    self._opened.release()
                    number = 0
                    while not self._enough.wait(chance.uniform(*PAUSE_S)):
                        work(producer, b"tx%d-%d" % (name, number), chance)
                        number += 1
            except BaseException as error:
                self._errors.append(error)

        thread = threading.Thread(target=run, name=f"transactions {name}", daemon=True)
        thread.start()
        return thread

    def _send(self, producer: Producer[bytes], value: bytes) -> None:
        for partition in self._partitions:
            producer.send(self.topic, value, partition=partition)

    def _send_local(self, producer: Producer[bytes], value: bytes, _chance: random.Random) -> None:
        try:
            with producer.transaction(timeout_s=TIMEOUT_S):
                self._send(producer, value)
        except MetamqError as error:
            self.outcomes[value] = UNKNOWN if error.outcome == "unknown" else ROLLED_BACK
        else:
            self.outcomes[value] = COMMITTED

    def _send_in_two_phases(self, producer: Producer[bytes], value: bytes, chance: random.Random) -> None:
        xid = producer.xid(1, f"chaos-{value.decode()}", "mq")
        is_prepared = False
        with contextlib.suppress(MetamqError):
            producer.tpc_begin(xid, timeout_s=TIMEOUT_S)
            self._send(producer, value)
            is_prepared = producer.tpc_prepare()
        if is_prepared:
            self._enough.wait(chance.uniform(0, PREPARED_S))
        wants_commit = is_prepared and chance.random() < 0.7
        end = producer.tpc_commit if wants_commit else producer.tpc_rollback
        deadline = time.monotonic() + END_S
        while not self._has_ended(end, value):
            assert time.monotonic() < deadline, f"{value!r} does not end"
            time.sleep(0.2)
        self.outcomes[value] = COMMITTED if wants_commit else ROLLED_BACK
        self.decided[self.outcomes[value]] += 1

    def _has_ended(self, end: Callable[[], None], value: bytes) -> bool:
        """Returns True if the brokers have carried out the decision."""
        try:
            end()
        except BranchNotKnown as error:
            self.lost.append(f"{value!r} was prepared, and is not known: {error}")
        except MetamqError:
            return False
        return True

    def stop(self) -> None:
        """Ends the threads. Every transaction has its outcome then. Raises the first error of a thread."""
        self._enough.set()
        for thread in self._threads:
            thread.join(240)
            if thread.is_alive():
                self._errors.append(AssertionError(f"{thread.name} does not end"))
        if self._errors:
            raise self._errors[0]

    def faults(self, values: Iterable[bytes]) -> list[str]:
        """What is wrong, given all values in the topic."""
        found = Counter(values)
        whole = len(self._partitions)
        wrong = [f"{value!r} is there {count} times" for value, count in found.items() if count != whole]
        wrong += [f"{value!r} is there, and was not sent" for value in found if value not in self.outcomes]
        for value, outcome in self.outcomes.items():
            if outcome == COMMITTED and value not in found:
                wrong.append(f"{value!r} was committed, and is not there")
            if outcome == ROLLED_BACK and value in found:
                wrong.append(f"{value!r} was rolled back, and is there")
        return wrong + self.lost

    def figures(self) -> str:
        """How many there were, by outcome."""
        counts = Counter(self.outcomes.values())
        in_two_phases = " and ".join(f"{n:,} {what}" for what, n in self.decided.items())
        return (
            f"{self.topic}: {', '.join(f'{n:,} {what}' for what, n in counts.items())}; in two phases {in_two_phases}"
        )
