"""Page pools in which everything that no request may read is NaN."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NUM_LAYERS, LAYER = 3, 1


def poisoned_pool(
    random: np.random.Generator, contexts: Sequence[int], num_kv_heads: int, page_size: int, head_size: int, spare: int = 2
) -> tuple[np.ndarray, np.ndarray]:
    """Pages of keys and values of several layers, and a page table, that hold `contexts` tokens for each request in LAYER, float32.

    Pages are handed out in a shuffled order; table entries past a context, the rest of its last page, page 0, all other pages and
    layers lead to NaN.
    """
    needed = [-(-length // page_size) for length in contexts]
    num_pages = sum(needed) + 3
    pages = random.permutation(np.arange(1, num_pages))
    poisoned = pages[sum(needed) :]
    pool = np.full((NUM_LAYERS, 2, num_pages, num_kv_heads, page_size, head_size), np.nan, np.float32)
    table = random.choice(np.append(poisoned, 0), (len(contexts), max(needed) + spare)).astype(np.int32)
    for row, (length, count) in enumerate(zip(contexts, needed, strict=True)):
        table[row, :count], pages = pages[:count], pages[count:]
        for position in range(length):
            page, place = table[row, position // page_size], position % page_size
            pool[LAYER, :, page, :, place] = random.standard_normal((2, num_kv_heads, head_size))
    return pool, table
