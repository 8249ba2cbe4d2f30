"""Offsets that an operator copies, deletes, or resets in a database: nothing of a running consumer is overwritten."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import aiosqlite
import psycopg
import pytest

from metamq import DatabaseOffsets, FileOffsets, TopicPartition, aio
from metamq.errors import ConfigError, MetamqError, TopicNotFound, WrongType
from tests.client import paused_operator
from tests.client.conftest import Shop
from tests.database_offsets import offsets_in
from tests.postgres import new_schema

Operator = Callable[..., "subprocess.Popen[str]"]


def read(shop: Shop, topic: str, group: str, count: int, **settings: Any) -> list[bytes]:
    """Reads and commits that many messages."""
    with shop.consumer(topic, group, **settings) as consumer:
        return [message.value for message in islice(consumer, count)]


def offsets_of(shop: Shop, group: str) -> dict[str, int | None]:
    return {f"{tp}": offset for tp, offset in shop.committed(group).items()}


def topics_of(shop: Shop, group: str) -> tuple[str, ...]:
    return shop.admin.groups()[group].topics


@pytest.fixture
def topic(shop: Shop) -> str:
    """A topic with five messages."""
    name = shop.topic(brokers=[0])
    shop.numbers(name, 5)
    return name


# Deletion


def test_offsets_of_one_topic_are_deleted_while_the_group_reads_another(shop: Shop, topic: str, group: str) -> None:
    other = shop.topic(brokers=[0])
    shop.numbers(other, 3)
    read(shop, topic, group, 2)
    read(shop, other, group, 1)
    with shop.consumer(other, group) as consumer:
        shop.until(lambda: consumer.assignment)
        dry = shop.admin.delete_offsets(group, topic, dry_run=True)
        assert [(one.topic, one.partition, one.before, one.after) for one in dry] == [(topic, "0-0", 2, None)]
        assert offsets_of(shop, group)[f"{topic}/0-0"] == 2
        assert shop.admin.delete_offsets(group, topic) == dry
        assert offsets_of(shop, group) == {f"{other}/0-0": 1}
        assert topics_of(shop, group) == (other,)
        assert next(iter(consumer)).offset == 1, "it was not disturbed"
    assert offsets_of(shop, group) == {f"{other}/0-0": 2}
    with pytest.raises(ConfigError, match="has no offsets in topic"):
        shop.admin.delete_offsets(group, topic)
    assert read(shop, topic, group, 1) == [b"0"], "as a new group"
    assert topics_of(shop, group) == tuple(sorted((topic, other)))


def test_offsets_of_a_deleted_topic_are_deleted(shop: Shop, topic: str, group: str) -> None:
    read(shop, topic, group, 2)
    shop.admin.delete(topic)
    assert topics_of(shop, group) == (topic,)
    assert [one.before for one in shop.admin.delete_offsets(group, topic)] == [2]
    assert topics_of(shop, group) == ()
    assert shop.admin.describe_group(group).partitions == ()


def test_a_topic_with_readers_is_refused(shop: Shop, topic: str, group: str) -> None:
    with shop.consumer(topic, group, consumer_id="reader") as consumer:
        next(iter(consumer))
        consumer.commit({TopicPartition(topic, "0-0"): 1})
        match = rf"members that read topic {topic}, .*: reader \(process {os.getpid()} on "
        for refused in (
            lambda: shop.admin.delete_offsets(group, topic),
            lambda: shop.admin.delete_offsets(group, topic, dry_run=True),
            lambda: shop.admin.copy_offsets(f"{group}-2", group),
        ):
            read(shop, topic, f"{group}-2", 1)
            with pytest.raises(ConfigError, match=match):
                refused()
    with pytest.raises(ConfigError, match="there is no group"):
        shop.admin.delete_offsets("no-such-group", topic)
    assert offsets_of(shop, group) == {f"{topic}/0-0": 1}


# Copies


def test_offsets_are_copied_to_a_new_group_from_one_that_runs(shop: Shop, topic: str, group: str) -> None:
    other, target = shop.topic(brokers=[0]), f"{group}-2"
    shop.numbers(other, 3)
    read(shop, other, group, 1)
    with shop.consumer(topic, group, auto_commit=False) as consumer:
        next(iter(consumer))
        consumer.commit({TopicPartition(topic, "0-0"): 1})
        dry = shop.admin.copy_offsets(group, target, dry_run=True)
        assert target not in shop.admin.groups()
        assert {(one.topic, one.partition, one.before, one.after) for one in dry} == {
            (topic, "0-0", None, 1), (other, "0-0", None, 1),
        }  # fmt: skip
        assert [one.topic for one in shop.admin.copy_offsets(group, target, [topic])] == [topic]
        assert offsets_of(shop, target) == {f"{topic}/0-0": 1}
        assert len(shop.admin.copy_offsets(group, target)) == 2, "the same offset is no conflict"
        next(iter(consumer))
    assert offsets_of(shop, target) == {f"{topic}/0-0": 1, f"{other}/0-0": 1}
    assert read(shop, topic, target, 1) == [b"1"]


def test_offsets_of_the_target_are_replaced_only_on_request(shop: Shop, topic: str, group: str) -> None:
    target = f"{group}-2"
    read(shop, topic, group, 4)
    read(shop, topic, target, 2)
    with pytest.raises(ConfigError, match=f"{target}' has offsets of its own: {topic}/0-0=2"):
        shop.admin.copy_offsets(group, target)
    assert offsets_of(shop, target) == {f"{topic}/0-0": 2}
    (done,) = shop.admin.copy_offsets(group, target, overwrite=True)
    assert (done.before, done.after) == (2, 4)
    assert read(shop, topic, target, 1) == [b"4"]


def test_copies_that_cannot_be(shop: Shop, topic: str, group: str, tmp_path: Path) -> None:
    read(shop, topic, group, 1)
    admin = shop.admin
    with pytest.raises(ConfigError, match="is the source and the target"):
        admin.copy_offsets(group, group)
    with pytest.raises(TopicNotFound):
        admin.copy_offsets(group, "new", ["nowhere"])
    with pytest.raises(WrongType):
        admin.copy_offsets(group, "new", topic)
    with pytest.raises(ConfigError, match=f"has no offsets in topic {(empty := shop.topic())} to copy"):
        admin.copy_offsets(group, "new", [empty])
    in_file = f"{group}-file"
    read(shop, topic, in_file, 1, offsets=FileOffsets(tmp_path / "offsets"))
    for source, target in ((in_file, "new"), (group, in_file)):
        with pytest.raises(ConfigError, match=r"keeps its offsets .* by FileOffsets"):
            admin.copy_offsets(source, target, overwrite=True)
    assert "new" not in admin.groups()


# Offsets in a database


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A database with the table of the offsets."""
    offsets_in(lambda: sqlite3.connect(tmp_path / "results.db"))
    return tmp_path / "results.db"


