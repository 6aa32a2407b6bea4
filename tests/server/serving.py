"""The real server in a thread, on a free port, for clients that need a socket."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fastapi import FastAPI

from server.config import ServerConfig
from server.graceful import GracefulServer

NEW_LOOP: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop


@contextmanager
def served(
    app: FastAPI,
    config: ServerConfig | None = None,
    on_made: Callable[[GracefulServer], None] = lambda _: None,
) -> Iterator[str]:
    """The base URL of `app` while it is served; leaving ends the server as SIGTERM does."""
    config = config or ServerConfig(log_level="warning", shutdown_timeout=5.0)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        started = threading.Event()
        server = GracefulServer(app, config, on_started=started.set)
        on_made(server)
        loops: list[asyncio.AbstractEventLoop] = []

        async def serve() -> None:
            loops.append(asyncio.get_running_loop())
            await server.serve(sockets=[listener])

        def run() -> None:
            with asyncio.Runner(loop_factory=NEW_LOOP) as runner:
                runner.run(serve())

        thread = threading.Thread(target=run)
        thread.start()
        assert started.wait(10)
        try:
            yield f"{'http' if config.ssl_certfile is None else 'https'}://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            loops[0].call_soon_threadsafe(server.end)
            thread.join(20)
            assert not thread.is_alive()
