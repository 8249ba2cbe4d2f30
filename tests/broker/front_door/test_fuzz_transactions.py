"""Mutated requests about branches: the broker goes on, shows nothing that was not sent, and nothing in part."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from metamq.tx import XAResource
from metamq.wire.commands import Branches, Command, PutEntry, Tx
from metamq.wire.frames import encode_frame
from metamq.wire.xa import Verb
from tests.broker.front_door.conftest import Front, many_files
from tests.broker.front_door.test_fuzz import GREETING, MEMORY_BYTES, mutants, send_and_hang_up
from tests.one_zookeeper import cluster
from tests.parts import statistics

pytestmark = pytest.mark.timeout(600)  # thousands of connections
MUTATIONS = 1500
VALUES = [b"alpha", b"beta" * 50, b""]


@pytest.fixture
def alone() -> Iterator[Front]:
    """A broker of its own, which soon looks after what was left."""
    with many_files(4096), cluster(branch_grace_ms=100) as made:
        front = Front(made)
        yield front
        front.patient.close()
        front.rude.close()


def requests(front: Front, chance: random.Random) -> list[bytes]:
    """One request of each kind, about a branch that is new."""
    topic_id = front.topic("fuzz", 2)
    batch = front.batch(VALUES)
    xid = [7, chance.randbytes(8), b"q"]
    entries = [[*PutEntry("fuzz", topic_id, index, len(batch))] for index in range(2)]
    work = [Verb.START, Verb.SEND, Verb.END]

    def tx(*verbs: Verb, sends: bool = False, follows: list[int] | None = None, followers: list[int] | None = None):  # type: ignore[no-untyped-def]
        return Tx(xid, 0, "s", [*map(int, verbs)], 500, -1, 0, entries if sends else [], follows or [], followers or [])

    frames = [
        (Command.TX, tx(*work, Verb.COMMIT_ONE_PHASE, sends=True), [batch, batch]),
        (Command.TX, tx(*work, Verb.PREPARE, sends=True, follows=[0, 0, 7]), [batch, batch]),
        (Command.TX, tx(*work, sends=True), [batch, batch]),
        (Command.TX, tx(Verb.DECIDE, followers=[0, 7, 1, 9]), None),
        (Command.TX, tx(chance.choice(list(Verb))), None),
        (Command.TX, tx(Verb.PREPARE, Verb.COMMIT), None),
        (Command.BRANCHES, Branches(0, True), None),
    ]
    return [
        b"".join(encode_frame(1, command, 0, n, header, bodies)) for n, (command, header, bodies) in enumerate(frames)
    ]


@pytest.mark.slow
def test_mutated_requests_about_branches(alone: Front) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    pid = alone.cluster.broker.pid
    send_and_hang_up(alone, GREETING + b"".join(requests(alone, chance)))
    before = alone.rss()
    said: Counter[str] = Counter()
    for number in range(MUTATIONS):
        valid = requests(alone, chance)
        sent = b"" if chance.random() < 0.5 else chance.choice(valid[:3])
        said += send_and_hang_up(alone, GREETING + sent + mutants(valid, chance))
        if number % 200 == 0:
            alone.still_serves()
    print(dict(said))
    assert (
        min(said[f"{int(n)} {kind}"] for n in (Command.TX, Command.BRANCHES) for kind in ("OK", "ProtocolError")) > 20
    )
    assert alone.cluster.broker.pid == pid
    grown = alone.rss() - before
    assert grown < MEMORY_BYTES, f"it grew by {grown:,} bytes, seed {seed}"
    whole_after_a_restart(alone)


def whole_after_a_restart(front: Front) -> None:
    """What was committed is there with both its batches, before a kill and after; so is what is prepared."""
    found = stored(front)
    assert sum(found.values()) > 0
    assert sum(found.values()) % (2 * len(VALUES)) == 0
    front.cluster.broker.kill()
    front.cluster.broker.start()
    again = stored(front)  # what was on its way when its client had gone may have been committed since
    assert again.keys() == found.keys()
    assert all(again[partition] >= found[partition] for partition in found)
    # A mutant may name one partition for both batches: they need not be equal, but no transaction is there in part.
    assert sum(again.values()) % (2 * len(VALUES)) == 0
    with XAResource(0, front.cluster.zookeeper) as resource:
        for branch in resource.recover():
            assert branch.messages in (len(VALUES), 2 * len(VALUES))


def stored(front: Front) -> dict[str, int]:
    partitions = statistics(front.cluster.broker)["partitions"]
    return {str(p["partition"]): p["end_offset"] for p in partitions if p["topic"] == "fuzz"}
