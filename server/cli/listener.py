"""The socket that a server listens on."""

from __future__ import annotations

import socket

from jaxinfer.config import ConfigError
from server.config import ServerConfig

BACKLOG = 2048  # connections, uvicorn's default


def listening_socket(config: ServerConfig) -> socket.socket:
    """Listens on `host` and `port`. Raises `ConfigError` where that can't be."""
    try:
        family, *_, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)  # who comes now waits: taken ports show only here where both servers are new
    except OSError as error:
        raise ConfigError(f"can't listen on {config.host} port {config.port}: {error}; choose others with --host and --port") from error
    return listener
