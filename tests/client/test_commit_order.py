"""Commits of what is done, beside those of the application: none sets an earlier one back."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from metamq.client.fetch.commits import OffsetCommits
from metamq.client.fetch.inbox import Inbox, PartitionState
from metamq.client.offsets.offsets import ZooKeeperOffsets
from tests.client.inbox_parts import TP
from tests.client.test_consumer import QUICK_MS, first, tp, values

if TYPE_CHECKING:
    from tests.client.conftest import Shop


@pytest.mark.parametrize("how", ["message", "batch", "offset"])
def test_what_is_done_does_not_set_a_commit_of_the_application_back(
    shop: Shop, group: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """While its handler still has the message or batch, and when it fails. A seek may set it back."""
    rounds, due = 0, OffsetCommits.due

    def counted(self: OffsetCommits) -> list[Any]:
        nonlocal rounds
        rounds += 1
        return due(self)

    monkeypatch.setattr(OffsetCommits, "due", counted)
    topic = shop.topic()
    for numbers in (range(4), range(4, 10)):
        shop.producer.send_many(topic, [b"%d" % number for number in numbers]).result(60)
    with contextlib.suppress(KeyError), shop.consumer(topic, group, commit_interval_ms=QUICK_MS) as consumer:
        batches = consumer.batches(max_messages=4)
        taken: Any = next(batches) if how == "batch" else first(consumer, 4)[-1]
        consumer.commit({tp(topic): 4} if how == "offset" else taken)
        before = rounds
        shop.until(lambda: rounds > before + 3)
        assert shop.committed(group)[tp(topic)] == 4
        raise KeyError
    assert shop.committed(group)[tp(topic)] == 4
    with shop.consumer(topic, group, commit_interval_ms=QUICK_MS) as consumer:
        assert values(first(consumer, 2)) == [4, 5]
        shop.until(lambda: shop.committed(group)[tp(topic)] == 5)
        consumer.commit({tp(topic): 9})
        consumer.seek(tp(topic), 2)
        shop.until(lambda: shop.committed(group)[tp(topic)] == 2)
        assert values(first(consumer, 2)) == [2, 3]
    assert shop.committed(group)[tp(topic)] == 4


def test_a_commit_that_is_on_its_way_is_not_set_back(shop: Shop, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread asks for a commit of all that is done meanwhile."""
    topic, store, begun, goes = shop.topic(), ZooKeeperOffsets.commit, threading.Event(), threading.Event()
    commit, asked = OffsetCommits.commit, list[Any]()
    shop.numbers(topic, 10)

    async def noted(self: OffsetCommits, requests: Any) -> Any:
        asked.append(requests)
        return await commit(self, requests)

    async def slow(self: ZooKeeperOffsets, requests: Any) -> Any:
        if not goes.is_set():
            begun.set()
            await asyncio.to_thread(goes.wait)
        return await store(self, requests)

    with shop.consumer(topic, group, commit_interval_ms=3_600_000) as consumer, ThreadPoolExecutor(2) as threads:
        message = first(consumer, 4)[-1]
        monkeypatch.setattr(ZooKeeperOffsets, "commit", slow)
        monkeypatch.setattr(OffsetCommits, "commit", noted)
        one = threads.submit(consumer.commit, message)
        begun.wait()
        other = threads.submit(consumer.commit)
        shop.until(lambda: len(asked) == 2)
        goes.set()
        one.result()
        other.result()
        assert shop.committed(group)[tp(topic)] == 4


def test_after_a_loss_lower_offsets_are_committed_again() -> None:
    """The last commit was in the log of before."""
    inbox, state = Inbox(lambda: True), PartitionState(TP, None, 1000)
    state.floor_offset = state.committed_offset = 1000
    inbox.skip_to(state, 900)
    state.next_offset = 950
    assert state.due_commit() == (950, -1)
