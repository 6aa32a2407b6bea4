"""PageCoder: pages in fewer bytes, without loss; and where that pays. Imports no JAX."""

from __future__ import annotations

import time
from typing import Literal

import numpy as np

from checkpoints.exponent_coding import ExponentCoder
from jaxinfer.kv_tiers.rate import Rate
from jaxinfer.kv_transfer.handoff import HandOffError

Compression = Literal["auto", "on", "off"]

CODED_SIZES = (2, 4)  # bytes of values with exponents

_SAMPLE_VALUES = 1 << 17
_LINK_GUESS = 1e9  # bytes a second


class PageCoder(ExponentCoder):
    """For values of 2 or 4 bytes. Belongs to one thread. Raises `ValueError` for values of another size: a byte has no
    exponent of its own."""

    def __init__(self, bytes_per_value: int) -> None:
        if bytes_per_value not in CODED_SIZES:
            raise ValueError(f"values of {bytes_per_value} bytes have no exponent that could be coded apart: only those of 2 or 4 have")
        super().__init__(bytes_per_value)

    def decode(self, coded: memoryview | bytes, data: np.ndarray) -> None:
        """Write the page to uint8[bytes of a page]. Raises `HandOffError` for what `encode` did not give."""
        try:
            super().decode(coded, data)
        except ValueError as error:
            raise HandOffError(f"a coded page can't be read: {error}") from error


class LinkCoding:
    """Whether pages are worth coding on the way from each host. `auto`: where its link, as measured lately, is slower
    than the coder gains. Raises `ValueError` for `on` with values that can't be coded."""

    def __init__(self, compression: Compression, bytes_per_value: int) -> None:
        self._compression, self._bytes_per_value = compression, bytes_per_value
        if compression == "on":
            PageCoder(bytes_per_value)
        self._gain = worthwhile_rate(bytes_per_value) if compression == "auto" and bytes_per_value in CODED_SIZES else 0.0
        self._links: dict[str, Rate] = {}

    def coder(self, host: str, now: float) -> PageCoder | None:
        """One for a pull from this host, if its pages should come coded. `now`: seconds of any monotonic clock."""
        link = self._links.get(host)
        is_slow = link is not None and link.bytes_per_second(now) < self._gain
        return PageCoder(self._bytes_per_value) if self._compression == "on" or is_slow else None

    def observe(self, host: str, num_bytes: int, seconds: float, now: float) -> None:
        """So many bytes came over the wire in that time."""
        self._links.setdefault(host, Rate(_LINK_GUESS)).observe(num_bytes, seconds, now)


def worthwhile_rate(bytes_per_value: int) -> float:
    """Bytes a second of a link below which coding saves time, as measured on this machine with normal values.

    A byte takes 1 / link seconds as it is, and 1 / coder + ratio / link coded."""
    coder, values = PageCoder(bytes_per_value), np.random.default_rng(0).standard_normal(_SAMPLE_VALUES).astype(np.float32)
    page = values.view(f"<u{bytes_per_value}")[bytes_per_value == 2 :: 4 // bytes_per_value].copy().view(np.uint8)
    coder.encode(page)  # the first allocates
    began = time.perf_counter()
    num_coded = sum(map(len, coder.encode(page)))
    return (page.nbytes - num_coded) / (time.perf_counter() - began)