def stored_in(file: Path) -> DatabaseOffsets:
    return DatabaseOffsets(lambda: sqlite3.connect(file, timeout=60))


def test_offsets_in_a_database_are_reset_to_every_kind_of_place(shop: Shop, topic: str, group: str, file: Path) -> None:
    offsets, between = stored_in(file), datetime.now(UTC)
    shop.until(lambda: datetime.now(UTC) > between)
    shop.numbers(topic, 2, start=5)
    read(shop, topic, group, 3, offsets=stored_in(file))
    tp, before = TopicPartition(topic, "0-0"), 3
    places: list[tuple[Any, int]] = [("earliest", 0), ("latest", 7), (between, 5), (2, 2), ({tp: 6}, 6)]
    for to, after in places:
        dry = shop.admin.reset_offsets(group, topic, to, dry_run=True, offsets=offsets)
        assert [(one.before, one.after) for one in dry] == [(before, after)]
        assert shop.admin.reset_offsets(group, topic, to, offsets=offsets) == dry
        (seen,) = shop.admin.describe_group(group).partitions
        assert (seen.kept_by, seen.progress) == ("DatabaseOffsets", after), "others see it at once"
        before = after
    assert read(shop, topic, group, 1, offsets=stored_in(file)) == [b"6"]


def test_an_asyncio_database_is_reset_too(shop: Shop, topic: str, group: str, file: Path) -> None:
    offsets = DatabaseOffsets(lambda: aiosqlite.connect(file, timeout=60))
    read(shop, topic, group, 3, offsets=stored_in(file))
    assert [one.before for one in shop.admin.reset_offsets(group, topic, 1, offsets=offsets)] == [3]

    async def scenario() -> None:
        async with aio.Admin(shop.cluster.zookeeper) as admin:
            (found,) = await admin.reset_offsets(group, topic, 4, offsets=offsets)
            assert (found.before, found.after) == (1, 4)

    asyncio.run(scenario())
    assert read(shop, topic, group, 1, offsets=stored_in(file)) == [b"4"]


def test_the_wrong_storage_is_refused(shop: Shop, topic: str, group: str, file: Path) -> None:
    read(shop, topic, group, 1)
    with pytest.raises(ConfigError, match=r"keeps its offsets of topic .* in ZooKeeper, not by DatabaseOffsets"):
        shop.admin.reset_offsets(group, topic, 0, offsets=stored_in(file))
    with pytest.raises(WrongType):
        shop.admin.reset_offsets(group, topic, 0, offsets=file)  # type: ignore[arg-type]
    with shop.consumer(topic, f"{group}-2", offsets=stored_in(file)) as consumer:
        next(iter(consumer))
        with pytest.raises(ConfigError, match="has members, its offsets cannot be reset"):
            shop.admin.reset_offsets(f"{group}-2", topic, 0, offsets=stored_in(file))
    without_table = stored_in(file.with_name("empty.db"))
    with pytest.raises(MetamqError, match="the offset table metamq_offsets could not be used"):
        shop.admin.reset_offsets(f"{group}-2", topic, 0, offsets=without_table)
    assert offsets_of(shop, group) == {f"{topic}/0-0": 1}


