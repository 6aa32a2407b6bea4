"""Steps of requests sent to an OpenTelemetry collector, OTLP over gRPC. Needs the extra `otel`."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from server.tracing import Attribute, TraceSpan, record

_PREFIX = "jaxinfer."  # of attributes


class RecordedSpan(TraceSpan):
    """See `TraceSpan`."""

    def __init__(self, span: Span) -> None:
        self._span = span
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def note(self, **attributes: Attribute) -> None:
        self._span.set_attributes({_PREFIX + name: value for name, value in attributes.items() if value is not None})

    def event(self, name: str) -> None:
        self._span.add_event(name)

    def end(self, error: BaseException | None = None) -> None:
        if not self._span.is_recording():
            return
        if error is not None:
            self._span.set_status(StatusCode.ERROR, f"{type(error).__name__}: {error}")
        self._span.end()


class OpenTelemetry:
    """Begins steps in one process; a thread sends them in batches. A collector that is not there costs nothing but the
    steps. `endpoint`: such as http://127.0.0.1:4317; `service`: this process's name in traces."""

    def __init__(self, endpoint: str, service: str) -> None:
        provider = TracerProvider(resource=Resource.create({"service.name": service}))
        exporter = OTLPSpanExporter(endpoint, insecure=endpoint.startswith("http://"))
        provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer: Tracer = provider.get_tracer("jaxinfer")
        record(self.begin)

    def begin(self, name: str, parent: str, attributes: Mapping[str, Attribute]) -> TraceSpan:
        """See `BeginSpan`."""
        context = TraceContextTextMapPropagator().extract({"traceparent": parent}, context=Context())
        span = RecordedSpan(self._tracer.start_span(name, context=context))
        span.note(**attributes)
        return span
