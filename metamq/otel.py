"""OpenTelemetry: traces and metrics of producers and consumers. Needs the extra: pip install "metamq[otel]".

    import metamq.otel
    metamq.otel.instrument()

Names are those of the semantic conventions for messaging. There is one span per batch, never one per message:

    send <topic>       PRODUCER  from the first `send` of a batch to its acknowledgement
    process <topic>    CONSUMER  from the delivery of a batch to a handler until its end, with links to the producers
    commit, commit_transaction, dbtx   CLIENT   only if the calling code is in a span that records

A message that is sent in a span that records has the headers `traceparent` and `tracestate` of W3C. With `send_many`
only the first message of each batch has them: a header for each would double the cost.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from metamq.client import telemetry
from metamq.errors import ConfigError, MetamqError, UndecodableBatch

try:
    from opentelemetry import context as otel_context
    from opentelemetry import metrics, trace
    from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    raise ConfigError(
        "metamq.otel needs opentelemetry-api", hint='Install it with: pip install "metamq[otel]"'
    ) from None

if TYPE_CHECKING:
    from metamq.client.fetch.message_batch import MessageBatch
    from metamq.client.model import Message
    from metamq.client.producer.outgoing import Headers, OutgoingBatch

__all__ = ["instrument", "processing", "uninstrument"]

Attributes = dict[str, str | int]

SYSTEM = "metamq"
LINKS_MAX = 128
"""The limit of OpenTelemetry's SDK on the links of a span."""
BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_W3C = TraceContextTextMapPropagator()
_TRACE = b"traceparent"


def instrument(
    *, tracer_provider: trace.TracerProvider | None = None, meter_provider: metrics.MeterProvider | None = None
) -> None:
    """Traces and measures the producers and consumers of this process. Call it before you open them.

    Without arguments the providers are the global ones of OpenTelemetry. A second call replaces the first.
    """
    telemetry.current = _OpenTelemetry(
        trace.get_tracer("metamq", tracer_provider=tracer_provider),
        metrics.get_meter("metamq", meter_provider=meter_provider),
    )


def uninstrument() -> None:
    """Ends the tracing and measuring."""
    telemetry.current = None


@contextmanager
def processing(received: Message[Any] | MessageBatch[Any]) -> Iterator[Span]:
    """Makes a span around your code for one message, or for one batch of `batches()`, with links to its producers.

    Spans of other libraries in the block become its children. Use it in loops, which have no current span of their own.
    Raises ConfigError before instrument().
    """
    if not isinstance(telemetry.current, _OpenTelemetry):
        raise ConfigError("processing() needs OpenTelemetry", hint="Call metamq.otel.instrument() at the start.")
    offset, headers = received.offset, received.headers
    attributes = {
        **_attributes("process", received.topic, "process"),
        "messaging.destination.partition.id": received.partition,
        "metamq.offset": offset,
    }
    links = _links([headers] if isinstance(headers, Mapping) else headers)
    with telemetry.current.tracer.start_as_current_span(
        f"process {received.topic}", kind=SpanKind.CONSUMER, links=links, attributes=attributes
    ) as span:
        yield span


def _attributes(name: str, topic: str | None = None, kind: str | None = None) -> Attributes:
    attributes: Attributes = {"messaging.system": SYSTEM, "messaging.operation.name": name}
    if kind is not None:
        attributes["messaging.operation.type"] = kind
    if topic is not None:
        attributes["messaging.destination.name"] = topic
    return attributes


def _links(headers: Iterable[Mapping[str, bytes] | None]) -> list[Link]:
    """Returns links to the different traces in the headers of messages."""
    found: dict[bytes, Link] = {}
    for one in headers:
        if one and (parent := one.get("traceparent")) is not None and parent not in found:
            carrier = {name: one[name].decode("ascii", "replace") for name in _W3C.fields if name in one}
            producer = trace.get_current_span(_W3C.extract(carrier, otel_context.Context())).get_span_context()
            if producer.is_valid:
                found[parent] = Link(producer)
        if len(found) == LINKS_MAX:
            break
    return list(found.values())


def _set_failed(span: Span, error: BaseException) -> None:
    span.set_attribute("error.type", type(error).__name__)
    span.set_status(Status(StatusCode.ERROR, str(error)))


