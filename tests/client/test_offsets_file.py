"""Offsets in a file: there after a restart, whole after a crash, used by one consumer at a time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from metamq.client.offsets.offsets import CommitRequest
from metamq.client.offsets.offsets_file import FileOffsets
from metamq.errors import ClosedError, ConfigError, CorruptData, StorageError
from metamq.zk.groups.ownership import CommittedOffset, Ownership
from metamq.zk.partitions import TopicPartition

TOPIC_ID = "0123456789abcdef"


def a_claim(index: int = 0, group: str = "dashboard") -> Ownership:
    return Ownership(group, TopicPartition("flights", f"0-{index}"), TOPIC_ID, "one", 1, 0, None)


def test_offsets_are_there_after_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "deep" / "offsets.json"
        storage = FileOffsets(path)
        claims = [a_claim(0), a_claim(1)]
        assert await storage.claimed(claims) == {claim.tp: None for claim in claims}
        outcome = (await storage.commit([CommitRequest(claims[0], 5, 2)]))[claims[0].tp]
        assert isinstance(outcome, Ownership)
        assert outcome.committed == CommittedOffset(5, 2, TOPIC_ID)
        await storage.commit([CommitRequest(a_claim(0, group="other"), 9, 1)])
        await storage.close()
        await storage.close()

        storage = FileOffsets(path)
        assert await storage.claimed(claims) == {claims[0].tp: CommittedOffset(5, 2, TOPIC_ID), claims[1].tp: None}
        await storage.close()
        with pytest.raises(ClosedError):
            await storage.commit([CommitRequest(claims[0], 6, 2)])

    asyncio.run(scenario())


def test_commits_at_the_same_time_are_all_there(tmp_path: Path) -> None:
    async def scenario() -> None:
        storage = FileOffsets(tmp_path / "offsets.json")
        claims = [a_claim(index) for index in range(10)]
        await asyncio.gather(*(storage.commit([CommitRequest(claim, 3, 1)]) for claim in claims))
        await storage.close()
        storage = FileOffsets(tmp_path / "offsets.json")
        assert set((await storage.claimed(claims)).values()) == {CommittedOffset(3, 1, TOPIC_ID)}
        await storage.close()

    asyncio.run(scenario())


def test_one_consumer_at_a_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        storage = FileOffsets(tmp_path / "offsets.json")
        with pytest.raises(ConfigError, match=r"offsets\.json is in use"):
            FileOffsets(tmp_path / "offsets.json")
        await storage.close()
        await FileOffsets(tmp_path / "offsets.json").close()

    asyncio.run(scenario())


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"offsets": [{}]}', '{"offsets": [{"group": "g"'])
def test_a_damaged_file_is_named_and_left_alone(tmp_path: Path, text: str) -> None:
    async def scenario() -> None:
        path = tmp_path / "offsets.json"
        path.write_text(text)
        for _ in range(2):
            with pytest.raises(CorruptData, match=r"offsets\.json is damaged"):
                FileOffsets(path)
        assert path.read_text() == text

    asyncio.run(scenario())


def test_a_write_that_fails_leaves_the_offsets_of_before(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "offsets.json"
        storage = FileOffsets(path)
        await storage.commit([CommitRequest(a_claim(), 5, 1)])
        in_the_way = tmp_path / "offsets.json.new"
        in_the_way.mkdir()
        outcome = (await storage.commit([CommitRequest(a_claim(), 6, 1)]))[a_claim().tp]
        assert isinstance(outcome, StorageError)
        assert (await storage.claimed([a_claim()]))[a_claim().tp] == CommittedOffset(5, 1, TOPIC_ID)
        in_the_way.rmdir()
        await storage.commit([CommitRequest(a_claim(), 7, 1)])
        await storage.close()

    asyncio.run(scenario())
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["offsets.json", "offsets.json.lock"]
