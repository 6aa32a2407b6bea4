"""What every HTTP request passes first: it is counted, needs a key, is turned away during shutdown, and gets an answer whatever fails."""

from __future__ import annotations

import asyncio
import hmac
import uuid
from collections import Counter

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.openai.errors import ApiError, from_exception
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

    def __init__(self, app: ASGIApp, api_keys: tuple[str, ...], traffic: Traffic) -> None:
        self._app, self._traffic = app, traffic
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0  # no answer yet
        request_id = f"req_{uuid.uuid4().hex}"

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        is_guarded = scope["path"].startswith(GUARDED)
        try:
            if is_guarded:
                self._traffic.enter()
                self._check(scope)
            await self._app(scope, receive, send_counted)
        except ClientGone:
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

    def _check(self, scope: Scope) -> None:
        """Raises `ApiError` for a request that must not come in."""
        if self._traffic.is_closing:
            headers = {"Retry-After": "5", "Connection": "close"}
            raise ApiError(503, "the server is shutting down", code="service_unavailable", type="server_error", headers=headers)
        if not self._keys:
            return
        kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not key:
            message = "no API key was sent: send it in the header 'Authorization: Bearer KEY'"
        elif not any(hmac.compare_digest(key.strip().encode("latin-1"), known) for known in self._keys):
            message = "the API key is not one of this server's"
        else:
            return
        raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
