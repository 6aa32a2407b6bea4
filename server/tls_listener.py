"""Accepts connections and begins TLS on each.

asyncio's servers can do both at once. But then a connection's protocol is created only after the handshake, whose
time-out uvicorn doesn't set: http_limits would not apply to sockets that send none.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from server.http_limits import LimitedProtocol

logger = logging.getLogger(__name__)

RETRY_DELAY = 1.0  # seconds until the system may have descriptors again


class TlsListener:
    """The listening socket, with the methods of `asyncio.Server` that uvicorn uses. Needs a running loop."""

    def __init__(
        self, listener: socket.socket, context: ssl.SSLContext, make_protocol: Callable[[], LimitedProtocol], backlog: int
    ) -> None:
        listener.setblocking(False)
        listener.listen(backlog)
        self._listener, self._context, self._make_protocol = listener, context, make_protocol
        self._handshakes: set[asyncio.Task[None]] = set()
        self._task = asyncio.get_running_loop().create_task(self._accept())

    def close(self) -> None:
        """Accepts no more, and ends running handshakes."""
        for task in (self._task, *self._handshakes):
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(self._task, *self._handshakes, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except ConnectionAbortedError:  # it left while it waited
                continue
            except OSError as error:
                logger.warning("can't accept connections, trying again in %g s: %s", RETRY_DELAY, error)
                await asyncio.sleep(RETRY_DELAY)
                continue
            task = self._make_protocol().begin_tls(connection, self._context)
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)
