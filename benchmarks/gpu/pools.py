"""Page pools full of random numbers, made on the device."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.sizes import Sizes

_SPARE = 2  # pages, and entries of a page table, that no request has


def random_pages(
    random: np.random.Generator, contexts: np.ndarray, num_layers: int, sizes: Sizes, fill: float
) -> tuple[jax.Array, jax.Array]:
    """A pool [L, 2, P, K, G, H] whose last layer holds so many tokens for each request in shuffled pages, and their page tables. With `fill` 0
    every place of every layer is random; otherwise all that no request may read holds `fill`: the rest of a last page, spare pages, page
    0, which entries past a context lead to, and the other layers."""
    size = sizes.page_size
    needed = -(-contexts // size)
    num_pages = int(needed.sum()) + 1 + _SPARE
    pages = random.permutation(np.arange(1, num_pages))
    table = np.zeros((len(contexts), int(needed.max()) + (_SPARE if fill else 0)), np.int32)
    used = np.zeros(num_pages, np.int32)  # tokens of each page
    for row, (length, count) in enumerate(zip(contexts, needed, strict=True)):
        own, pages = pages[:count], pages[count:]
        table[row, :count] = own
        used[own] = np.minimum(size, length - np.arange(count) * size)
    shape = (2, num_pages, sizes.model.num_kv_heads, size, sizes.model.head_size)
    pool = jnp.zeros((num_layers, *shape), sizes.dtype)
    for layer in range(num_layers):
        key = jax.random.key(int(random.integers(2**31)), impl="rbg")
        seen = used if layer == num_layers - 1 else np.zeros_like(used)
        pool = _fill(pool, layer, key, jnp.asarray(seen), fill, is_filled=bool(fill))
    return pool, jnp.asarray(table)


@partial(jax.jit, donate_argnums=0, static_argnames="is_filled")
def _fill(pool: jax.Array, layer: int, key: jax.Array, used: jax.Array, fill: float, *, is_filled: bool) -> jax.Array:
    numbers = jax.random.normal(key, pool.shape[1:], pool.dtype)
    if is_filled:
        is_used = jnp.arange(pool.shape[4]) < used[:, None]
        numbers = jnp.where(is_used[:, None, :, None], numbers, fill).astype(pool.dtype)
    return pool.at[layer].set(numbers)
