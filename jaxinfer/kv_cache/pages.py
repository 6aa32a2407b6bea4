"""The page pool on a mesh: an array that programs take donated and give back."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxinfer.kv_cache.spec import PageSpec
from sharding.partition import named_sharding
from sharding.rules import Rules

# All layers' keys and values in one array, updated in place: every array costs microseconds a call. A layer's index is an argument of
# whatever writes or reads, so no slice of a layer is ever made.
Pages = Float[Array, "L 2 P K G H"]

_AXES = (None, None, None, "kv_heads", None, None)


class PagePool:
    """A mesh's pages. `array` is replaced by what each program gives back; whoever runs programs on the mesh shares this one object."""

    def __init__(self, spec: PageSpec, num_pages: int, dtype: jnp.dtype, mesh: Mesh, rules: Rules) -> None:
        shape = (spec.num_layers, 2, num_pages, spec.num_kv_heads, spec.page_size, spec.head_size)
        self.abstract = jax.ShapeDtypeStruct(shape, dtype, sharding=named_sharding(mesh, rules, _AXES, shape, "the KV cache"))
        self.mesh = mesh
        self._rules = rules
        self._array: Pages | None = None

    @property
    def page_size(self) -> int:
        return self.abstract.shape[4]

    @property
    def array(self) -> Pages:
        assert self._array is not None, "the pool is not allocated yet"
        return self._array

    @array.setter
    def array(self, pages: Pages) -> None:
        self._array = pages

    def allocate(self) -> None:
        """Make the array, empty."""
        self._array = jnp.zeros(self.abstract.shape, self.abstract.dtype, device=self.abstract.sharding)

    @property
    def device_bytes(self) -> int:
        """Bytes on each device of the mesh."""
        return math.prod(self.abstract.sharding.shard_shape(self.abstract.shape)) * self.abstract.dtype.itemsize

    def abstract_moved(self, num_pages: int) -> jax.ShapeDtypeStruct:
        """Pages of all layers under way from pool to pool, as one array [X, L, 2, K, G, H]."""
        shape = (num_pages, *self.abstract.shape[:2], *self.abstract.shape[3:])
        sharding = named_sharding(self.mesh, self._rules, _AXES, shape, "the KV cache")
        return jax.ShapeDtypeStruct(shape, self.abstract.dtype, sharding=sharding)


def write(
    pages: Pages,
    layer: Int[Array, ""],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    page_ids: Int[Array, " T"],
    offsets: Int[Array, " T"],
) -> Pages:
    """Put each token's key and value of a layer at its place of its page.

    What is not a finite number is stored as 0: a model that overflows spoils its own request, but its freed pages, whose old contents the
    next owner's masked weights multiply, stay harmless. Kernels are promised so (`pool_is_finite`).
    """
    # The first index is an array too, so that XLA sees one scatter of 2 T rows. A single row would become a slice update, which is then
    # fused into each of its readers, and each copies the whole pool to update its own: 1.3 s a step instead of 20 ms.
    of_keys_and_values = jnp.arange(2)[:, None]
    kv = jnp.stack([k, v]).astype(pages.dtype)
    kv = jnp.where(jnp.isfinite(kv), kv, 0)  # after the cast, which may overflow
    return pages.at[layer, of_keys_and_values, page_ids, :, offsets].set(kv, mode="promise_in_bounds")
