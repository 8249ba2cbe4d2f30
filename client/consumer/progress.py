"""Reports a consumer's progress to outside observers."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from metamq.client.consumer.loop_end import LoopEnd
    from metamq.client.fetch.inbox import Inbox
    from metamq.client.group.assignment import Assignment
    from metamq.client.net.outages import Outages
    from metamq.zk.partitions import TopicPartition

PROGRESS_CHECK_S = 1.0
CHECKS_A_PUBLICATION = 5
PUBLISH_LIMIT_S = 1.0
"""The most seconds that the last publication may delay close()."""


async def watch_progress(inbox: Inbox, assignment: Assignment, outages: Outages, end: LoopEnd) -> None:
    """Notes progress (a message was done, or there is no work) until it is cancelled. Warns of lasting obstacles."""
    before: dict[TopicPartition, int] = {}
    for number in count():
        await asyncio.sleep(PROGRESS_CHECK_S)
        outages.warn()
        end.warn()
        with inbox.lock:
            done = done_offsets(inbox)
            is_busy = any(state.in_flight is not None or state.buffered for state in inbox.states.values())
        if done != before or not is_busy:
            assignment.note_progress()
        before = done
        if number % CHECKS_A_PUBLICATION == 0:
            await assignment.publish(done)


def done_offsets(inbox: Inbox) -> dict[TopicPartition, int]:
    """Returns the offset after the last done message, per partition that has begun. Thread-safe."""
    with inbox.lock:
        return {state.tp: state.done_offset() for state in inbox.states.values() if state.next_offset >= 0}