def test_a_reset_waits_for_the_open_transaction_of_the_last_owner(
    shop: Shop, topic: str, group: str, postgres: str
) -> None:
    schema = new_schema(postgres)

    def connect() -> Any:
        return psycopg.connect(postgres, options=f"-c search_path={schema}", application_name=schema)

    offsets_in(connect)
    work = connect()
    with shop.consumer(topic, group, offsets=DatabaseOffsets(connect), auto_commit=False) as consumer:
        list(islice(consumer, 2))
        consumer.commit({TopicPartition(topic, "0-0"): 2}, connection=work)
    outcome: list[Any] = []
    offsets = DatabaseOffsets(connect)
    reset = threading.Thread(
        target=lambda: outcome.extend(shop.admin.reset_offsets(group, topic, "latest", offsets=offsets))
    )
    reset.start()
    waits = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s AND wait_event_type = 'Lock'"
    with psycopg.connect(postgres, autocommit=True) as watcher:
        shop.until(lambda: watcher.execute(waits, [schema]).fetchall() == [(1,)])
    work.commit()
    work.close()
    reset.join(60)
    assert [(one.before, one.after) for one in outcome] == [(2, 5)], (
        "the last transaction counts, and so does the reset"
    )


# Operators that stop in the middle


@pytest.fixture
def operator(shop: Shop, topic: str, group: str, file: Path) -> Iterator[Operator]:
    """Starts a change; returns when the operator holds the partitions."""
    started: list[subprocess.Popen[str]] = []

    def start(what: str) -> subprocess.Popen[str]:
        command = [sys.executable, paused_operator.__file__, shop.cluster.zookeeper, what, group, topic, str(file)]
        one = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(one)
        assert one.stdout is not None
        assert one.stdout.readline() == "held\n"
        return one

    yield start
    for one in started:
        one.kill()
        one.communicate()


def prepared(shop: Shop, topic: str, group: str, what: str, file: Path) -> dict[str, Any]:
    """The group has read two messages. Returns the settings of its consumers."""
    settings: dict[str, Any] = {"offsets": stored_in(file)} if what == "reset" else {}
    read(shop, topic, group, 2, **settings)
    read(shop, topic, f"{group}-source", 5)
    return {"offsets": stored_in(file)} if what == "reset" else {}


CHANGES = [("copy", 5), ("delete", 0), ("reset", 0)]


@pytest.mark.slow
@pytest.mark.parametrize(("what", "after"), CHANGES)
def test_a_consumer_that_starts_meanwhile_waits(
    shop: Shop, topic: str, group: str, file: Path, operator: Operator, what: str, after: int
) -> None:
    settings = prepared(shop, topic, group, what, file)
    paused = operator(what)
    with shop.consumer(topic, group, **settings) as consumer:
        shop.until(lambda: len(shop.admin.describe_group(group).members) == 1)
        shop.until(lambda: consumer.health().group.waiting)  # type: ignore[union-attr]
        assert not consumer.assignment
        said, errors = paused.communicate("\n", timeout=60)
        assert (said, errors, paused.returncode) == ("written\n", "", 0)
        if after == 5:
            shop.numbers(topic, 1, start=5)
        assert next(iter(consumer)).offset == after


@pytest.mark.slow
@pytest.mark.parametrize(("what", "_after"), CHANGES)
def test_a_killed_operator_changes_nothing_and_frees_the_partitions(
    shop: Shop, topic: str, group: str, file: Path, operator: Operator, what: str, _after: int
) -> None:
    settings = prepared(shop, topic, group, what, file)
    operator(what).kill()
    assert read(shop, topic, group, 1, **settings) == [b"2"]


@pytest.mark.slow
@pytest.mark.parametrize(("what", "_after"), CHANGES)
def test_a_frozen_operator_overwrites_nothing_when_it_goes_on(
    shop: Shop, topic: str, group: str, file: Path, operator: Operator, what: str, _after: int
) -> None:
    settings = prepared(shop, topic, group, what, file)
    paused = operator(what)
    paused.send_signal(signal.SIGSTOP)
    with shop.consumer(topic, group, **settings) as consumer:
        message = next(iter(consumer))  # the session of the operator has ended
        assert message.offset == 2
        consumer.commit({TopicPartition(topic, "0-0"): 3})
        paused.send_signal(signal.SIGCONT)
        said, errors = paused.communicate("\n", timeout=60)
        assert (said, paused.returncode) == ("", 1)
        assert "OwnershipLost" in errors or "ConnectionLost" in errors
        assert next(iter(consumer)).offset == 3
    stored = shop.admin.describe_group(group).partitions[0]
    assert (stored.committed or stored.progress) == 4


def test_the_asyncio_admin_has_both(shop: Shop, topic: str, group: str) -> None:
    read(shop, topic, group, 2)

    async def scenario() -> None:
        async with aio.Admin(shop.cluster.zookeeper) as admin:
            assert [one.after for one in await admin.copy_offsets(group, f"{group}-2")] == [2]
            assert [one.before for one in await admin.delete_offsets(group, topic)] == [2]

    asyncio.run(scenario())
    assert offsets_of(shop, f"{group}-2") == {f"{topic}/0-0": 2}