class _OpenTelemetry:
    """The telemetry of a process that is instrumented."""

    def __init__(self, tracer: trace.Tracer, meter: metrics.Meter) -> None:
        self.tracer = tracer

        def seconds(name: str, text: str) -> metrics.Histogram:
            return meter.create_histogram(name, "s", text, explicit_bucket_boundaries_advisory=BOUNDS_S)

        def messages(name: str, text: str) -> metrics.Counter:
            return meter.create_counter(name, "{message}", text)

        self.operation_s = seconds("messaging.client.operation.duration", "Duration of a batch's send, or of a commit.")
        self.process_s = seconds(
            "messaging.process.duration", "Duration of a listener's call, or of a batch in a loop."
        )
        self.sent_messages = messages("messaging.client.sent.messages", "Messages that were stored or have failed.")
        self.consumed = messages("messaging.client.consumed.messages", "Messages that were delivered to handlers.")
        self._last: tuple[otel_context.Context, dict[str, bytes]] = otel_context.Context(), {}
        """The last context that sent, with its headers: a loop sends many messages in one context."""

    def traced(self, headers: Headers | None) -> Headers | None:
        context = otel_context.get_current()
        known, added = self._last
        if context is not known:
            added = {}
            if trace.get_current_span(context).is_recording():
                carrier: dict[str, str] = {}
                _W3C.inject(carrier, context)
                added = {name: text.encode() for name, text in carrier.items()}
            self._last = context, added
        if not added:
            return headers
        if headers is None:
            return added
        return {**added, **headers} if isinstance(headers, Mapping) else headers  # `send` refuses other types

    def sent(self, batch: OutgoingBatch, base_offset: int, error: MetamqError | None) -> None:
        messages = batch.messages
        attributes = _attributes("send", batch.topic, "send")
        if error is not None:
            attributes["error.type"] = type(error).__name__
        self.sent_messages.add(messages, attributes)
        self.operation_s.record((time.monotonic_ns() - batch.created_ns) / 1e9, attributes)
        links = _links({id(one): one for one in batch.headers or ()}.values())
        # Messages of one trace: the send is a part of it. Otherwise it is a trace of its own, with links.
        parent = otel_context.Context()
        if len(links) == 1:
            parent = trace.set_span_in_context(trace.NonRecordingSpan(links.pop().context), parent)
        if batch.partition >= 0:
            attributes["messaging.destination.partition.id"] = f"{batch.broker_id}-{batch.partition}"
        if base_offset >= 0:
            attributes["metamq.offset"] = base_offset
        span = self.tracer.start_span(
            f"send {batch.topic}",
            parent,
            SpanKind.PRODUCER,
            {**attributes, "messaging.batch.message_count": messages},
            links,
            start_time=batch.timestamp_us * 1000,
        )
        if error is not None:
            _set_failed(span, error)
        span.end()

    def taken(self, batch: telemetry.TakenBatch, group: str | None) -> _Processing:
        attributes = _attributes("process", batch.topic, "process")
        if group is not None:
            attributes["messaging.consumer.group.name"] = group
        links: list[Link] = []
        with suppress(UndecodableBatch):  # the handler gets the error
            links = _links(batch.distinct_headers(_TRACE))
        span = self.tracer.start_span(
            f"process {batch.topic}",
            kind=SpanKind.CONSUMER,
            attributes={
                **attributes,
                "messaging.destination.partition.id": batch.partition,
                "messaging.batch.message_count": len(batch),
                "metamq.offset": batch.offset,
            },
            links=links,
        )
        return _Processing(self, span, attributes)

    def trace_id(self) -> str:
        found = trace.get_current_span().get_span_context()
        return trace.format_trace_id(found.trace_id) if found.is_valid else ""

    @contextmanager
    def operation(self, name: str, messages: Mapping[str, int]) -> Iterator[None]:
        # The name of a destination is only for operations whose messages all go there.
        topic = next(iter(messages)) if len(messages) == 1 else None
        attributes = _attributes(name, topic, "send" if messages else "settle")
        began_s = time.perf_counter()
        recording = trace.get_current_span().is_recording()
        span = self.tracer.start_span(name, kind=SpanKind.CLIENT, attributes=attributes) if recording else None
        if span is not None and messages:
            span.set_attribute("messaging.batch.message_count", sum(messages.values()))
            span.set_attribute("metamq.topics", sorted(messages))
        try:
            yield
        except BaseException as error:
            attributes["error.type"] = type(error).__name__
            if span is not None:
                _set_failed(span, error)
            raise
        finally:
            self.operation_s.record(time.perf_counter() - began_s, attributes)
            for topic, number in messages.items():
                self.sent_messages.add(number, {**attributes, "messaging.destination.name": topic})
            if span is not None:
                span.end()


class _Processing:
    """The span of one batch in the hands of a handler."""

    def __init__(self, owner: _OpenTelemetry, span: Span, attributes: Attributes) -> None:
        self._owner = owner
        self._span = span
        self._base: Mapping[str, str | int] = {**attributes}
        self._attributes = attributes
        self._began_s = time.perf_counter()
        self._is_handled = False
        """True if the time of each call of a listener is recorded, and not that of the batch."""

    def active(self) -> AbstractContextManager[Span]:
        return trace.use_span(self._span, record_exception=False, set_status_on_exception=False)

    def failed(self, offset: int, error: Exception, *, is_final: bool) -> None:
        self._span.record_exception(error, {"metamq.offset": offset})
        if is_final:
            self._attributes["error.type"] = type(error).__name__
            _set_failed(self._span, error)

    def handled(self, seconds: float, error: Exception | None) -> None:
        self._is_handled = True
        failed = {} if error is None else {"error.type": type(error).__name__}
        self._owner.process_s.record(seconds, {**self._base, **failed})

    def end(self, messages: int) -> None:
        self._owner.consumed.add(messages, self._attributes)
        if not self._is_handled:
            self._owner.process_s.record(time.perf_counter() - self._began_s, self._attributes)
        self._span.end()
