"""Coded pages: the same bytes, fewer of them, and only where the link is slower than the coder."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from jaxinfer.kv_transfer.handoff import HandOffError
from jaxinfer.kv_transfer.page_coding import LinkCoding, PageCoder

MOST = {"bfloat16": 0.75, "float16": 0.95, "float32": 0.88}  # of the bytes, for normal values


def normal(dtype: str) -> np.ndarray:
    values = np.random.default_rng(0).standard_normal(30_000) * np.exp(np.random.default_rng(1).standard_normal(30_000))
    return values.astype(np.dtype(dtype)).view(np.uint8)


@pytest.mark.parametrize("dtype", MOST)
def test_a_page_comes_back_bit_by_bit_from_fewer_bytes(dtype: str) -> None:
    coder, page = PageCoder(np.dtype(dtype).itemsize), normal(dtype)
    coded = b"".join(coder.encode(page))
    found = np.full_like(page, 0xA5)
    coder.decode(memoryview(coded), found)
    np.testing.assert_array_equal(found, page)
    assert len(coded) < MOST[dtype] * len(page)


@pytest.mark.parametrize("size", [2, 4])
def test_any_bytes_come_back_not_a_number_and_noise_among_them(size: int) -> None:
    coder, noise = PageCoder(size), np.random.default_rng(0).integers(0, 256, 4096, np.uint8)
    for page in (noise, np.zeros(64, np.uint8), np.full(64, 0xFF, np.uint8), noise[:size]):
        found = np.empty_like(page)
        coder.decode(memoryview(b"".join(coder.encode(page))), found)
        np.testing.assert_array_equal(found, page)


@pytest.mark.parametrize("size", [2, 4])
def test_what_is_no_code_is_refused(size: int) -> None:
    coder, page = PageCoder(size), normal("bfloat16")
    coded, shorter = b"".join(coder.encode(page)), b"".join(coder.encode(page[:-4096]))
    for garbage in (b"", coded[:100], coded[:-1], shorter, coded[: (size - 1) * len(page) // size], b"\xff" * len(coded)):
        with pytest.raises(HandOffError, match="coded page"):
            coder.decode(memoryview(garbage), np.empty_like(page))


def test_pages_come_coded_where_the_link_is_slow() -> None:
    auto = LinkCoding("auto", np.dtype(ml_dtypes.bfloat16).itemsize)
    assert auto.coder("near", 0.0) is None, "nothing is known of it yet"
    for host, rate in (("near", 5e9), ("far", 1e6)):
        for now in range(10):
            auto.observe(host, 10_000_000, 1e7 / rate, float(now))
    assert (auto.coder("near", 10.0), auto.coder("far", 10.0) is None) == (None, False)
    assert auto.coder("far", 1000.0) is None, "a link that was slow once is tried again"
    assert LinkCoding("off", 2).coder("far", 0.0) is None
    assert LinkCoding("on", 2).coder("near", 0.0) is not None
    assert LinkCoding("auto", 1).coder("far", 0.0) is None, "values of a byte have no exponent apart"
    with pytest.raises(ValueError, match="values of 1 bytes"):
        LinkCoding("on", 1)
