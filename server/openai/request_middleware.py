"""What runs before a request's handler: checks of its origin, its key, and the capacity. It also answers whatever
fails."""

from __future__ import annotations

import asyncio
from collections import Counter

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api_keys import ApiKey, KeyRing
from server.config import ServerConfig
from server.http_limits import timely
from server.logs import current_request
from server.openai.caller import ANONYMOUS, SESSION_HEADER, Caller, checked_session
from server.openai.errors import ApiError, from_exception
from server.openai.origin import OriginRules
from server.openai.parameter_policy import HEADER as IGNORED_HEADER
from server.openai.stream import ClientGone
from server.paths import GUARDED, route_path


class ActiveRequests:
    """Counts active and answered requests. `close` begins a shutdown."""

    def __init__(self) -> None:
        self.num_open = 0  # below /v1/
        self.is_closing = False
        self.num_answered: Counter[tuple[str, str, int]] = Counter()  # by method, route and status
        self._quiet = asyncio.Event()
        self._quiet.set()

    def open(self) -> None:
        """Requests are accepted."""
        self.is_closing = False

    def close(self) -> None:
        """From now on new requests are answered 503."""
        self.is_closing = True

    async def until_quiet(self) -> None:
        """Returns once no request is active."""
        await self._quiet.wait()

    def enter(self) -> None:
        self.num_open += 1
        self._quiet.clear()

    def leave(self) -> None:
        self.num_open -= 1
        if not self.num_open:
            self._quiet.set()


class RequestMiddleware:
    """ASGI middleware around the app, inside `RequestLog`."""

    def __init__(self, app: ASGIApp, config: ServerConfig, traffic: ActiveRequests, keys: KeyRing, metrics_keys: KeyRing) -> None:
        self._app, self._config, self._traffic, self._keys, self._metrics_keys = app, config, traffic, keys, metrics_keys
        self._origins = OriginRules(config, has_keys=bool(keys))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_answered = False
        echoed: dict[str, str] = {}

        async def send_echoing(message: Message) -> None:
            nonlocal is_answered
            if message["type"] == "http.response.start":
                is_answered = True
                answered = MutableHeaders(scope=message)
                answered.update(echoed)
                policy = scope.get("state", {}).get("policy")
                if policy is not None and policy.ignored:
                    answered[IGNORED_HEADER] = policy.header
            await send(message)

        scope["root_path"] = self._config.root_path  # which the routes are matched without
        path, headers = route_path(scope["path"], self._config.root_path), Headers(scope=scope)
        is_guarded = path.startswith(GUARDED)
        if is_guarded:
            self._traffic.enter()
        try:
            self._origins.check(scope["method"], path, headers)
            if is_guarded:
                state = scope.setdefault("state", {})
                if state.get("is_over_capacity"):
                    raise _over_capacity(self._config.max_connections)
                caller = state["caller"] = self._admit(headers)  # handlers' request.state.caller
                if caller.session is not None:
                    echoed[SESSION_HEADER] = caller.session
            elif self._metrics_keys and path == "/metrics":
                sent_key(headers, self._metrics_keys)
            elif self._metrics_keys and path == "/stats":  # for the chat page
                sent_key(headers, self._metrics_keys, self._keys)
            await self._app(scope, timely(receive, self._config.body_timeout), send_echoing)
        except (ClientGone, ClientDisconnect):  # the latter within the request's body
            pass
        except Exception as error:
            # too late for an answer: the connection breaks, which shows the client that it is incomplete
            if is_answered:
                raise
            await from_exception(error).response()(scope, receive, send_echoing)
        finally:
            if is_guarded:
                self._traffic.leave()

    def _admit(self, headers: Headers) -> Caller:
        """The caller. Raises `ApiError` for a request that is not admitted."""
        if self._traffic.is_closing:
            closing = {"Retry-After": "5", "Connection": "close"}
            raise ApiError(503, "the server is shutting down", code="service_unavailable", type="server_error", headers=closing)
        key = sent_key(headers, self._keys) if self._keys else None
        tenant = ANONYMOUS if key is None else key.tenant
        request = current_request.get()
        if request is not None:
            request.tenant = tenant
        return Caller(
            tenant=tenant,
            request_id="" if request is None else request.id,
            session=checked_session(headers.get(SESSION_HEADER)),
            may_go_ahead=key is None or key.may_go_ahead,
            timeout=self._config.request_timeout,
        )


def _over_capacity(max_connections: int) -> ApiError:
    message = f"the server has {max_connections} connections with requests under way, and takes no more: try again"
    headers = {"Retry-After": "1", "Connection": "close"}
    return ApiError(503, message, code="too_many_connections", type="server_error", headers=headers)


def sent_key(headers: Headers, *rings: KeyRing) -> ApiKey:
    """The key that was sent. Raises `ApiError` 401."""
    kind, _, sent = headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not sent:
        message = "no API key was sent: send it in the header 'Authorization: Bearer KEY'"
    else:
        raw = sent.strip().encode("latin-1")
        for found in [ring.find(raw) for ring in rings]:
            if found is not None:
                return found
        message = "the API key is not one of this server's"
    raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
