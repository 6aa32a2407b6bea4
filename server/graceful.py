"""uvicorn with a graceful end: after SIGTERM new requests are answered 503, running ones finish, and the process exits 0."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from server.config import ServerConfig
from server.http_limits import MAX_HEAD_BYTES, protocol_factory
from server.tls import Tls

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
CLOSE_TIMEOUT = 5  # seconds for connections to close once their requests have finished, or run out of time


class GracefulServer(uvicorn.Server):
    """uvicorn closes its sockets at the first signal and dies of that signal in the end; here both wait for the requests."""

    def __init__(self, app: FastAPI, config: ServerConfig, on_started: Callable[[], None]) -> None:
        settings = uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            log_config=None,  # logs.configure's holds
            access_log=False,  # request_log's has more
            http=protocol_factory(config),  # type: ignore[arg-type]  # called as a class is
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            timeout_keep_alive=config.idle_timeout,  # type: ignore[arg-type]  # handed on to the loop, which takes fractions
            timeout_graceful_shutdown=CLOSE_TIMEOUT,
            server_header=False,
        )
        self._tls = Tls.of(config)
        if self._tls is not None:
            settings.load()  # which would otherwise come later and put its own context here
            settings.ssl = self._tls.context
        super().__init__(settings)
        self._traffic, self._key_rings, self._patience = app.state.traffic, app.state.key_rings, config.shutdown_timeout
        self._on_started = on_started
        self._ending: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's, then tell that requests are taken."""
        await super().startup(sockets)
        self._on_started()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replaces uvicorn's: signals begin the graceful end, and are not raised again after it."""
        loop = asyncio.get_running_loop()
        is_main = threading.current_thread() is threading.main_thread()
        for number in SIGNALS if is_main else ():
            loop.add_signal_handler(number, self.end)
        if is_main:
            loop.add_signal_handler(signal.SIGHUP, self.reload)
        try:
            yield
        finally:
            for number in (*SIGNALS, signal.SIGHUP) if is_main else ():
                loop.remove_signal_handler(number)

    def reload(self) -> None:
        """Read the API keys and the certificate again, as SIGHUP asks. What can't be read stays as it was."""
        for keys in self._key_rings:
            keys.reload()
        if self._tls is not None:
            self._tls.reload()

    def end(self) -> None:
        """Begin the end; called a second time, end at once."""
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._end())
        else:
            self.should_exit = self.force_exit = True

    async def _end(self) -> None:
        self._traffic.close()
        if self._traffic.num_open:
            logger.warning("shutting down: waiting up to %g s for %d requests", self._patience, self._traffic.num_open)
        try:
            await asyncio.wait_for(self._traffic.until_quiet(), self._patience)
        except TimeoutError:
            logger.warning("shutting down: %d requests did not finish in time and are aborted", self._traffic.num_open)
        self.should_exit = True
