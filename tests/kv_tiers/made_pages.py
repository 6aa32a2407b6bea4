"""Pages whose bytes follow from their key, so that a wrong one is seen wherever it turns up."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

import numpy as np

from jaxinfer.kv_tiers.disk_file import ALIGNMENT, DiskFile
from jaxinfer.kv_tiers.tiers import Tiers

PAGE_BYTES = 96
MODEL = b"model, weights, layout"


def key_of(number: int) -> bytes:
    return sha256(b"key %d" % number).digest()[:16]


def page_of(key: bytes, page_bytes: int = PAGE_BYTES) -> np.ndarray:
    digest = sha256(key).digest()
    return np.frombuffer((digest * (page_bytes // len(digest) + 1))[:page_bytes], np.uint8)


def disk_size(num_slots: int, page_bytes: int = PAGE_BYTES) -> int:
    """The smallest size of a file of at most 32 pages."""
    assert num_slots <= 32
    return 2 * ALIGNMENT + num_slots * -(-page_bytes // ALIGNMENT) * ALIGNMENT


def put(tiers: Tiers, *numbers: int) -> None:
    """One after another, each written before the next: what is evicted then depends on nothing but the order."""
    for number in numbers:
        tiers.put([(key_of(number), page_of(key_of(number), tiers.page_bytes))])
        assert tiers.flush(20)


def fetch(tiers: Tiers, *numbers: int) -> int:
    """How many leading pages come back; each must be right. Waits until the reader is idle again."""
    pages = tiers.fetch([key_of(number) for number in numbers]).result(20)
    tiers.fetch([]).result(20)
    for number, page in zip(numbers, pages, strict=False):
        assert page.tobytes() == page_of(key_of(number), tiers.page_bytes).tobytes(), number
    return len(pages)


def pages_by_tier(tiers: Tiers, numbers: Iterable[int]) -> tuple[list[int], list[int]]:
    """Which pages are in host memory, and which only on disk."""
    found = {number: tiers.find([key_of(number)]) for number in numbers}
    return [n for n, f in found.items() if f.host_bytes], [n for n, f in found.items() if f.disk_bytes]


def fill(path, num_pages: int, size: int | None = None, fingerprint: bytes = MODEL, page_bytes: int = PAGE_BYTES) -> None:
    """Write pages 0, 1, ... to a file."""
    file = DiskFile(str(path), size or disk_size(num_pages, page_bytes), page_bytes, fingerprint)
    for slot in range(num_pages):
        file.write(slot, key_of(slot), page_of(key_of(slot), page_bytes))
    file.close()


def read_all(file: DiskFile) -> set[bytes]:
    """The keys of a file's pages that are whole; each must be right."""
    good = set()
    for stored in file.stored:
        out = np.zeros(PAGE_BYTES, np.uint8)
        if file.read(stored.slot, stored.checksum, out):
            assert out.tobytes() == page_of(stored.key).tobytes()
            good.add(stored.key)
    return good
