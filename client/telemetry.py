"""The hook of tracing: clients report to it once per batch. `metamq.otel.instrument()` sets it.

While `current` is None, each place that reports only makes that check. Any thread may set `current`, so a place reads
it once. In `send` even the check would be 4 % of the cost, so a producer makes it when it is opened, and when a
transaction begins or ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from metamq.client.producer.outgoing import Headers, OutgoingBatch
    from metamq.errors import MetamqError


class TakenBatch(Protocol):
    """A MessageBatch, as telemetry sees it."""

    topic: str
    partition: str
    offset: int

    def __len__(self) -> int: ...

    def distinct_headers(self, name: bytes) -> Iterator[Mapping[str, bytes]]:
        """Iterates over the different headers with this name in them. Raises UndecodableBatch."""
        ...


class Processing(Protocol):
    """The processing of one batch by a handler. Thread-safe."""

    def active(self) -> AbstractContextManager[object]:
        """Makes the processing the current trace of the code in the block."""
        ...

    def failed(self, offset: int, error: Exception, *, is_final: bool) -> None:
        """Notes that the listener failed for the message at `offset`. `is_final`: it gets no further attempt."""

    def handled(self, seconds: float, error: Exception | None) -> None:
        """Notes a call of the listener, which ended with the error, if it is given."""

    def end(self, messages: int) -> None:
        """Ends the processing after so many messages were delivered."""


class Telemetry(Protocol):
    """The receiver of the reports. Its methods raise nothing."""

    def traced(self, headers: Headers | None) -> Headers | None:
        """Adds the trace of the calling code to a message's headers, if that code has a trace."""

    def sent(self, batch: OutgoingBatch, base_offset: int, error: MetamqError | None) -> None:
        """Reports a batch that is stored or has failed, before it drops its messages."""

    def taken(self, batch: TakenBatch, group: str | None) -> Processing:
        """Reports a batch that a handler has taken."""
        ...

    def operation(self, name: str, messages: Mapping[str, int]) -> AbstractContextManager[object]:
        """Measures the call in the block, for example "commit". `messages`: those that it sends, by topic."""
        ...

    def trace_id(self) -> str:
        """Returns the id of the calling code's trace, in hexadecimal digits; "" without a trace."""
        ...


current: Telemetry | None = None
NONE_SENT: Mapping[str, int] = MappingProxyType({})


def traced(headers: Headers | None) -> Headers | None:
    """Adds the trace of the calling code to a message's headers, if there is telemetry and a trace."""
    return headers if (reports := current) is None else reports.traced(headers)


def operation(name: str, messages: Mapping[str, int] = NONE_SENT) -> AbstractContextManager[object]:
    """Measures the call in the block, if there is telemetry. `messages`: those that it sends, by topic."""
    return nullcontext() if (reports := current) is None else reports.operation(name, messages)


def active(processing: Processing | None) -> AbstractContextManager[object]:
    """Makes the processing the current trace of the code in the block, if there is telemetry."""
    return nullcontext() if processing is None else processing.active()
