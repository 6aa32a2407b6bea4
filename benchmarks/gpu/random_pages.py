"""Page pools full of random numbers, made on the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

_SPARE = 2  # pages, and entries of a page table, that belong to no request


@dataclass(frozen=True)
class PageShape:
    """The shape of a layer's part of a page."""

    num_kv_heads: int
    page_size: int
    head_size: int
    dtype: str
    num_sides: int = 2  # keys and values; latents have one


def random_pages(
    random: np.random.Generator, contexts: np.ndarray, num_layers: int, shape: PageShape, fill: float
) -> tuple[jax.Array, jax.Array]:
    """A pool [L, 2, P, K, G, H] and its page tables. The last layer holds `contexts` tokens for each request in
    shuffled pages. With `fill` 0 every slot of every layer is random. Otherwise everything that no request may read
    holds `fill`: the rest of a last page, spare pages, page 0, which entries past a context point to, and the other
    layers."""
    size = shape.page_size
    needed = -(-contexts // size)
    num_pages = int(needed.sum()) + 1 + _SPARE
    pages = random.permutation(np.arange(1, num_pages))
    table = np.zeros((len(contexts), int(needed.max()) + (_SPARE if fill else 0)), np.int32)
    used = np.zeros(num_pages, np.int32)  # tokens of each page
    for row, (length, count) in enumerate(zip(contexts, needed, strict=True)):
        own, pages = pages[:count], pages[count:]
        table[row, :count] = own
        used[own] = np.minimum(size, length - np.arange(count) * size)
    pool = jnp.zeros((num_layers, shape.num_sides, num_pages, shape.num_kv_heads, size, shape.head_size), shape.dtype)
    for layer in range(num_layers):
        key = jax.random.key(int(random.integers(2**31)), impl="rbg")
        seen = used if layer == num_layers - 1 else np.zeros_like(used)
        pool = _fill(pool, layer, key, jnp.asarray(seen), fill, is_filled=bool(fill))
    return pool, jnp.asarray(table)


@partial(jax.jit, donate_argnums=0, static_argnames="is_filled")
def _fill(pool: jax.Array, layer: int, key: jax.Array, used: jax.Array, fill: float, *, is_filled: bool) -> jax.Array:
    numbers = jax.random.normal(key, pool.shape[1:], jnp.bfloat16 if pool.dtype.itemsize == 1 else pool.dtype)
    if is_filled:
        is_used = jnp.arange(pool.shape[4]) < used[:, None]
        numbers = jnp.where(is_used[:, None, :, None], numbers, fill)
    return pool.at[layer].set(numbers.astype(pool.dtype))
