"""`--otlp-endpoint`: where traces go."""

from __future__ import annotations

from jaxinfer.config import ConfigError


def start_tracing(endpoint: str | None, service: str) -> None:
    """Without an endpoint nothing is recorded. Raises `ConfigError` for what is no URL, and without the extra
    `otel`."""
    if endpoint is None:
        return
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"otlp_endpoint is {endpoint!r}: give a URL, such as http://127.0.0.1:4317")
    try:
        from server.open_telemetry import OpenTelemetry
    except ImportError as error:
        raise ConfigError("otlp_endpoint is given, but OpenTelemetry is not installed: pip install 'jaxinfer[otel]'") from error
    OpenTelemetry(endpoint, service)
