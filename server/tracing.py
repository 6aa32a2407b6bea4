"""Traces: the steps of a request through HTTP, router, workers and transfer, as OpenTelemetry has them.

Without `configure`, which `--otlp-endpoint` calls, nothing is recorded and nothing is imported. A step's `traceparent`
(W3C Trace Context) goes with the request to whatever process does the next.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from jaxinfer.config import ConfigError
from jaxinfer.request import OutputDelta


class _Recorder:
    """Where steps go; None until `configure`."""

    tracer: Any = None


class Span:
    """A step that has begun. As a context manager it ends with the block, and says what was raised."""

    def __init__(self, span: Any = None) -> None:
        self._span = span

    @property
    def traceparent(self) -> str:
        """What a step within this one names as its parent; empty where nothing is recorded."""
        if self._span is None:
            return ""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def note(self, **attributes: str | int | float | bool | None) -> None:
        """Say something of it; None is left out."""
        if self._span is not None:
            self._span.set_attributes({f"jaxinfer.{name}": value for name, value in attributes.items() if value is not None})

    def event(self, name: str) -> None:
        """Something happens now."""
        if self._span is not None:
            self._span.add_event(name)

    def end(self, error: BaseException | None = None) -> None:
        """It is over, for the first call."""
        if self._span is None or not self._span.is_recording():
            return
        if error is not None:
            from opentelemetry.trace import StatusCode

            self._span.set_status(StatusCode.ERROR, f"{type(error).__name__}: {error}")
        self._span.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end(error if isinstance(error, Exception) else None)  # not for a cancelled task


NO_SPAN = Span()


def begin(name: str, parent: str = "", **attributes: str | int | float | bool | None) -> Span:
    """A step within another, or the first of a trace."""
    if _Recorder.tracer is None:
        return NO_SPAN
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract({"traceparent": parent}, context=Context())
    span = Span(_Recorder.tracer.start_span(name, context=context))
    span.note(**attributes)
    return span


def note_usage(span: Span, delta: OutputDelta) -> None:
    """What the last delta of an engine says of the time that the request took."""
    usage = delta.device_usage
    if usage is not None and span is not NO_SPAN:
        span.note(
            cached_tokens=delta.cached_tokens,
            queue_seconds=usage.queue_seconds,
            prefill_seconds=usage.prefill_seconds,
            decode_seconds=usage.decode_seconds,
            finish_reason=None if delta.finish_reason is None else delta.finish_reason.value,
        )


def configure(endpoint: str | None, service: str) -> None:
    """Send steps to a collector (OTLP over gRPC), such as http://127.0.0.1:4317, in batches, by a thread. A collector
    that is not there costs nothing but the steps. Without an endpoint nothing is recorded.

    Raises `ConfigError` for what is no URL, and without the extra `otel`."""
    if endpoint is None:
        return
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"otlp_endpoint is {endpoint!r}: give a URL, such as http://127.0.0.1:4317")
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError("otlp_endpoint is given, but OpenTelemetry is not installed: pip install 'jaxinfer[otel]'") from error
    record_with(BatchSpanProcessor(OTLPSpanExporter(endpoint, insecure=endpoint.startswith("http://"))), service)


def record_with(processor: Any, service: str) -> None:
    """Give steps to a span processor of OpenTelemetry's."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(processor)
    _Recorder.tracer = provider.get_tracer("jaxinfer")


def stop() -> None:
    """Record nothing from now on."""
    _Recorder.tracer = None
