"""ArrayTransfer: pages from host to host by `jax.experimental.transfer`, each call with a deadline.

Pages go as arrays of bytes on CPU devices, whatever devices the engines have: that transfer goes through the host's
memory anyway, takes an array's local shards for the whole of it, and overwrites nothing that a donated buffer could be
part of. It has no TLS and asks nobody who they are: who knows the number of an array, 63 random bits, gets it.

Its own time-outs do nothing (JAX 0.10.2): a pull of what nobody offers, or from who has stopped, never returns. So it
waits in a thread that is given up at the deadline.
"""

from __future__ import annotations

import queue
import secrets
import socket
import threading
from typing import Any

import jax
import numpy as np
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from jaxinfer.kv_transfer.transport_choice import ArrayError

_COPY_BYTES = 1 << 24  # of a copy on its way; JAX's default of 256 MiB is held whole
_MOST_COPIES = 4


class ArrayTransfer:
    """Offers arrays and pulls them, from any thread, until the process ends. `host`: the address that it listens on, at
    a port of its own; `seconds`: that a pull may take. Raises `OSError` where it can't listen."""

    def __init__(self, host: str, seconds: float = 10.0) -> None:
        self._device, self._seconds = jax.local_devices(backend="cpu")[0], seconds
        address = _numeric(host, 0)
        try:
            self._server = transfer.start_transfer_server(self._device.client, address, [address], _MOST_COPIES, _COPY_BYTES)
        except RuntimeError as error:
            raise OSError(f"jax.experimental.transfer can't listen on {host}: {error}") from error
        self._connections: dict[tuple[str, int], transfer.TransferConnection] = {}
        self._lock = threading.Lock()

    @property
    def port(self) -> int:
        return int(self._server.address().rpartition(":")[2])

    def offer(self, pages: np.ndarray) -> tuple[int, object]:
        """Let one pull have uint8[pages, bytes of a page]. Returns its number, and what is to be kept until then.
        Raises `ArrayError`."""
        number = secrets.randbits(63)
        try:
            array = jax.device_put(pages, self._device)
            self._server.await_pull(number, [array])
        except RuntimeError as error:
            raise ArrayError(f"an array can't be offered: {error}") from error
        return number, array

    def pull(self, host: str, port: int, number: int, shape: tuple[int, int]) -> np.ndarray:
        """What is offered under this number, uint8[shape]. Raises `ArrayError` where it does not come in time."""
        results: queue.SimpleQueue[np.ndarray | Exception] = queue.SimpleQueue()

        def run() -> None:
            try:
                spec = jax.ShapeDtypeStruct(shape, np.uint8, sharding=SingleDeviceSharding(self._device))
                results.put(np.asarray(self._connection(host, port).pull(number, [spec])[0]))
            except Exception as error:
                results.put(error)

        threading.Thread(target=run, name="pull an array", daemon=True).start()
        try:
            result = results.get(timeout=self._seconds)
        except queue.Empty:
            self._forget(host, port)
            raise ArrayError(f"an array did not come within {self._seconds:g} s") from None
        if isinstance(result, Exception):
            self._forget(host, port)
            raise ArrayError(f"an array did not come: {result}") from result
        return result

    def _connection(self, host: str, port: int) -> Any:
        with self._lock:
            if (host, port) not in self._connections:
                self._connections[host, port] = self._server.connect(_numeric(host, port))
            return self._connections[host, port]

    def _forget(self, host: str, port: int) -> None:
        with self._lock:
            self._connections.pop((host, port), None)


def _numeric(host: str, port: int) -> str:
    """The address as JAX wants it. Raises `OSError` for a name that nobody knows."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
    return f"[{found[0]}]:{port}" if ":" in str(found[0]) else f"{found[0]}:{port}"
