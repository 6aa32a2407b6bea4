"""Relay: between JAX's client in this process and its service in the first one, so that the client never learns of the service's end. It would
abort the process at once, with a C++ trace. Who is gone is `channel`'s to notice. Imports no JAX."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

_CHUNK = 1 << 16
_RETRY = 0.2  # seconds between attempts to reach a service that does not listen yet


class Relay:
    """Listens on a loopback address until the process ends. A connection whose other end is gone stays open, and silent."""

    def __init__(self, address: tuple[str, int], seconds: float) -> None:
        """`seconds`: how long the service may take until it listens."""
        self._target, self._seconds = address, seconds
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []  # so that none is closed
        self._start(self._accept)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            self._open.append(near)
            self._start(self._connect, near)

    def _connect(self, near: socket.socket) -> None:
        deadline = time.monotonic() + self._seconds
        while time.monotonic() < deadline:
            try:
                far = socket.create_connection(self._target, timeout=self._seconds)
            except OSError:
                time.sleep(_RETRY)
                continue
            far.settimeout(None)
            self._open.append(far)
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._start(_pump, near, far)
            _pump(far, near)
            return

    def _start(self, target: object, *arguments: socket.socket) -> None:
        threading.Thread(target=target, args=arguments, name="jax-relay", daemon=True).start()  # type: ignore[arg-type]


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):  # either end is gone: nobody is told
        while data := source.recv(_CHUNK):
            sink.sendall(data)
