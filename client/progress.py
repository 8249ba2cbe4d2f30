"""How a consumer gets on, told to others who look from outside."""

from __future__ import annotations

import asyncio

from metamq.client.assignment import Assignment
from metamq.client.inbox import Inbox
from metamq.client.loop_end import LoopEnd
from metamq.client.outages import Outages
from metamq.zk.partitions import TopicPartition

PROGRESS_CHECK_S = 1.0


async def watch_progress(inbox: Inbox, assignment: Assignment, outages: Outages, end: LoopEnd) -> None:
    """Notes, for ever, that messages are being done, or that there is nothing to do; warns of what lasts."""
    before: dict[TopicPartition, int] = {}
    while True:
        await asyncio.sleep(PROGRESS_CHECK_S)
        outages.tell()
        end.tell()
        with inbox.lock:
            states = list(inbox.states.values())
            done = {state.tp: state.done_offset() for state in states}
            is_busy = any(state.hand is not None or state.buffered for state in states)
        if done != before or not is_busy:
            assignment.note_progress()
        before = done
