"""Traces: the steps of a request through HTTP, router, workers and transfer.

Nothing is recorded before `record`, which `--otlp-endpoint` leads to. A step's `traceparent` (W3C Trace Context) goes
with the request to whatever process does the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jaxinfer.request import OutputDelta

Attribute = str | int | float | bool | None


class TraceSpan:
    """A step that has begun. This one records nothing; see `open_telemetry.RecordedSpan`."""

    traceparent = ""  # what a step within this one names as its parent

    def note(self, **attributes: Attribute) -> None:
        """Say something of it; None is left out."""

    def event(self, name: str) -> None:
        """Something happens now."""

    def end(self, error: BaseException | None = None) -> None:
        """It is over, for the first call."""


NO_SPAN = TraceSpan()

# A step's name, its parent's `traceparent` or an empty text, and what is known of it -> the step.
BeginSpan = Callable[[str, str, Mapping[str, Attribute]], TraceSpan]


class _Recording:
    """How steps are recorded in this process; None: they aren't."""

    begin: BeginSpan | None = None


def record(begin_span: BeginSpan) -> None:
    """Record all steps from now on."""
    _Recording.begin = staticmethod(begin_span)


def begin(name: str, parent: str = "", **attributes: Attribute) -> TraceSpan:
    """A step within another, or the first of a trace."""
    return NO_SPAN if _Recording.begin is None else _Recording.begin(name, parent, attributes)


def note_usage(span: TraceSpan, delta: OutputDelta) -> None:
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
