"""Three replicas under load, and whatever may happen to machines, networks and ZooKeeper, at random.

METAMQ_SEED repeats a run's choices, not its timing.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from metamq.security.certificates import Authority
from metamq.security.config import ADMIN, BROKERS
from tests.broker.ha.chaos import FAR_BEHIND_BYTES, LOST, REPLICAS, Chaos, NetworkedGroup, advertised, networked_group
from tests.broker.ha.chaos_load import PARTITIONS, Load
from tests.broker.ha.chaos_storage import Flipped
from tests.broker.ha.chaos_transactions import COMMITTED, ROLLED_BACK, UNKNOWN, Transactions
from tests.broker.ha.history import Given, History, faults
from tests.broker.ha.test_replication import SESSION_MS
from tests.parts import SLOW_S, wait_until
from tests.security.certificate_folder import in_days, make_folder, secured

Report = Callable[[str], None]
Logs = dict[str, list[bytes]]
TOPIC = "chaos"
ASYNC = "chaos-async"
TRANSACTIONS = "chaos-transactions"
ENOUGH = 1000


class Round(NamedTuple):
    """A while in which losses are accepted, then one without; both with everything else that happens."""

    losses_s: float
    without_s: float


class Outcome(NamedTuple):
    """What a run was."""

    chaos: Chaos
    losses: int


def survive(
    group: NetworkedGroup,
    report: Report,
    rounds: Sequence[Round],
    *,
    is_auto: bool = False,
    served_within_s: float = math.inf,
) -> Outcome:
    """Chaos. After each round all is mended, read up to there, and looked at."""
    seed = int(os.environ.get("METAMQ_SEED", random.randrange(1 << 32)))
    report(f"METAMQ_SEED={seed}")
    chaos = Chaos(group, seed, is_auto=is_auto)
    losses_are_accepted = any(one.losses_s for one in rounds)
    loads = begin(group, seed, losses=losses_are_accepted)
    transactions: Transactions | None = None
    chaos.storage.zookeeper_goes_back += [load.group.zookeeper_goes_back for load in loads]
    logs: dict[str, Logs] = {}
    try:
        with contextlib.ExitStack() as stopping:  # all of them, also when one fails
            for load in loads:
                stopping.callback(load.stop)
            if not losses_are_accepted:  # a loss takes transactions back, too
                transactions = Transactions(TRANSACTIONS, PARTITIONS, group.zookeeper, seed)
                stopping.callback(transactions.stop)
            for number, one in enumerate(rounds):
                served_s = go_through(chaos, loads, one)
                report(f"after the last fault all partitions were served in {served_s:.1f} s")
                assert served_s <= served_within_s, "the partitions were served too late"
                for load in loads:
                    if number == len(rounds) - 1:
                        load.stop_sending()
                    logs[load.topic] = all_is_well(group, load)
    finally:
        report(", ".join(f"{count} x {what}" for what, count in sorted((chaos.done + chaos.seen).items())))
        for load in loads:
            report(load.figures())
    losses = group.state().generation - 1 - chaos.storage.accepted
    report(f"{chaos.done.total()} faults, {losses} losses accepted")
    for load in loads:
        assert load.found(logs[load.topic]) == []
        assert load.all_acknowledged > ENOUGH
    if transactions is not None:
        report(transactions.figures())
        assert wrong_transactions(group, transactions) == []
        assert all(transactions.decided[outcome] for outcome in (COMMITTED, ROLLED_BACK)), "both decisions"
        assert list(transactions.outcomes.values()).count(COMMITTED) > transactions.decided[COMMITTED], (
            "local ones, too"
        )
    assert chaos.storage.lost_topics() == []
    group.wait_equal(*range(REPLICAS))
    return Outcome(chaos, losses)


def wrong_transactions(group: NetworkedGroup, transactions: Transactions) -> list[str]:
    """What is wrong when all of them have ended: one whose client got no answer may end a little later."""

    def wrong() -> list[str]:
        logs = logs_of(group, TRANSACTIONS)
        return transactions.faults(value for values in logs.values() for value in values)

    with contextlib.suppress(AssertionError):
        wait_until(lambda: not wrong())
    return wrong()[:10]


def go_through(chaos: Chaos, loads: Sequence[Load], one: Round) -> float:
    """One round. A round with losses has one at least, one without has everything else.

    Returns the seconds from the end of the last fault until messages were acknowledged in all partitions.
    """
    if one.losses_s:
        before = chaos.done[LOST]
        chaos.run(one.losses_s, accept_loss=True, is_enough=lambda: chaos.done[LOST] > before)
        chaos.healed()
    generation = chaos.group.state().generation - chaos.storage.accepted
    for load in loads:
        load.begin_period()
    chaos.run(one.without_s, is_enough=lambda: one.losses_s or not chaos.missing)
    ended = time.monotonic()
    for load in loads:
        load.served = {}
    chaos.healed()
    assert chaos.group.state().generation - chaos.storage.accepted == generation, "a loss that nobody accepted"
    wait_until(lambda: all(len(load.served) == PARTITIONS for load in loads), what="acknowledgements everywhere")
    return max(at for load in loads for at in load.served.values()) - ended


def begin(group: NetworkedGroup, seed: int, *, losses: bool) -> list[Load]:
    """One load, or where losses are accepted two smaller ones, that of a topic with `async` as well."""
    small = {"losses": True, "members": 2} if losses else {}
    group.cluster.create_topic(TOPIC, partitions=PARTITIONS, replication="sync")
    if losses:
        group.cluster.create_topic(ASYNC, partitions=PARTITIONS)
    else:
        group.cluster.create_topic(TRANSACTIONS, partitions=PARTITIONS, replication="sync")
    group.wait_insync(*range(REPLICAS))
    where = group.zookeeper, group.cluster.zookeeper, seed
    loads = [Load(TOPIC, *where, **small)]
    return [*loads, Load(ASYNC, *where, is_sync=False, producers=2, **small)] if losses else loads


def all_is_well(group: NetworkedGroup, load: Load) -> Logs:
    """What is acknowledged by now is there, and everybody is given what is there. Producers may go on."""
    acknowledged = load.acknowledged()
    logs = logs_of(group, load.topic)
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not load.missed(logs), limit_s=120)
    assert load.missed(logs)[:10] == []
    assert faults(History(acknowledged), logs) == []
    return logs


def logs_of(group: NetworkedGroup, topic: str) -> Logs:
    """What is there by now. All replicas are in sync."""
    every_end = [group.ends(number) for number in range(REPLICAS)]
    upto = {f"0-{n}": max(ends[topic, n][0] for ends in every_end) for n in range(PARTITIONS)}
    logs: Logs = defaultdict(list, {partition: [] for partition in upto})
    with group.cluster.consumer(topics=[topic], idle_timeout_s=60) as consumer:
        for batch in consumer.batches():
            assert batch.offset == len(logs[batch.partition])
            logs[batch.partition] += batch.values
            if all(len(logs[partition]) >= end for partition, end in upto.items()):
                break
    assert {partition: end for partition, end in upto.items() if len(logs[partition]) < end} == {}, "which was not read"
    return logs


@contextlib.contextmanager
def a_group(folder: Path, **settings: Any) -> Iterator[NetworkedGroup]:
    with networked_group(folder, far_behind_bytes=FAR_BEHIND_BYTES, with_disk=True, **settings) as group:
        yield group


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_nothing_acknowledged_is_lost_or_doubled_and_nothing_seen_is_taken_back(
    tmp_path: Path, report_figures: Report
) -> None:
    with a_group(tmp_path) as group:
        chaos, losses = survive(group, report_figures, [Round(0, float(os.environ.get("METAMQ_CHAOS_S", "60")))])
        assert chaos.missing == set(), "which did not happen"
        assert losses == 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_with_accepted_losses_nothing_is_doubled_and_readers_miss_nothing_of_what_stayed(
    tmp_path: Path, report_figures: Report
) -> None:
    """What was acknowledged after the last of them is there; who saw what was lost is told."""
    with a_group(tmp_path) as group:
        chaos, losses = survive(group, report_figures, [Round(10, 10)])
        assert losses >= chaos.done[LOST] > 0


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "seconds", [pytest.param(120, marks=pytest.mark.slow), pytest.param(1800, marks=pytest.mark.long)]
)
def test_nobody_promotes_and_nothing_is_lost(tmp_path: Path, report_figures: Report, seconds: float) -> None:
    # The short run shares its machine with other tests, which take time of their own.
    limit_s = SESSION_MS / 1000 + 1 if seconds == 1800 else 5 * SESSION_MS / 1000
    with a_group(tmp_path, failover="auto", failover_pause_max_ms=0) as group:
        chaos, losses = survive(group, report_figures, [Round(0, seconds)], is_auto=True, served_within_s=limit_s)
        assert seconds < 1800 or chaos.done.total() >= 300
        assert chaos.missing == set(), "which did not happen"
        assert losses == 0


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_with_security_nothing_is_lost(tmp_path: Path, report_figures: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    """Brokers, ZooKeeper and clients speak TLS. Meanwhile the certificates are renewed, and expire once."""
    hosts = ["localhost", "127.0.0.1", "127.0.0.9", *map(advertised, range(REPLICAS))]
    authority = make_folder(tmp_path / "security", hosts)
    monkeypatch.setenv("METAMQ_SECURITY_DIR", str(authority.folder))  # for the clients of the load
    monkeypatch.setenv("METAMQ_SECURITY_ROLE", ADMIN)
    stop = threading.Event()
    renewing = threading.Thread(target=renew, args=(authority, hosts, stop))
    with a_group(tmp_path, failover="auto", failover_pause_max_ms=0, security=secured(authority.folder)) as group:
        renewing.start()
        try:
            chaos, losses = survive(group, report_figures, [Round(0, 60)], is_auto=True)
        finally:
            stop.set()
            renewing.join()
        assert chaos.missing == set(), "which did not happen"
        assert losses == 0


def renew(authority: Authority, hosts: Sequence[str], stop: threading.Event) -> None:
    """Issues certificates that are valid for 12 s: every 8 s, and once only after 16 s."""
    for number in itertools.count():
        for name, its_hosts in ((BROKERS, hosts), (ADMIN, ())):
            authority.issue(name, its_hosts, days=1, now=in_days(-1) + timedelta(seconds=12))
        if stop.wait(16 if number == 3 else 8):
            break
    for name, its_hosts in ((BROKERS, hosts), (ADMIN, ())):
        authority.issue(name, its_hosts)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_nobody_promotes_and_an_ensemble_has_its_own_faults(tmp_path: Path, report_figures: Report) -> None:
    with a_group(tmp_path, failover="auto", failover_pause_max_ms=0, with_ensemble=True) as group:
        chaos, losses = survive(group, report_figures, [Round(0, 45)], is_auto=True)
        assert chaos.missing == set(), "which did not happen"
        assert losses == 0


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_for_ten_minutes(tmp_path: Path, report_figures: Report) -> None:
    with a_group(tmp_path) as group:
        chaos, losses = survive(group, report_figures, [Round(0, 600)])
        assert chaos.missing == set(), "which did not happen"
        assert losses == 0


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_for_five_minutes_with_accepted_losses(tmp_path: Path, report_figures: Report) -> None:
    with a_group(tmp_path) as group:
        chaos, losses = survive(group, report_figures, [Round(30, 30)] * 5)
        assert losses >= chaos.done[LOST] >= 5


def test_the_check_bites() -> None:
    history = History({b"1-0": ("0-0", 0), b"1-1": ("0-0", 1)}, [(("0-0", 0), b"1-0")])
    assert faults(history, {"0-0": [b"1-0", b"1-1"]}) == []
    assert "was acknowledged" in faults(history, {"0-0": [b"1-0"]})[0]
    assert "is there 2 times" in faults(history, {"0-0": [b"1-0", b"1-1", b"1-1"]})[0]
    assert "not in the order" in faults(History(), {"0-0": [b"1-1", b"1-0"]})[0]
    assert "a reader saw" in faults(History(seen=[(("0-0", 0), b"1-9")]), {"0-0": [b"1-0"]})[0]


def test_the_check_of_transactions_bites() -> None:
    transactions = Transactions.__new__(Transactions)
    transactions.outcomes = {b"tx0-0": COMMITTED, b"tx0-1": ROLLED_BACK, b"tx0-2": UNKNOWN}
    transactions.lost, transactions._partitions = [], ["0-0", "0-1"]
    assert transactions.faults([b"tx0-0"] * 2) == transactions.faults([b"tx0-0", b"tx0-2"] * 2) == []
    assert "was committed, and is not there" in transactions.faults([])[0]
    assert "is there 1 times" in transactions.faults([b"tx0-0"])[0]
    assert "was rolled back, and is there" in transactions.faults([b"tx0-0", b"tx0-1"] * 2)[0]
    assert "was not sent" in transactions.faults([b"tx0-0", b"other"] * 2)[0]


def test_the_check_of_consumers_bites() -> None:
    given = Given("g")
    given.batch("0-0", 0, [b"a", b"b"])
    given.batch("0-0", 1, [b"b", b"c"])
    given.committed("0-0", 3)
    assert (given.faults, given.again, given.commits, given.count) == ([], 1, 1, 3)
    assert given.missed({"0-0": [b"a", b"b", b"c"]}) == []
    assert given.missed({"0-0": [b"a", b"b", b"d"]}) == ["g was not given b'd' at 0-0/2, but b'c'"]
    given.batch("0-0", 4, [b"e"])
    given.committed("0-0", 2)
    given.committed("0-0", 6)
    assert ["nothing from 3 on" in given.faults[0], "back to 2" in given.faults[1], "up to 5" in given.faults[2]] == [
        True, True, True,
    ]  # fmt: skip


def test_a_wrong_byte_is_waited_for_until_it_is_gone(tmp_path: Path) -> None:
    log, copy, other = tmp_path / "log", tmp_path / "copy", tmp_path / "other"
    for path in (log, copy, other):
        path.write_bytes(b"abcd")
    log.write_bytes(b"abXd")
    flipped = Flipped(log, (copy,), log.stat().st_ino, 2, ord("X"))
    assert not flipped.is_mended
    log.write_bytes(b"ab")  # cut as a torn tail
    assert flipped.is_mended
    log.write_bytes(b"abcde")  # and written again
    assert flipped.is_mended
    log.write_bytes(b"abXde")
    assert not flipped.is_mended
    copy.write_bytes(b"abXde")  # it went on with other messages, and the byte is right
    assert flipped.is_mended
    copy.unlink()
    assert not flipped.is_mended
    other.write_bytes(b"abXd")
    other.replace(log)
    assert flipped.is_mended


def test_what_cannot_be_done_holds_up_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    class DoneThrice(Exception): ...

    class Some(Chaos):
        def _actions(self) -> dict[str, Callable[[], None]]:
            return {"done": self.do, "never": lambda: None}

        def do(self) -> None:
            self.done["done"] += 1
            if self.done["done"] == 3:
                raise DoneThrice

        def mend(self) -> None: ...

    monkeypatch.setattr("tests.broker.ha.chaos.PAUSE_S", (0, 0))
    with pytest.raises(DoneThrice):
        Some(NetworkedGroup.__new__(NetworkedGroup), 1).run(SLOW_S)
