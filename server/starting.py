"""What a server answers before its engine is ready: that it is alive, that it is not ready, and its progress."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

from starlette.applications import Starlette
from starlette.datastructures import State
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxinfer.start_progress import StartProgress
from server.openai.api_error import ApiError
from server.page import STATIC_FILES, chat_page
from server.paths import route_path

RETRY_AFTER = "5"  # seconds: the duration of a start is unknown


class StartingApp:
    """An ASGI app that builds another one in a thread of its own and then passes every request to it.

    `failure` is the error of building, if it failed; `on_failed` is called then, `on_ready` once requests are served,
    both in the event loop.
    """

    def __init__(
        self,
        build: Callable[[], Starlette],
        progress: StartProgress,
        root_path: str,
        on_ready: Callable[[], None],
        on_failed: Callable[[], None],
    ) -> None:
        self._build, self._progress, self._root_path = build, progress, root_path
        self._on_ready, self._on_failed = on_ready, on_failed
        self._app: Starlette | None = None
        self._is_ending = asyncio.Event()
        self.is_building = False
        self.failure: BaseException | None = None

    @property
    def state(self) -> State:
        """The built app's; empty before."""
        return State() if self._app is None else self._app.state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif self._app is not None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer(scope)(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        serving = asyncio.create_task(self._serve())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self._is_ending.set()
        if self.is_building:  # nothing can stop it, and nothing is lost
            serving.cancel()
        else:
            await serving
        await send({"type": "lifespan.shutdown.complete"})

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        built: asyncio.Future[Starlette] = loop.create_future()
        self.is_building = True
        threading.Thread(target=self._build_in_thread, args=(loop, built), name="start", daemon=True).start()
        try:
            app = await built
            self.is_building = False
            async with app.router.lifespan_context(app):
                self._app = app
                self._on_ready()
                await self._is_ending.wait()
        except Exception as error:
            self.is_building, self.failure = False, error
            self._on_failed()

    def _build_in_thread(self, loop: asyncio.AbstractEventLoop, built: asyncio.Future[Starlette]) -> None:
        try:
            app = self._build()
        except BaseException as error:
            self._tell(loop, built, lambda error=error: built.set_exception(error))  # type: ignore[misc]
        else:
            self._tell(loop, built, lambda: built.set_result(app))

    def _tell(self, loop: asyncio.AbstractEventLoop, built: asyncio.Future[Starlette], how: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed: the server was ended meanwhile
            loop.call_soon_threadsafe(lambda: None if built.done() else how())

    def _answer(self, scope: Scope) -> ASGIApp:
        path, doing = route_path(scope["path"], self._root_path), self._progress.describe()
        if path in ("/health", "/ping"):
            return JSONResponse({"status": "starting", "doing": doing})
        if path == "/ready":
            return JSONResponse({"status": "starting", "doing": doing}, 503, {"Retry-After": RETRY_AFTER})
        if path == "/":
            return chat_page()
        if path.startswith("/static/"):
            return _static(path)
        message = f"the server is starting ({doing}): try again in a few seconds"
        return ApiError(503, message, code="starting", type="server_error", headers={"Retry-After": RETRY_AFTER}).response()


def _static(path: str) -> ASGIApp:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        response: Response
        try:
            response = await STATIC_FILES.get_response(path.removeprefix("/static/"), scope)
        except HTTPException as error:
            response = ApiError(error.status_code, f"there is no {path}", code="unknown_url").response()
        await response(scope, receive, send)

    return answer
