"""What becomes of branches and batches, by value, and what a checkpoint tells."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from metamq.errors import ConfigError, CorruptData
from metamq.spark_consumers.sink.checkpoint import (
    JUST_S,
    RUNNER,
    checkpoint_id,
    content,
    is_ending_a_batch,
    is_just_planned,
    local_folder,
    named,
    newest_finished,
)
from metamq.spark_consumers.sink.decisions import (
    RUNS,
    BranchName,
    Decision,
    NotOurs,
    SinkState,
    check_batch,
    ends,
    ends_of_jobs,
    name_of,
    new_attempt,
    new_job,
)
from metamq.wire.xa import Xid
from tests.spark.drivers import (
    QUERY,
)


def test_names_are_found_again_and_others_are_nobodys() -> None:
    name = BranchName(QUERY, 2**63 - 1, new_attempt(99_999, 3))
    assert name_of(name.at(99_999)) == name
    assert name_of(BranchName(new_job(), 0, "0.0.a").at(1)) is not None
    for xid in (
        Xid(1, b"spark:a:0", b"0.0.a.1"),
        Xid.random(b"spark:"),
        Xid.random(b"db:x:"),
        Xid(0x4D51, b"spark:a:x"),
    ):
        assert name_of(xid) is None


def test_what_is_decided_survives_its_json() -> None:
    decision = Decision({"0.0.ab": {0: "0:1", 3: "3:1"}, "1.2.cd": {0: "0:1"}}, "made from")
    assert Decision.from_json(decision.to_json()) == decision
    for damaged in (
        b"",
        b"[]",
        b'{"content":"","winners":{"a":[0]}}',
        b'{"content":"","places":[],"winners":{"a":[0]}}',
    ):
        with pytest.raises(CorruptData):
            Decision.from_json(damaged)
    for state in (SinkState(QUERY, 17), SinkState(QUERY, 17, ("run-1", "run-2"), finished=True, aborted="0.0.a")):
        assert SinkState.from_json(state.to_json()) == state


def test_a_decision_has_room_for_as_many_tasks_as_brokers_have_for_their_branches() -> None:
    def of(tasks: int, brokers: int) -> Decision:
        at = {broker_id: f"{broker_id}:17" for broker_id in range(brokers)}
        return Decision({new_attempt(task, 0): at for task in range(tasks)}, "0" * 32)

    assert len(of(10_000, 20).to_json()) < 1_000_000
    with pytest.raises(ConfigError, match=r"40,000 tasks with rows at 2 brokers.*coalesce\(n\)"):
        of(40_000, 2).to_json()


def test_each_branch_has_one_end_or_none() -> None:
    def branch(batch_id: int, attempt: str, sink: str = "s") -> tuple[Xid, int]:
        return BranchName(sink, batch_id, attempt).at(0), 0

    decisions = {4: Decision({"a": {0: ""}}), 5: Decision({"a": {0: ""}})}
    left = ends(
        "s",
        5,
        decisions,
        [branch(5, "a"), branch(5, "b"), branch(4, "a"), branch(4, "b"), branch(3, "a"), branch(6, "a"),
         branch(5, "a", "other"), (Xid.random(), 0)],
    )  # fmt: skip
    assert left.commit == [branch(5, "a"), branch(4, "a")]
    assert left.rollback == [branch(5, "b"), branch(4, "b"), branch(3, "a")]


def test_branches_of_batch_writes_without_a_node_are_nobodys() -> None:
    def branch(job: str, attempt: str) -> tuple[Xid, int]:
        return BranchName(job, 0, attempt).at(0), 0

    jobs = {"job-runs": None, "job-decided": Decision({"a": {0: ""}})}
    found = ends_of_jobs(
        jobs,
        [branch("job-runs", "a"), branch("job-decided", "a"), branch("job-decided", "b"), branch("job-gone", "a"),
         branch("a query's", "a"), (Xid.random(), 0)],
    )  # fmt: skip
    assert found.commit == [branch("job-decided", "a")]
    assert found.rollback == [branch("job-decided", "b"), branch("job-gone", "a")]


def test_which_batches_are_refused() -> None:
    state = SinkState(QUERY, 7, ("run-1", "run-2"))
    ours, theirs = Decision({"a": {0: ""}}, "content"), Decision({"b": {0: ""}}, "content")

    def said(run: str, batch_id: int, standing: Decision | None, decision: Decision = ours) -> str:
        try:
            check_batch("s", state, run, batch_id, decision, standing)
        except NotOurs as error:
            return error.problem
        return ""

    for run in ("run-2", ""):  # Spark may not tell which
        assert said(run, 7, None) == said(run, 8, None) == ""
        assert said(run, 7, theirs) == "", "it is run again after a restart"
        assert "batch 6 of the sink s runs again, but batch 7 is decided" in said(run, 6, None)
        assert "batch 6 of the sink s runs again" in said(run, 6, theirs)
        assert "decided with other offsets" in said(run, 7, Decision(theirs.winners, "other content"))
        assert said(run, 7, Decision(theirs.winners, "")) == "", "it cannot be compared"
    assert "taken over by the run run-2" in said("run-1", 8, None)
    assert said("run-1", 7, Decision(ours.winners, "content")) == "", "its own decision, whose answer was lost"


def test_the_run_that_begins_to_write_last_decides() -> None:
    state = SinkState(QUERY, 0)
    for number in range(RUNS + 3):
        state = state.joined("s", f"run-{number}")
        assert state.joined("s", f"run-{number}") is state.joined("s", "") is state
    assert len(state.runs) == RUNS
    with pytest.raises(NotOurs, match=f"taken over by the run run-{RUNS + 2} .*Only one driver"):
        state.joined("s", f"run-{RUNS + 1}")


def test_a_task_that_is_not_told_its_query_or_batch() -> None:
    assert named(None, "q", "7") == ("q", 7)
    assert named("mine", None, "7") == ("mine", 7)
    assert named("mine", "q", "7") == ("q", 7), "another sinkId is no other sink"
    with pytest.raises(ConfigError, match="sinkId"):
        named(None, None, "7")
    with pytest.raises(ConfigError, match="at_least_once"):
        named("mine", "q", None)


def test_of_a_file_source_a_batch_is_known_by_its_files(tmp_path: Path) -> None:
    """Its offset is a number only, which a query from a backup gives to other files."""

    def entry(file: str, number: int) -> str:
        return f'{{"path":"file:///in/{file}","timestamp":1700000000000,"batchId":{number}}}'

    def digest(logs: dict[str, list[str]], before: str | None = "2", batch_id: int = 4) -> str:
        place = Path(tempfile.mkdtemp(dir=tmp_path))
        (place / "offsets").mkdir()
        (place / "metadata").write_text('{"id":"q"}')
        lines = ["v1", '{"batchTimestampMs":1}', '{"orders-0":7}', '{"logOffset":3}']
        (place / "offsets" / f"{batch_id}").write_text("\n".join(lines))
        if before is not None:
            lines[3] = f'{{"logOffset":{before}}}' if before != "-" else "-"
            (place / "offsets" / f"{batch_id - 1}").write_text("\n".join(lines))
        for name, entries in logs.items():
            (place / "sources" / name).parent.mkdir(parents=True, exist_ok=True)
            (place / "sources" / name).write_text("\n".join(["v1", *entries]))
        return content(str(place), "q", batch_id)

    first = digest({"0/0": ["{}"], "1/3": [entry("f1", 3)]})
    assert first == digest({"0/0": ["{}"], "1/3": [entry("f1", 3)]}) != ""
    assert digest({"1/3": [entry("f1", 3), entry("f2", 3)]}) != first, "a backup, to which a file has come"
    assert digest({"1/3": [entry("f3", 3)]}) != first
    earlier = [entry("e0", 0), entry("e1", 1), entry("e2", 2)]
    assert digest({"1/3.compact": [*earlier, entry("f1", 3)], "1/2": earlier[2:]}) == first, "compacted"
    assert digest({"1/3": [entry("f1", 3)], "1/2": earlier[2:], "1/4": [entry("n", 4)]}) == first
    two_numbers = digest({"1/3": [entry("f1", 3)], "1/2": earlier[2:]}, before="1")
    assert two_numbers == digest({"1/3.compact": [*earlier, entry("f1", 3)]}, before="1")
    assert two_numbers != digest({"1/3": [entry("f1", 3)], "1/2": [entry("other", 2)]}, before="1")
    all_of_them = digest({"1/3.compact": [*earlier, entry("f1", 3)]}, before="-")
    assert all_of_them == digest({"1/3.compact": [*earlier, entry("f1", 3)]}, before=None, batch_id=0) != first
    assert digest({"1/3": [entry("f1", 3)], "1/2": earlier[2:]}, before=None) == first


def test_what_a_checkpoint_tells(tmp_path: Path) -> None:
    place = tmp_path / "the checkpoint"
    for folder in ("offsets", "commits"):
        (place / folder).mkdir(parents=True)
    (place / "metadata").write_text('{"id":"the-id"}')
    assert checkpoint_id(str(place)) == checkpoint_id(place.as_uri()) == "the-id"
    for unknown in (None, str(tmp_path), "what://is/it"):
        with pytest.raises(ConfigError, match="the query's id is not in its checkpoint"):
            checkpoint_id(unknown)
        assert content(unknown, "the-id", 7) == ""

    def digest(run: str, *sources: str, query: str = "the-id") -> str:
        (place / "offsets" / "7").write_text("\n".join(["v1", f'{{"batchTimestampMs":{run}}}', *sources]))
        return content(str(place), query, 7)

    first = digest("1", '{"a":1}', '{"b":2}')
    assert first
    assert digest("2", '{"a":1}', '{"b":2}') == first
    assert digest("2", '{"a":1}', '{"b":3}') not in (first, "")
    assert digest("1", '{"a":1}', '{"b":2}', query="another") == content(str(place), "the-id", 8) == ""
    assert newest_finished(place) == -1
    for name in ("3", "12", ".12.crc"):
        (place / "commits" / name).touch()
    assert newest_finished(place) == 12
    assert local_folder(place.as_uri()) == local_folder(str(place)) == place
    assert local_folder("s3a://elsewhere") is local_folder(None) is None


def test_which_batch_comes_again(tmp_path: Path) -> None:
    for folder in ("offsets", "commits"):
        (tmp_path / folder).mkdir()
    assert not is_just_planned(tmp_path), "there is none"
    planned = tmp_path / "offsets" / "4"
    planned.touch()
    (tmp_path / "commits" / "3").touch()
    assert is_just_planned(tmp_path)
    for before_s in (JUST_S + 1, -60):
        then_s = time.time() - before_s
        os.utime(planned, times=(then_s, then_s))
        assert not is_just_planned(tmp_path), "an older one, or by another clock"
    planned.touch()
    (tmp_path / "commits" / "4").touch()
    assert not is_just_planned(tmp_path), "it is done"


def test_a_process_that_ends_batches_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_ending_a_batch()
    with monkeypatch.context() as patched:  # by Spark's daemon
        patched.setitem(sys.modules, f"pyspark.sql.worker{RUNNER}", ModuleType("runner"))
        assert is_ending_a_batch()
    main = ModuleType("__main__")  # without one
    main.__spec__ = ModuleSpec(f"pyspark.sql.worker{RUNNER}", None)
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert is_ending_a_batch()
