"""A cache of the true timestamps of batches: see metamq.broker.log.disk.times."""

from __future__ import annotations

from array import array
from collections import OrderedDict

_NONE = array("q")


class TimesCache:
    """Running maxima of the timestamps of recently searched batches, bounded in bytes."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._maxima: OrderedDict[tuple[str, int, int], array[int]] = OrderedDict()

    def get(self, batch: tuple[str, int, int]) -> array[int] | None:
        """The maxima of the batch with this path, position and checksum, or None if they are not cached."""
        maxima = self._maxima.get(batch)
        if maxima is not None:
            self._maxima.move_to_end(batch)
        return maxima

    def put(self, batch: tuple[str, int, int], maxima: array[int]) -> None:
        """Adds the maxima of a batch."""
        self._bytes += 8 * len(maxima) - 8 * len(self._maxima.pop(batch, _NONE))
        self._maxima[batch] = maxima
        while self._bytes > self._bytes_max and len(self._maxima) > 1:
            self._bytes -= 8 * len(self._maxima.popitem(last=False)[1])
