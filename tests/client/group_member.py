"""Members of a group, as a process to be killed, frozen and thawed. Each tells all it does, line by line, in a file.

    python group_member.py ZOOKEEPER TOPIC GROUP NAME,NAME,... FOLDER DATABASE SESSION_TIMEOUT_MS

Several members are threads of the process, and share a session of ZooKeeper. A line is written before what it tells of
is done: ["handle", partition, generation, offset, time]; before a commit ["commit", partition, generation, next offset,
"unknown"], and after it the same with "ok", "lost" or "unknown". When the process has stood still, for whatever reason:
["stall", begin, end].
DATABASE "" keeps the offsets in ZooKeeper.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import sys
import threading
import time
from typing import Any

from metamq import Consumer, DatabaseOffsets, Message
from metamq.errors import ConnectError, MetamqError, OwnershipLost

HANDLER_S_MAX = 0.004
TICK_S = 0.05
STALL_S = 0.2
COMMIT_CHANCE = 0.1


class Member:
    """One member. It ends when `stop` is set."""

    def __init__(self, name: str, folder: str, stop: threading.Event) -> None:
        self.name = name
        self.stop = stop
        self.told = os.open(os.path.join(folder, f"{name}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.last: dict[str, tuple[Message[bytes], int]] = {}
        threading.Thread(target=self.tell_stalls, daemon=True).start()

    def tell(self, *what: Any) -> None:
        os.write(self.told, json.dumps(what).encode() + b"\n")

    def tell_stalls(self) -> None:
        before = time.monotonic()
        while True:
            time.sleep(TICK_S)
            now = time.monotonic()
            if now - before > STALL_S:
                self.tell("stall", before, now)
            before = now

    def joined(self, servers: str, topic: str, group: str, database: str, timeout_ms: str) -> Consumer[bytes]:
        while True:
            try:
                return Consumer(
                    servers,
                    topics=topic,
                    group=group,
                    consumer_id=self.name,
                    auto_commit=False,
                    offsets=DatabaseOffsets(lambda: sqlite3.connect(database, timeout=100)) if database else None,
                    session_timeout_ms=int(timeout_ms),
                    strategy="sticky",
                    idle_timeout_s=0.2,
                )
            except ConnectError:  # so short a session may end before it has joined
                continue

    def commit(self, consumer: Consumer[bytes]) -> None:
        for partition, (message, generation) in self.last.items():
            outcome = "ok"
            self.tell("commit", partition, generation, message.offset + 1, "unknown")
            try:
                consumer.commit(message)
            except OwnershipLost:
                outcome = "lost"
            except MetamqError:
                outcome = "unknown"
            self.tell("commit", partition, generation, message.offset + 1, outcome)
        self.last.clear()

    def run(self, consumer: Consumer[bytes]) -> None:
        with consumer:
            while not self.stop.is_set():
                for message in consumer:
                    assert consumer._in_flight is not None
                    assert consumer._in_flight.state.claim is not None
                    generation = consumer._in_flight.state.claim.generation
                    self.tell("handle", message.partition, generation, message.offset, time.monotonic())
                    time.sleep(random.random() * HANDLER_S_MAX)
                    self.last[message.partition] = message, generation
                    if random.random() < COMMIT_CHANCE:
                        self.commit(consumer)
                    if self.stop.is_set():
                        break
                self.commit(consumer)


def main(servers: str, topic: str, group: str, names: str, folder: str, database: str, timeout_ms: str) -> None:
    stop = threading.Event()
    members = [Member(name, folder, stop) for name in names.split(",")]
    signal.signal(signal.SIGTERM, (lambda *_: sys.exit(0)) if len(members) == 1 else (lambda *_: stop.set()))
    joined = [(member, member.joined(servers, topic, group, database, timeout_ms)) for member in members]
    print("joined", flush=True)
    first, *others = joined
    threads = [threading.Thread(target=member.run, args=(consumer,)) for member, consumer in others]
    for thread in threads:
        thread.start()
    first[0].run(first[1])
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
