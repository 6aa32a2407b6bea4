"""The outermost layer: every HTTP request gets an id, is counted, and is written to the access log; a refused one also
to the usage log."""

from __future__ import annotations

import logging
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.config import ServerConfig
from server.logs import LoggedRequest, current_request, request_id
from server.openai.request_middleware import ActiveRequests
from server.openai.stream import CLIENT_CLOSED_REQUEST
from server.paths import GUARDED, route_path
from server.tracing import NO_SPAN, begin
from server.usage import UsageMeter

logger = logging.getLogger("server.access")

REQUEST_ID_HEADER = "x-request-id"
# every few seconds: logged at debug level only
POLLED = frozenset({"/health", "/ready", "/ping", "/load", "/metrics", "/stats"})


class RequestLog:
    """ASGI middleware. Log lines of the inner app belong to the request."""

    def __init__(self, app: ASGIApp, config: ServerConfig, traffic: ActiveRequests, usage: UsageMeter) -> None:
        self._app, self._config, self._traffic, self._usage = app, config, traffic, usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = LoggedRequest(request_id(Headers(scope=scope).get(REQUEST_ID_HEADER)))
        current_request.set(request)
        start, status = time.monotonic(), 0  # no answer yet

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request.id
            await send(message)

        span, path = NO_SPAN, route_path(scope["path"], self._config.root_path)
        if path.startswith(GUARDED):
            span = begin(f"{scope['method']} {path}", Headers(scope=scope).get("traceparent", ""), request_id=request.id)
            request.traceparent = span.traceparent
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            span.note(status=status or CLIENT_CLOSED_REQUEST, tenant=request.tenant, error=request.error)
            span.end()
            self._record(scope, request, status or CLIENT_CLOSED_REQUEST, time.monotonic() - start)

    def _record(self, scope: Scope, request: LoggedRequest, status: int, seconds: float) -> None:
        method, path = scope["method"], route_path(scope["path"], self._config.root_path)
        # not the path: labels must not grow with what clients invent
        route = getattr(scope.get("route"), "path", "other")
        self._traffic.num_answered[method, route, status] += 1
        if status >= 400 and status != CLIENT_CLOSED_REQUEST and path.startswith(GUARDED) and not request.is_recorded:
            self._usage.record_refusal(request, route, status)
        level = logging.DEBUG if path in POLLED else logging.INFO
        if not self._config.access_log or not logger.isEnabledFor(level):
            return
        client, *_ = scope.get("client") or ("-",)
        shown = path[:200].encode("unicode_escape").decode()  # without the query, which may be private
        fields = {"client": client, "method": method, "path": shown, "status": status, "seconds": round(seconds, 6)}
        if request.model is not None:
            fields["model"] = request.model
        if request.error is not None:
            fields["error"] = request.error
        error = "" if request.error is None else f" {request.error}"
        model = "" if request.model is None else f" by {request.model}"
        logger.log(level, "%s %s %s %d%s%s in %.3f s", client, method, shown, status, error, model, seconds, extra={"fields": fields})
