"""The real server in a thread, on a free port, for clients that need a socket."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import FastAPI

from server.config import ServerConfig
from server.graceful import GracefulServer


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """The base URL of `app` while it is served; leaving ends the server as SIGTERM does."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        started = threading.Event()
        server = GracefulServer(app, ServerConfig(log_level="warning", shutdown_timeout=5.0), on_started=started.set)
        loops: list[asyncio.AbstractEventLoop] = []

        async def serve() -> None:
            loops.append(asyncio.get_running_loop())
            await server.serve(sockets=[listener])

        thread = threading.Thread(target=asyncio.run, args=(serve(),))
        thread.start()
        assert started.wait(10)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            loops[0].call_soon_threadsafe(server.end)
            thread.join(20)
            assert not thread.is_alive()
