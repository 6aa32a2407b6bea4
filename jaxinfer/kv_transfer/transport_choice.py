"""TransportChoice: whether pages from a host come over the socket, or as arrays of JAX's transfer. Imports no JAX."""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np

from jaxinfer.kv_tiers.rate import Rate
from jaxinfer.kv_transfer.handoff import HandOffError

Transport = Literal["socket", "jax", "auto"]

_GUESS = 1e11  # bytes a second: a way that was never tried looks quicker than any


class ArrayError(HandOffError):
    """An array did not come, or can't be offered. The pages may still come over the socket."""


class Arrays(Protocol):
    """See `ArrayTransfer`."""

    @property
    def port(self) -> int: ...

    def offer(self, pages: np.ndarray) -> tuple[int, object]: ...

    def pull(self, host: str, port: int, number: int, shape: tuple[int, int]) -> np.ndarray: ...


class TransportChoice:
    """`jax`: arrays, until they have failed once with that host; `auto`: besides, only while they are the quicker way
    as measured lately; `socket`: never."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._failed: set[str] = set()
        self._rates: dict[tuple[str, bool], Rate] = {}  # by host, and whether it was as arrays

    def takes_arrays(self, host: str, now: float) -> bool:
        """For the next pull. `now`: seconds of any monotonic clock."""
        if self._transport != "auto" or host in self._failed:
            return self._transport == "jax" and host not in self._failed
        socket, arrays = (self._rates.get((host, way)) for way in (False, True))
        return socket is not None and (arrays is None or arrays.bytes_per_second(now) > socket.bytes_per_second(now))

    def observe(self, host: str, num_bytes: int, seconds: float, now: float, *, is_array: bool) -> None:
        """So many bytes came in that time."""
        self._rates.setdefault((host, is_array), Rate(_GUESS)).observe(num_bytes, seconds, now)

    def has_failed(self, host: str) -> None:
        """Arrays don't come from there."""
        self._failed.add(host)
