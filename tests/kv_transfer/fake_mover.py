"""In place of a mesh's programs: a pool of pages that are rows of an array."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxinfer.kv_transfer.page_moves import MOVE_BUCKETS


class HostCopy:
    """Gathered pages, which nobody may ask for before their copy was begun."""

    def __init__(self, pages: np.ndarray) -> None:
        self._pages = pages
        self._is_begun = False

    def copy_to_host_async(self) -> None:
        self._is_begun = True

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        assert self._is_begun
        return self._pages


class FakeMover:
    """Pages out of a pool [pages, tokens] and into it. The pool holds what it held when a move was begun, as on a
    device."""

    def __init__(self, pool: np.ndarray) -> None:
        self.pool = pool
        self.num_gathered = self.num_scattered = 0

    def gather(self, page_ids: Sequence[int]) -> HostCopy:
        assert 0 < len(page_ids) <= MOVE_BUCKETS[-1]
        self.num_gathered += len(page_ids)
        padding = np.zeros((-len(page_ids) % MOVE_BUCKETS[0], self.pool.shape[1]), self.pool.dtype)
        return HostCopy(np.concatenate([self.pool[list(page_ids)], padding]))

    def put_bytes(self, pages: np.ndarray) -> np.ndarray:
        assert 0 < len(pages) <= MOVE_BUCKETS[-1]
        return pages.view(self.pool.dtype).copy()

    def scatter(self, moved: np.ndarray, page_ids: Sequence[int]) -> None:
        assert len(moved) == len(page_ids)
        self.num_scattered += len(page_ids)
        self.pool[list(page_ids)] = moved
