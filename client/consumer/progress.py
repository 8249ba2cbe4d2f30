"""How a consumer gets on, told to others who look from outside."""

from __future__ import annotations

import asyncio
from itertools import count

from metamq.client.consumer.loop_end import LoopEnd
from metamq.client.fetch.inbox import Inbox
from metamq.client.group.assignment import Assignment
from metamq.client.net.outages import Outages
from metamq.zk.partitions import TopicPartition

PROGRESS_CHECK_S = 1.0
CHECKS_A_PUBLICATION = 5
PUBLISH_LIMIT_S = 1.0
"""How long the last publication may keep a consumer that is closed."""


async def watch_progress(inbox: Inbox, assignment: Assignment, outages: Outages, end: LoopEnd) -> None:
    """Notes, for ever, that messages are being done, or that there is nothing to do; warns of what lasts."""
    before: dict[TopicPartition, int] = {}
    for number in count():
        await asyncio.sleep(PROGRESS_CHECK_S)
        outages.warn()
        end.tell()
        with inbox.lock:
            done = done_offsets(inbox)
            is_busy = any(state.hand is not None or state.buffered for state in inbox.states.values())
        if done != before or not is_busy:
            assignment.note_progress()
        before = done
        if number % CHECKS_A_PUBLICATION == 0:
            await assignment.publish(done)


def done_offsets(inbox: Inbox) -> dict[TopicPartition, int]:
    """The offset after the last message that is done, per partition that has begun. Any thread."""
    with inbox.lock:
        return {state.tp: state.done_offset() for state in inbox.states.values() if state.next_offset >= 0}
