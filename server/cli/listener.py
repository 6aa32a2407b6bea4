"""The socket that a server listens on."""

from __future__ import annotations

import socket

from jaxinfer.config import ConfigError
from server.config import ServerConfig

BACKLOG = 2048  # connections, uvicorn's default


def listening_socket(config: ServerConfig) -> socket.socket:
    """Listens on `host` and `port`. Raises `ConfigError` where that fails."""
    try:
        family, *_, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # clients that connect now wait: a port in use shows only here where both servers are new
        listener.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(f"can't listen on {config.host} port {config.port}: {error}; choose others with --host and --port") from error
    return listener
