"""A collector of traces, as OpenTelemetry's are: it keeps what processes send it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as services


@dataclass(frozen=True)
class CollectedStep:
    """A span. `attributes`: those of this project, without their prefix."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    seconds: float
    attributes: dict[str, Any]


class TraceCollector(services.TraceServiceServicer):
    """`url`: what `--otlp-endpoint` is given."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._steps: list[CollectedStep] = []
        self._changed = threading.Condition()

    def Export(self, request: pb.ExportTraceServiceRequest, context: grpc.ServicerContext) -> pb.ExportTraceServiceResponse:
        found: list[CollectedStep] = []
        for group in request.resource_spans:
            service = {pair.key: pair.value.string_value for pair in group.resource.attributes}["service.name"]
            found += [_step(service, span) for scope in group.scope_spans for span in scope.spans]
        with self._changed:
            self._steps += found
            self._changed.notify_all()
        return pb.ExportTraceServiceResponse()

    def trace(self, trace_id: str, number: int, seconds: float = 30.0) -> list[CollectedStep]:
        """A trace's steps, by when they ended, once there are so many."""

        def found() -> list[CollectedStep]:
            return [step for step in self._steps if step.trace_id == trace_id]

        with self._changed:
            assert self._changed.wait_for(lambda: len(found()) >= number, seconds), [step.name for step in found()]
        time.sleep(0.1)
        return found()


def _step(service: str, span: Any) -> CollectedStep:
    values = {pair.key.removeprefix("jaxinfer."): pair.value for pair in span.attributes}
    return CollectedStep(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
        {name: getattr(value, value.WhichOneof("value")) for name, value in values.items()},
    )


@contextmanager
def collecting() -> Iterator[TraceCollector]:
    """One that listens on loopback."""
    server = grpc.server(ThreadPoolExecutor(2))
    collector = TraceCollector(f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    services.add_TraceServiceServicer_to_server(collector, server)
    server.start()
    yield collector
    server.stop(None)
