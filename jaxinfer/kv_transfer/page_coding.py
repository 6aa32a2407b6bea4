"""PageCoder: pages in fewer bytes, without loss: exponents are entropy-coded, the rest goes as it is. Imports no JAX.

Keys and values of a model have few distinct exponents, so their Huffman code has about 3 bits instead of 8; signs and
mantissas are noise. A coded page is its planes of signs and mantissas, then a Zstandard frame with the exponents.
"""

from __future__ import annotations

import time
from typing import Literal

import numpy as np
import zstandard

from jaxinfer.kv_tiers.rate import Rate
from jaxinfer.kv_transfer.handoff import HandOffError

Compression = Literal["auto", "on", "off"]

CODED_SIZES = (2, 4)  # bytes of values with exponents

_LEVEL = 1  # lower ones leave Huffman codes out, higher ones only look longer for repetitions, of which there are none
_SAMPLE_VALUES = 1 << 17
_LINK_GUESS = 1e9  # bytes a second


class PageCoder:
    """For values of 2 bytes (bfloat16, and float16, of which three bits of the mantissa are coded too) or 4 (float32).
    Belongs to one thread. Raises `ValueError` for values of another size: a byte has no exponent of its own."""

    def __init__(self, bytes_per_value: int) -> None:
        if bytes_per_value not in CODED_SIZES:
            raise ValueError(f"values of {bytes_per_value} bytes have no exponent that could be coded apart: only those of 2 or 4 have")
        self._type, self._bits = np.dtype(f"<u{bytes_per_value}"), 8 * bytes_per_value
        self._compressor, self._decompressor = zstandard.ZstdCompressor(_LEVEL), zstandard.ZstdDecompressor()

    def encode(self, page: np.ndarray) -> tuple[bytes, bytes]:
        """The planes and the frame of uint8[bytes of a page]."""
        values = page.view(self._type)
        # Turned by one bit, a sign stands below the mantissa, and the exponent has a byte to itself.
        turned = ((values << 1) | (values >> (self._bits - 1))).view(np.uint8).reshape(len(values), -1)
        return np.ascontiguousarray(turned[:, :-1].T).tobytes(), self._compressor.compress(turned[:, -1].tobytes())

    def decode(self, coded: memoryview, page: np.ndarray) -> None:
        """Write the page to uint8[bytes of a page]. Raises `HandOffError` for what `encode` did not give."""
        values = page.view(self._type)
        num_values, num_planes = len(values), self._type.itemsize - 1
        turned = np.empty((num_values, num_planes + 1), np.uint8)
        try:
            planes = np.frombuffer(coded, np.uint8, num_planes * num_values)
            exponents = self._decompressor.decompress(coded[planes.size :], max_output_size=num_values)
            turned[:, :-1] = planes.reshape(num_planes, num_values).T
            turned[:, -1] = np.frombuffer(exponents, np.uint8)
        except (ValueError, zstandard.ZstdError) as error:
            raise HandOffError(f"a coded page can't be read: {error}") from error
        words = turned.view(self._type)[:, 0]
        np.bitwise_or(words >> 1, words << (self._bits - 1), out=values)


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
