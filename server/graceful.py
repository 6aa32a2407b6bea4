"""uvicorn with a graceful end: after SIGTERM new requests are answered 503, running ones finish, and the process exits
0. A second SIGTERM ends it at once."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import uvicorn
from starlette.datastructures import State
from starlette.types import Receive, Scope, Send

from server.config import ServerConfig
from server.http_limits import MAX_HEAD_BYTES, protocol_factory
from server.tls import Tls
from server.tls_listener import TlsListener

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
CLOSE_TIMEOUT = 5  # seconds for connections to close once their requests have finished, or timed out


class App(Protocol):
    """An ASGI app whose `state` has `traffic` and `keys`, once it serves."""

    @property
    def state(self) -> State: ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class GracefulServer(uvicorn.Server):
    """uvicorn closes its sockets at the first signal and dies of that signal in the end; here both wait for the
    requests."""

    def __init__(
        self, app: App, config: ServerConfig, on_started: Callable[[], None] = lambda: None, before_cut: Callable[[], None] = lambda: None
    ) -> None:
        """`before_cut` is called when a second signal ends the process, and must be fast."""
        self._tls = Tls.of(config)
        self._make_protocol = protocol_factory(config)
        settings = uvicorn.Config(
            app,  # type: ignore[arg-type]  # uvicorn's own types of scopes are narrower
            host=config.host,
            port=config.port,
            log_config=None,  # logs.configure has configured it
            access_log=False,  # request_log's has more
            http=self._make_protocol,  # type: ignore[arg-type]  # called as a class is
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            # uvicorn passes it to the loop, which accepts fractions.
            timeout_keep_alive=config.idle_timeout,  # type: ignore[arg-type]
            timeout_graceful_shutdown=CLOSE_TIMEOUT,
            server_header=False,
        )
        super().__init__(settings)
        self._app, self._patience = app, config.shutdown_timeout
        self._on_started, self._before_cut = on_started, before_cut
        self._ending: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's, with TLS begun here; then reports that requests are accepted."""
        if self._tls is None:
            await super().startup(sockets)
        else:
            await super().startup(sockets=[])  # no server of its own
            make = functools.partial(self._make_protocol, config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
            listeners = [TlsListener(one, self._tls.context, make, self.config.backlog) for one in sockets or ()]
            self.servers = listeners  # type: ignore[assignment]  # uvicorn only closes them and waits for it
        self._on_started()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replaces uvicorn's: signals begin the graceful end, and are not raised again after it."""
        loop = asyncio.get_running_loop()
        is_main = threading.current_thread() is threading.main_thread()
        for number in SIGNALS if is_main else ():
            loop.add_signal_handler(number, self._on_signal, number)
        if is_main:
            loop.add_signal_handler(signal.SIGHUP, self.reload)
        try:
            yield
        finally:
            for number in (*SIGNALS, signal.SIGHUP) if is_main else ():
                loop.remove_signal_handler(number)
            if is_main:
                signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the rest ends without it too

    def reload(self) -> None:
        """Reads the API keys and the certificate again, on SIGHUP. What can't be read stays unchanged."""
        for keys in getattr(self._app.state, "key_rings", ()):  # none before it serves: they are still to be read
            keys.reload()
        if self._tls is not None:
            self._tls.reload()

    def end(self) -> None:
        """Begins the graceful end."""
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._end())

    def _on_signal(self, number: int) -> None:
        if self._ending is None:
            self.end()
            return
        traffic = getattr(self._app.state, "traffic", None)
        logger.warning("second signal: exiting at once, %d requests are cut off", 0 if traffic is None else traffic.num_open)
        self._before_cut()
        logging.shutdown()
        os._exit(128 + number)  # cancelling everything would take time, and each request would report it

    async def _end(self) -> None:
        traffic = getattr(self._app.state, "traffic", None)
        if traffic is None:  # it doesn't serve yet
            self.should_exit = True
            return
        traffic.close()
        if traffic.num_open:
            logger.warning("shutting down: waiting up to %g s for %d requests", self._patience, traffic.num_open)
        try:
            await asyncio.wait_for(traffic.until_quiet(), self._patience)
        except TimeoutError:
            logger.warning("shutting down: %d requests did not finish in time and are aborted", traffic.num_open)
            await self._app.state.abort()
        self.should_exit = True
