"""The budget of a consumer's read-ahead: the limit of its buffer, and the share of each partition."""

from __future__ import annotations

from typing import TYPE_CHECKING

from metamq.client.fetch.fetch_runner import FetchLimits

if TYPE_CHECKING:
    from metamq.client.fetch.consumer_options import ConsumerOptions
    from metamq.client.fetch.inbox import Inbox, PartitionState


class FetchBudget:
    """The free capacity of a consumer's inbox."""

    def __init__(self, options: ConsumerOptions, inbox: Inbox) -> None:
        self._options = options
        self._inbox = inbox

    def limits(self) -> FetchLimits:
        """Returns the limits of the next GET."""
        options = self._options
        share_bytes = options.partition_fetch_max_bytes
        if self._inbox.buffered_bytes >= options.prefetch_bytes:
            share_bytes = min(share_bytes, self._share_bytes())
        return FetchLimits(options.fetch_wait_ms, options.fetch_min_bytes, options.fetch_max_bytes, share_bytes)

    def _share_bytes(self) -> int:
        return max(self._options.prefetch_bytes // max(len(self._inbox.states), 1), 1)

    def allows_more(self, state: PartitionState) -> bool:
        """Returns True if more may be fetched; always below a fair share, so that a slow partition blocks no other
        one."""
        limit = self._options.prefetch_bytes
        if state.buffered_bytes < self._share_bytes():
            return True
        return self._inbox.buffered_bytes < limit and state.buffered_bytes < limit // 2
