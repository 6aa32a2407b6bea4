"""Relay: connects JAX's client in this process with its service in the first, and hides that the service has ended: the
client would abort this process with a C++ trace. `channel` detects lost processes. Imports no JAX."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

_CHUNK = 1 << 16
_RETRY = 0.2  # seconds between attempts to connect to a service that isn't listening yet


class Relay:
    """Listens on a loopback address until the process ends. A connection whose other end is closed stays open."""

    def __init__(self, address: tuple[str, int], seconds: float) -> None:
        """`seconds`: timeout for the service to start listening."""
        self._target, self._seconds = address, seconds
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []  # references that keep connections open
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
    with contextlib.suppress(OSError):  # one end is closed: the other must not notice
        while data := source.recv(_CHUNK):
            sink.sendall(data)
