"""Producers that send to broker 0 of the composition while something happens to it, and the check of what is stored."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

from metamq import Consumer
from tests.containers.conftest import Composition
from tests.load import Load, blocking, check
from tests.parts import Stored, read_to_end, wait_until

BROKER_ID = 0
ENOUGH = 2000
"""Messages sent before and after what happens to the broker."""


class UnderLoad:
    """A topic of broker 0, with `sync`, and producers that have sent enough to it.

    On leaving the block: nothing that was acknowledged is lost, nothing is doubled, and all are in sync again.
    """

    def __init__(self, composition: Composition, topic: str) -> None:
        self._composition = composition
        self._topic = topic
        self._loads: list[Load] = []
        self.admin = composition.admin()
        self.master = self.slave = ""
        """The services that play these roles at the beginning."""

    def __enter__(self) -> UnderLoad:
        try:
            self._composition.wait_in_sync(self.admin, BROKER_ID)
            roles = self._composition.roles(self.admin, BROKER_ID)
            self.master, self.slave = roles["master"], roles["slave"]
            self.admin.create_topic(self._topic, partitions=3, brokers=[BROKER_ID], replication="sync")
            for keyed in (True, False):
                where = self._composition
                producer = blocking(where.zookeeper, keyed=keyed, topic=self._topic, security=where.security)
                self._loads.append(Load(len(self._loads), 0, producer))
            self.wait_for_more()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for load in self._loads:
            load.ending.set()
        try:
            if kind is None:
                self._check()
        finally:
            self._end()

    def wait_for_more(self) -> None:
        """Returns once each producer was told of many more messages."""
        for load in self._loads:
            wanted = len(load.told.acknowledged) + ENOUGH
            wait_until(partial(_has_told, load, wanted), 120, "acknowledgements")

    def _check(self) -> None:
        told = [load.join() for load in self._loads]
        assert [one.failed for one in told] == [{}, {}]
        check(told, self._read_all())
        self._composition.wait_in_sync(self.admin, BROKER_ID)

    def _read_all(self) -> dict[str, list[Stored]]:
        """All that is in the topic, by partition."""
        stored: dict[str, list[Stored]] = defaultdict(list)
        zookeeper, security = self._composition.zookeeper, self._composition.security
        with Consumer[bytes](
            zookeeper, topics=[self._topic], start="earliest", idle_timeout_s=2, security=security
        ) as consumer:
            for message in read_to_end(consumer):
                stored[message.partition].append(Stored(message.offset, message.key, message.value))
        return stored

    def _end(self) -> None:
        for load in self._loads:
            load.ending.set()
        self.admin.close()


def _has_told(load: Load, wanted: int) -> bool:
    return bool(load.problem) or len(load.told.acknowledged) >= wanted
