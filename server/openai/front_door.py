"""What every HTTP request passes first: it is counted, needs a key, is turned away during shutdown, and gets an answer whatever fails."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api_keys import ApiKey, KeyRing
from server.config import ServerConfig
from server.http_limits import timely
from server.openai.caller import ANONYMOUS, SESSION_HEADER, Caller, checked_session
from server.openai.errors import ApiError, from_exception
from server.openai.reading import HEADER as IGNORED_HEADER
from server.openai.stream import CLIENT_CLOSED_REQUEST, ClientGone

GUARDED = "/v1/"  # what lies below needs a key where keys are set, and is refused during shutdown; health and metrics aren't


class Traffic:
    """Requests under way and answered. `close` begins a shutdown."""

    def __init__(self) -> None:
        self.num_open = 0  # below /v1/
        self.is_closing = False
        self.num_answered: Counter[tuple[str, str, int]] = Counter()  # by method, route and status
        self._quiet = asyncio.Event()
        self._quiet.set()

    def open(self) -> None:
        """Requests are taken in."""
        self.is_closing = False

    def close(self) -> None:
        """From now on new requests are answered 503."""
        self.is_closing = True

    async def until_quiet(self) -> None:
        """Return once no request is under way."""
        await self._quiet.wait()

    def enter(self) -> None:
        self.num_open += 1
        self._quiet.clear()

    def leave(self) -> None:
        self.num_open -= 1
        if not self.num_open:
            self._quiet.set()


class FrontDoor:
    """ASGI middleware around the whole app."""

    def __init__(self, app: ASGIApp, config: ServerConfig, traffic: Traffic, keys: KeyRing) -> None:
        self._app, self._config, self._traffic, self._keys = app, config, traffic, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0  # no answer yet
        request_id = f"req_{uuid.uuid4().hex}"
        echoed = {"x-request-id": request_id}

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers.update(echoed)
                reading = scope.get("state", {}).get("reading")
                if reading is not None and reading.ignored:
                    headers[IGNORED_HEADER] = reading.header
            await send(message)

        scope["root_path"] = self._config.root_path  # which the routes are matched without
        is_guarded = route_path(scope["path"], self._config.root_path).startswith(GUARDED)
        try:
            if is_guarded:
                self._traffic.enter()
                state = scope.setdefault("state", {})
                if state.get("is_over_capacity"):
                    raise _over_capacity(self._config.max_connections)
                caller = state["caller"] = self._admit(Headers(scope=scope), request_id)  # the handlers' request.state.caller
                if caller.session is not None:
                    echoed[SESSION_HEADER] = caller.session
            await self._app(scope, timely(receive, self._config.body_timeout), send_counted)
        except (ClientGone, ClientDisconnect):  # the latter within the request's body
            pass
        except Exception as error:
            if status:  # too late for an answer: the connection breaks, which tells the client that it is incomplete
                raise
            await from_exception(error).response()(scope, receive, send_counted)
        finally:
            if is_guarded:
                self._traffic.leave()
            route = getattr(scope.get("route"), "path", "other")  # not the path: a label must not grow with what clients invent
            self._traffic.num_answered[scope["method"], route, status or CLIENT_CLOSED_REQUEST] += 1

    def _admit(self, headers: Headers, request_id: str) -> Caller:
        """Who calls. Raises `ApiError` for a request that must not come in."""
        if self._traffic.is_closing:
            closing = {"Retry-After": "5", "Connection": "close"}
            raise ApiError(503, "the server is shutting down", code="service_unavailable", type="server_error", headers=closing)
        key = sent_key(headers, self._keys) if self._keys else None
        return Caller(
            tenant=ANONYMOUS if key is None else key.tenant,
            request_id=request_id,
            session=checked_session(headers.get(SESSION_HEADER)),
            may_go_ahead=key is None or key.may_go_ahead,
            timeout=self._config.request_timeout,
        )


def route_path(path: str, root_path: str) -> str:
    """The path that routes are matched with, as the framework has it: without the root path, where it begins with it."""
    return path[len(root_path) :] if root_path and f"{path}/".startswith(f"{root_path}/") else path


def _over_capacity(max_connections: int) -> ApiError:
    message = f"the server has {max_connections} connections with requests under way, and takes no more: try again"
    headers = {"Retry-After": "1", "Connection": "close"}
    return ApiError(503, message, code="too_many_connections", type="server_error", headers=headers)


def sent_key(headers: Headers, keys: KeyRing) -> ApiKey:
    """The one of the keys that was sent. Raises `ApiError` 401."""
    kind, _, sent = headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not sent:
        message = "no API key was sent: send it in the header 'Authorization: Bearer KEY'"
    else:
        found = keys.find(sent.strip().encode("latin-1"))
        if found is not None:
            return found
        message = "the API key is not one of this server's"
    raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
