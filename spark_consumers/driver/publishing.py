"""Publishes a query's progress as its group's offsets: only the changes, at the same time as the query's next batch.

Nothing depends on it. Only a query that stops at the end of the data waits for it.
"""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from metamq.errors import MetamqError

if TYPE_CHECKING:
    from metamq.spark_consumers.driver.stream_offsets import Places, StreamPlace
    from metamq.zk.partitions import TopicPartition

log = logging.getLogger("metamq.spark")


class Publisher:
    """The publisher of one query. `publish_soon` starts to set the group's offsets."""

    def __init__(self, publish_soon: Callable[[Places], concurrent.futures.Future[None]]) -> None:
        self._publish_soon = publish_soon
        self._published: dict[TopicPartition, StreamPlace] = {}
        self._under_way: tuple[dict[TopicPartition, StreamPlace], concurrent.futures.Future[None]] | None = None
        self._last_error = ""

    def offer(self, places: Places) -> None:
        """Starts to publish the changes. If the last request still runs, the next offer publishes them."""
        self._take_result(0)
        if self._under_way is None:
            changed = {tp: place for tp, place in places.items() if self._published.get(tp) != place}
            if changed:
                self._under_way = changed, self._publish_soon(changed)

    def finish(self, places: Places, wait_s: float) -> None:
        """Publishes the places, and waits until it is done."""
        self._take_result(wait_s)
        self.offer(places)
        self._take_result(wait_s)

    def _take_result(self, wait_s: float) -> None:
        if self._under_way is None:
            return
        changed, future = self._under_way
        concurrent.futures.wait([future], wait_s)
        if not future.done():
            return
        self._under_way = None
        if future.cancelled():  # its loop has ended
            return
        error = future.exception()
        if error is None:
            self._published |= changed
            self._last_error = ""
        elif repr(error) != self._last_error:
            self._last_error = repr(error)
            known = isinstance(error, MetamqError)
            log.warning("the query's progress is not published: %s", error, exc_info=None if known else error)
