"""What is worked out from folders: the master, the in-sync set, topics. Pure, and on random histories."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from metamq.broker.data.data_folder import DataFolder, current_boot
from metamq.broker.data.folder_report import FolderReport, LogReport, inspect_folder
from metamq.broker.data.restore import EPOCHS_AHEAD, Choices, Restore, plan_restore
from metamq.broker.log.disk.epochs import Epoch
from metamq.errors import ConfigError
from metamq.zk.cluster.brokers import BrokerState, state_json
from metamq.zk.cluster.cluster_nodes import ClusterExport
from metamq.zk.cluster.topics import TopicConfig, from_json, to_json

ID = "0" * 16
NOTHING_CHOSEN = Choices({}, {}, frozenset())
SEED = int(os.environ.get("METAMQ_SEED", "0")) or random.SystemRandom().randrange(1 << 32)
Log = list[tuple[int, int]]
"""(epoch, a number of its own) of each message."""


def log_report(log: Log, index: int = 0, topic: str = "t", topic_id: str = ID, **changes: Any) -> LogReport:
    epochs = [Epoch(epoch, at, at * 64) for at, (epoch, _) in enumerate(log) if not at or log[at - 1][0] != epoch]
    return replace(LogReport(topic, topic_id, index, len(log), len(log) * 64, 0, tuple(epochs)), **changes)


def folder(replica: int, *logs: LogReport, **changes: Any) -> FolderReport:
    found = {log.place: log for log in logs}
    epoch = max((epoch.epoch for log in logs for epoch in log.epochs), default=0)
    report = FolderReport(f"{replica}", "host", "cluster", 0, replica, 1, 1, epoch, 0, "", {}, found)
    return replace(report, **changes)


def plan(*reports: FolderReport, export: ClusterExport | None = None, **choices: Any) -> Restore:
    return plan_restore(reports, export, replace(NOTHING_CHOSEN, **choices))


def state(restore: Restore) -> BrokerState:
    (broker,) = restore.brokers
    assert broker.state is not None, restore.questions
    return broker.state


class History:
    """A broker id whose replicas append, copy, leave the set, die and are promoted."""

    def __init__(self, rng: random.Random, replicas: int, partitions: int) -> None:
        self.rng = rng
        self.logs: list[list[Log]] = [[[] for _ in range(partitions)] for _ in range(replicas)]
        self.followed = [1] * replicas
        self.known = [1] * replicas
        self.reigned = [1] + [0] * (replicas - 1)
        self.epoch, self.master, self.generation = 1, 0, 1
        self.insync = {0}
        self.attached: set[int] = set()
        self.shown: list[Log] = [[] for _ in range(partitions)]
        """What was acknowledged on a sync topic: every member of the set had it."""
        self.numbers = iter(range(1 << 30))

    def step(self) -> None:
        moves = [self.append] * 6 + [self.copy] * 8 + [self.attach] * 3 + [self.leave, self.promote, self.restart]
        self.rng.choice([*moves, self.lose] if self.rng.random() < 0.1 else moves)()
        if self.insync - {self.master} <= self.attached:
            for index, shown in enumerate(self.shown):
                common = min(len(self.logs[member][index]) for member in self.insync)
                if common > len(shown):
                    self.shown[index] = self.logs[self.master][index][:common]

    def others(self) -> list[int]:
        return [one for one in range(len(self.logs)) if one != self.master]

    def append(self) -> None:
        self.rng.choice(self.logs[self.master]).append((self.epoch, next(self.numbers)))

    def attach(self) -> None:
        slave = self.rng.choice(self.others())
        for index, log in enumerate(self.logs[slave]):
            master = self.logs[self.master][index]
            same = 0
            while same < min(len(log), len(master)) and log[same] == master[same]:
                same += 1
            del log[same:]
        self.followed[slave], self.known[slave] = self.generation, self.epoch
        self.attached.add(slave)

    def copy(self) -> None:
        for slave in self.attached:
            index = self.rng.randrange(len(self.shown))
            have, master = self.logs[slave][index], self.logs[self.master][index]
            have += master[len(have) : len(have) + self.rng.randint(0, 4)]
            if all(len(log) >= len(shown) for log, shown in zip(self.logs[slave], self.shown, strict=True)):
                self.insync.add(slave)

    def leave(self) -> None:
        slave = self.rng.choice(self.others())
        self.insync.discard(slave)
        self.attached.discard(slave)

    def begin(self, master: int) -> None:
        self.epoch, self.master, self.attached = self.epoch + 1, master, set()
        self.known[master] = self.reigned[master] = self.epoch

    def restart(self) -> None:
        self.begin(self.master)

    def promote(self) -> None:
        slaves = sorted(self.insync - {self.master})
        if slaves:
            self.insync.discard(self.master)
            self.begin(self.rng.choice(slaves))

    def lose(self) -> None:
        """A promotion with an accepted loss: what the promoted one lacks was not acknowledged, after all."""
        self.begin(self.rng.choice(self.others()))
        self.insync = {self.master}
        self.generation += 1
        self.followed[self.master] = self.generation
        self.shown = [list(log) for log in self.logs[self.master]]

    def reports(self) -> list[FolderReport]:
        """Of some folders, with one at least of the in-sync set: the others are gone."""
        kept = self.rng.choice(sorted(self.insync))
        return [
            folder(
                replica,
                *(log_report(log, index) for index, log in enumerate(logs)),
                generation=self.followed[replica],
                epoch=self.known[replica],
                reign=self.known[replica] if self.reigned[replica] == self.known[replica] else 0,
            )
            for replica, logs in enumerate(self.logs)
            if replica == kept or self.rng.random() < 0.8
        ]


@pytest.mark.slow
def test_a_master_that_is_chosen_has_all_that_was_acknowledged_whatever_happened() -> None:
    print(f"METAMQ_SEED={SEED}")
    rng = random.Random(SEED)
    decided = 0
    for _ in range(3000):
        history = History(rng, rng.randint(2, 3), rng.randint(1, 3))
        for _ in range(rng.randint(1, 60)):
            history.step()
        (broker,) = plan(*history.reports()).brokers
        if broker.state is None:
            continue
        decided += 1
        assert broker.state.epoch > history.epoch
        assert broker.state.generation == history.generation
        chosen = history.logs[broker.state.master]
        for shown, log in zip(history.shown, chosen, strict=True):
            assert log[: len(shown)] == shown
        for replica, _incarnation in broker.state.insync:
            assert history.logs[replica] == chosen, "a member of the set may be promoted"
    assert decided > 1500


def test_equal_replicas_are_in_sync_and_the_epoch_is_far_above_all_that_are_known() -> None:
    log: Log = [(3, 0), (3, 1), (5, 2)]
    found = state(plan(folder(0, log_report(log)), folder(1, log_report(log), epoch=8, incarnation=4)))
    assert found == BrokerState(8 + EPOCHS_AHEAD, 0, ((0, 1), (1, 4)), 1)


def test_where_each_lacks_something_a_person_chooses_and_the_generation_is_raised() -> None:
    one = folder(0, log_report([(1, 0)] * 5), log_report([(1, 0)] * 9, 1))
    other = folder(1, log_report([(1, 0)] * 5 + [(2, 1)] * 2), log_report([(1, 0)] * 8, 1))
    asked = plan(one, other)
    assert asked.brokers[0].state is None
    (question,) = asked.questions
    assert "replica 0 lacks 2 messages of t; replica 1 lacks 1 message of t" in question
    assert "--master 0=REPLICA" in question
    chosen = plan(one, other, masters={0: 1})
    assert state(chosen) == BrokerState(2 + EPOCHS_AHEAD, 1, ((1, 1),), 2)
    assert "LOST with replica 1 of broker 0 as the master: 1 message of t." in chosen.notes


def test_the_tail_of_a_deposed_master_does_not_count() -> None:
    former = folder(0, log_report([(1, n) for n in range(100)]))
    present = folder(1, log_report([(1, n) for n in range(90)] + [(2, 1000)]))
    found = plan(former, present)
    assert state(found).master == 1
    assert found.brokers[0].replicas[0].lacks == {"t": 1}


def test_a_replica_of_an_older_generation_is_on_the_side_that_was_given_up() -> None:
    found = state(plan(folder(0, log_report([(1, 0)] * 9)), folder(1, log_report([(1, 0)] * 5), generation=2)))
    assert (found.master, found.insync, found.generation) == (1, ((1, 1),), 2)


def test_a_folder_that_comes_back_as_somebody_else_is_in_no_others_set() -> None:
    log = log_report([(1, 0)] * 5)
    copied = folder(0, log, becomes_new="it is a copy")
    assert state(plan(copied, folder(1, log))).insync == ((1, 1),)
    assert state(plan(copied, folder(1, log, becomes_new="it is a copy"))).insync == ((0, 1),)


def test_a_damaged_log_is_less_than_an_empty_one() -> None:
    broken = log_report([], problem="torn")
    assert state(plan(folder(0, broken), folder(1, log_report([])))).master == 1
    assert state(plan(folder(0, broken), folder(1, broken))).master == 0


@pytest.mark.parametrize("is_started_again", [False, True])
def test_a_master_whose_host_went_down_may_lack_what_its_slave_has(tmp_path: Path, is_started_again: bool) -> None:
    former = DataFolder.open(tmp_path, 0, boot_id="the boot before")
    former.join_cluster("cluster")
    former.know_epoch(2, 5)
    former.close(clean=False)
    if is_started_again:
        again = DataFolder.open(tmp_path, 0)
        again.know_epoch(2, 6)
        again.close(clean=False)
    logs = log_report([(1, 0)] * 5), log_report([(1, 0)] * 9, 1)
    master = replace(inspect_folder(tmp_path), generation=1, logs={log.place: log for log in logs})
    assert (master.epoch, bool(master.becomes_new)) == (2, not is_started_again)
    slave = folder(1, log_report([(1, 0)] * 7), log_report([(1, 0)] * 8, 1), epoch=2)
    asked = plan(master, slave)
    assert asked.brokers[0].state is None
    assert "replica 0 lacks 2 messages of t; replica 1 lacks 1 message of t" in asked.questions[0]
    assert state(plan(master, slave, masters={0: 0})).generation == 2, "its slave may cut what was shown"


def test_a_master_that_was_killed_has_everything(tmp_path: Path) -> None:
    former = DataFolder.open(tmp_path, 0)
    former.join_cluster("cluster")
    former.know_epoch(2, 5)
    former.know_epoch(2, 6)
    former.close(clean=False)
    report = inspect_folder(tmp_path)
    assert report.reign == (2 if current_boot() else 0)


def exported(at_ms: int, *configs: TopicConfig, epoch: int = 1, cluster_id: str = "cluster") -> ClusterExport:
    nodes = {f"/config/topics/{config.topic}": to_json(config) for config in configs}
    nodes["/brokers/ids/0/state"] = state_json(BrokerState(epoch, 1, ((1, 1),), 1))
    return ClusterExport(cluster_id, "/meta", at_ms, nodes)


def known(config: TopicConfig, since_ms: int) -> dict[str, Any]:
    return {"settings": {f"{config.topic}@{config.id}": (config, since_ms)}}


OLD = TopicConfig("t", {0: 1}, ID, retention_ms=1)
NEW = TopicConfig("t", {0: 2}, ID, retention_ms=2)


@pytest.mark.parametrize(
    ("of_folder", "of_export", "wanted", "source"),
    [
        ((NEW, 20), (OLD, 10), NEW, "folder"),
        ((OLD, 10), (NEW, 20), NEW, "export"),
        (None, (NEW, 20), NEW, "export"),
        ((NEW, 20), None, NEW, "folder"),
    ],
)
def test_the_newer_settings_win(
    of_folder: tuple[TopicConfig, int] | None,
    of_export: tuple[TopicConfig, int] | None,
    wanted: TopicConfig,
    source: str,
) -> None:
    settings = known(*of_folder) if of_folder is not None else {}
    export = exported(of_export[1], of_export[0]) if of_export is not None else None
    found = plan(folder(0, log_report([]), **settings), export=export)
    assert (found.topics, found.settings_from) == ({"t": wanted}, {"t": source})
    assert from_json("t", found.nodes["/config/topics/t"]) == wanted


def test_settings_that_nobody_knows_are_told_and_partitions_are_those_of_the_folders() -> None:
    found = plan(folder(0, log_report([]), log_report([], 4)))
    assert found.topics == {"t": TopicConfig("t", {0: 5}, ID)}
    assert any(note.startswith("The settings of t are unknown.") for note in found.notes)


def test_an_export_that_is_older_than_the_folders_does_not_take_epochs_back() -> None:
    log = log_report([(40, 0)])
    assert state(plan(folder(0, log), export=exported(1, epoch=7))).epoch == 40 + EPOCHS_AHEAD
    assert state(plan(folder(0, log), export=exported(1, epoch=70))).epoch == 70 + EPOCHS_AHEAD


def test_of_a_topic_that_was_made_anew_the_later_one_counts_or_a_person_chooses() -> None:
    later = replace(OLD, id="1" * 16)
    logs = log_report([(1, 0)] * 3), log_report([], topic_id=later.id)
    both = known(OLD, 10)["settings"] | known(later, 20)["settings"]
    found = plan(folder(0, *logs, settings=both))
    assert found.topics == {"t": later}
    assert any("The data of 0000000000000000, up to 3 messages, is REMOVED" in note for note in found.notes)
    asked = plan(folder(0, *logs, **known(later, 20)))
    assert "--topic t@ID" in asked.questions[0]
    assert plan(folder(0, *logs), topics={"t": ID}).topics["t"].id == ID
    with pytest.raises(ConfigError, match="has no id nope"):
        plan(folder(0, *logs), topics={"t": "nope"})


def test_what_is_not_of_one_cluster_or_twice_the_same_replica_is_refused() -> None:
    with pytest.raises(ConfigError, match="of 2 clusters: another: 1 on host; cluster: 0 on host"):
        plan(folder(0), folder(1, cluster_id="another"))
    with pytest.raises(ConfigError, match="of 2 clusters: another: the export"):
        plan(folder(0), export=exported(1, cluster_id="another"))
    with pytest.raises(ConfigError, match="two folders are replica 0 of broker 0"):
        plan(folder(0), folder(0, path="copy"))
    with pytest.raises(ConfigError, match="replica 2 of broker 0 has no folder here"):
        plan(folder(0), masters={0: 2})
    with pytest.raises(ConfigError, match="broker 9, but none of its folders is given"):
        plan(folder(0), masters={9: 0})
    with pytest.raises(ConfigError, match="broker 0 is given up, but has a folder here"):
        plan(folder(0), without=frozenset({0}))
    with pytest.raises(ConfigError, match="broker 9 is given up with --without-broker, but neither the folders nor"):
        plan(folder(0), export=exported(1), without=frozenset({9}))


def test_offsets_of_what_is_not_restored_are_left_out_and_all_else_of_clients_is_kept() -> None:
    export = exported(1, OLD)
    of_clients = {
        "/consumers/g/offsets/t/0-0": b"kept",
        "/consumers/g/offsets/t/9-0": b"of a broker that is gone",
        "/consumers/g/offsets/gone/0-0": b"of a topic that is gone",
        "/consumers/g/plan": b"kept",
        "/spark/sink/1": b"kept",
    }
    export = replace(
        export, nodes={**export.nodes, **of_clients, "/brokers/ids/9/state": state_json(BrokerState(1, 0, (), 1))}
    )
    found = plan(folder(0, log_report([])), export=export, without=frozenset({9}))
    assert {path for path, data in found.nodes.items() if data == b"kept"} == {
        path for path, data in of_clients.items() if data == b"kept"
    }
    assert not any("gone" in path or "/9" in path for path in found.nodes)


def test_the_defaults_of_topics_are_those_of_the_export() -> None:
    export, path = exported(1), "/config/topic-defaults"
    export = replace(export, nodes={**export.nodes, path: b"sync"})
    assert plan(folder(1), export=export).nodes[path] == b"sync"
    assert path not in plan(folder(1)).nodes


def test_users_rules_and_quotas_are_those_of_the_export() -> None:
    names = ("users", "rights", "quotas", "owner-key", "delegations")
    export = exported(1)
    export = replace(export, nodes={**export.nodes, **{f"/security/{name}": name.encode() for name in names}})
    found = plan(folder(1), export=export)
    assert {path: data for path, data in found.nodes.items() if path.startswith("/security/")} == {
        f"/security/{name}": name.encode() for name in names[:-1]
    }
    assert any("metamq group owner" in note for note in found.notes)
    assert not any("metamq group owner" in note for note in plan(folder(1), export=exported(1)).notes)


def test_the_mode_of_failover_is_that_of_the_export() -> None:
    export, path = exported(1), "/brokers/ids/0/failover"
    export = replace(export, nodes={**export.nodes, path: b"auto", "/brokers/ids/9/failover": b"auto"})
    assert plan(folder(1), export=export).nodes[path] == b"auto"
    assert not any("failover" in one for one in plan(folder(1)).nodes)


def test_a_report_travels_as_json() -> None:
    report = folder(0, log_report([(1, 0), (2, 1)]), log_report([], 1, problem="torn"), **known(OLD, 10))
    assert FolderReport.from_json(json.dumps(report.to_json()), "it") == report
    for text in (
        "",
        "{}",
        json.dumps({**report.to_json(), "format": 2}),
        json.dumps({**report.to_json(), "logs": [1]}),
    ):
        with pytest.raises(ConfigError, match=r"0\.json does not describe a data folder"):
            FolderReport.from_json(text, "0.json")
