"""The page pool on a mesh: for each layer a pair of arrays that programs take donated and give back."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxinfer.kv_cache.spec import NULL_PAGE, PageSpec
from sharding.partition import named_sharding
from sharding.rules import Rules


class LayerPages(NamedTuple):
    k: Float[Any, "P K G H"]
    v: Float[Any, "P K G H"]


Pages = tuple[LayerPages, ...]  # one for each layer: XLA updates separate arrays in place, and copies slices out of stacked ones

_AXES = (None, "kv_heads", None, None)


class PagePool:
    """A mesh's pages. `arrays` is replaced by what each program gives back; whoever runs programs on the mesh shares this one object."""

    def __init__(self, spec: PageSpec, num_pages: int, dtype: jnp.dtype, mesh: Mesh, rules: Rules) -> None:
        shape = (num_pages, spec.num_kv_heads, spec.page_size, spec.head_size)
        layer = jax.ShapeDtypeStruct(shape, dtype, sharding=named_sharding(mesh, rules, _AXES, shape, "the KV cache"))
        self.mesh = mesh
        self.abstract: tuple[LayerPages, ...] = tuple(LayerPages(layer, layer) for _ in range(spec.num_layers))
        self._rules = rules
        self._arrays: Pages | None = None

    @property
    def page_size(self) -> int:
        return self.abstract[0].k.shape[2]

    @property
    def arrays(self) -> Pages:
        assert self._arrays is not None, "the pool is not allocated yet"
        return self._arrays

    @arrays.setter
    def arrays(self, pages: Pages) -> None:
        self._arrays = pages

    def allocate(self) -> None:
        """Make the arrays, empty."""
        self._arrays = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype, device=a.sharding), self.abstract)

    @property
    def device_bytes(self) -> int:
        """Bytes on each device of the mesh."""
        return sum(a.sharding.shard_shape(a.shape)[0] * _row_bytes(a) for a in jax.tree.leaves(self.abstract))

    def abstract_moved(self, num_pages: int) -> jax.ShapeDtypeStruct:
        """Pages of all layers under way from pool to pool, as one array [L, 2, X, K, G, H]."""
        pool = self.abstract[0].k
        shape = (len(self.abstract), 2, num_pages, *pool.shape[1:])
        sharding = named_sharding(self.mesh, self._rules, (None, None, *_AXES), shape, "the KV cache")
        return jax.ShapeDtypeStruct(shape, pool.dtype, sharding=sharding)


def _row_bytes(a: jax.ShapeDtypeStruct) -> int:
    size = a.dtype.itemsize
    for length in a.sharding.shard_shape(a.shape)[1:]:
        size *= length
    return size


def write(
    pages: LayerPages, k: Float[Array, "T K H"], v: Float[Array, "T K H"], page_ids: Int[Array, " T"], offsets: Int[Array, " T"]
) -> LayerPages:
    """Put each token's key and value at its place of its page."""
    k, v = k.astype(pages.k.dtype), v.astype(pages.v.dtype)
    if k.shape[0] == 1:
        # XLA turns a scatter of one row into a slice update, fuses that into each of its readers, and then each copies the whole
        # pool to update its own (1.3 s a step instead of 20 ms). A second row, to the null page, keeps it a scatter.
        k, v = jnp.concatenate([k, k]), jnp.concatenate([v, v])
        page_ids, offsets = jnp.append(page_ids, NULL_PAGE), jnp.append(offsets, 0)
    return LayerPages(
        pages.k.at[page_ids, :, offsets].set(k, mode="promise_in_bounds"),
        pages.v.at[page_ids, :, offsets].set(v, mode="promise_in_bounds"),
    )
