"""One member of a group, as a process to be killed, frozen and thawed. Tells all it does, line by line, in a file.

    python group_member.py ZOOKEEPER TOPIC GROUP NAME FILE DATABASE SESSION_TIMEOUT_MS

A line is written before what it tells of is done: ["handle", partition, generation, offset, time]; before a commit
["commit", partition, generation, next offset, "unknown"], and after it the same with "ok", "lost" or "unknown". When
the process has stood still, for whatever reason: ["stall", begin, end].
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


def main(servers: str, topic: str, group: str, name: str, file: str, database: str, session_timeout_ms: str) -> None:
    told = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell(*what: Any) -> None:
        os.write(told, json.dumps(what).encode() + b"\n")

    def tell_stalls() -> None:
        before = time.monotonic()
        while True:
            time.sleep(TICK_S)
            now = time.monotonic()
            if now - before > STALL_S:
                tell("stall", before, now)
            before = now

    def joined() -> Consumer[bytes]:
        while True:
            try:
                return Consumer(
                    servers,
                    topics=topic,
                    group=group,
                    consumer_id=name,
                    auto_commit=False,
                    offsets=offsets,
                    session_timeout_ms=int(session_timeout_ms),
                    strategy="sticky",
                    idle_timeout_s=0.2,
                )
            except ConnectError:  # so short a session may end before it has joined
                continue

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    threading.Thread(target=tell_stalls, daemon=True).start()
    offsets = DatabaseOffsets(lambda: sqlite3.connect(database, timeout=100)) if database else None
    with joined() as consumer:
        print("joined", flush=True)
        last: dict[str, tuple[Message[bytes], int]] = {}

        def commit() -> None:
            for partition, (message, generation) in last.items():
                outcome = "ok"
                tell("commit", partition, generation, message.offset + 1, "unknown")
                try:
                    consumer.commit(message)
                except OwnershipLost:
                    outcome = "lost"
                except MetamqError:
                    outcome = "unknown"
                tell("commit", partition, generation, message.offset + 1, outcome)
            last.clear()

        while True:
            for message in consumer:
                assert consumer._in_flight is not None
                assert consumer._in_flight.state.claim is not None
                generation = consumer._in_flight.state.claim.generation
                tell("handle", message.partition, generation, message.offset, time.monotonic())
                time.sleep(random.random() * HANDLER_S_MAX)
                last[message.partition] = message, generation
                if random.random() < COMMIT_CHANCE:
                    commit()
            commit()


if __name__ == "__main__":
    main(*sys.argv[1:])
