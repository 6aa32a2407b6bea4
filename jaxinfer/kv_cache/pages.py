"""The page pool of a mesh: an array that is donated to programs and returned by them."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Shaped

from jaxinfer.architecture.head_layout import HeadLayout
from jaxinfer.kv_cache.spec import NULL_PAGE, PageSpec
from pallas_kernels.float8_pages import pool_dtype
from sharding.partition import named_sharding
from sharding.rules import Rules

# All layers' keys and values in one array, updated in place: each array costs the host microseconds a call. A page
# belongs to a group of L layers; page tables say which group. Kernels take a layer's index in the group as an argument,
# so no slice of a layer is ever made. S sides: keys and values, or latents alone.
Pages = Shaped[Array, "L S P K G H"]
KVScales = Float[Array, "L S K"]  # of a mesh's layers, not of a group's

_AXES = (None, None, None, "kv_heads", None, None)
_OF_LATENTS = (None, None, None, None, "page_tokens", None)  # all heads read them, so tokens are split instead
_WHOLE = (None, None, None, None, None, None)


def page_dtype(spec: PageSpec, activation_dtype: jnp.dtype, platform: str) -> jnp.dtype:
    """The type of a pool's array on 'cpu' or 'gpu'."""
    return pool_dtype(platform) if spec.is_float8 else activation_dtype


class PagePool:
    """The pages of a mesh, with the mesh's KV heads where those differ from the model's. `array` is replaced by each
    program's result; everything that runs programs on the mesh shares this object."""

    def __init__(
        self,
        spec: PageSpec,
        num_pages: int,
        dtype: jnp.dtype,
        mesh: Mesh,
        rules: Rules,
        heads: HeadLayout | None = None,
        num_layers: int | None = None,
        num_scaled: int = 0,
    ) -> None:
        """`num_layers`: of a group, on this mesh, if it is a pipeline stage. `num_scaled`: the model's layers on this
        mesh, where values are float8."""
        self.spec = spec
        self.heads = None if spec.num_sides == 1 else heads  # latents belong to no head
        num_kv_heads = spec.num_kv_heads if self.heads is None else self.heads.num_kv_heads
        shape = (
            spec.num_layers if num_layers is None else num_layers,
            spec.num_sides,
            num_pages,
            num_kv_heads,
            spec.page_size,
            spec.head_size,
        )
        of_latents = _WHOLE if spec.token_parts(mesh.size) == 1 else _OF_LATENTS
        self._axes = _AXES if spec.num_sides == 2 else of_latents
        self.abstract = jax.ShapeDtypeStruct(shape, dtype, sharding=named_sharding(mesh, rules, self._axes, shape, "the KV cache"))
        # Of float8: what a layer's values by side and KV head are multiplied by once they are read.
        self.abstract_scales = None if not num_scaled else self._abstract_scales(num_scaled, num_kv_heads, mesh, rules)
        self.scales: KVScales | None = None
        self.mesh = mesh
        self._rules = rules
        self._array: Pages | None = None

    def _abstract_scales(self, num_layers: int, num_kv_heads: int, mesh: Mesh, rules: Rules) -> jax.ShapeDtypeStruct:
        shape, axes = (num_layers, self.spec.num_sides, num_kv_heads), (None, None, None if self.spec.num_sides == 1 else "kv_heads")
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=named_sharding(mesh, rules, axes, shape, "the KV cache's scales"))

    @property
    def array(self) -> Pages:
        assert self._array is not None, "the pool is not allocated yet"
        return self._array

    @array.setter
    def array(self, pages: Pages) -> None:
        self._array = pages

    @property
    def is_allocated(self) -> bool:
        return self._array is not None

    def allocate(self) -> None:
        """Allocate the array."""
        self._array = jnp.zeros(self.abstract.shape, self.abstract.dtype, device=self.abstract.sharding)
        if self.abstract_scales is not None and self.scales is None:
            self.scales = jnp.ones(self.abstract_scales.shape, jnp.float32, device=self.abstract_scales.sharding)

    def release(self) -> None:
        """Let go of the array; `allocate` makes a new one."""
        self._array = None

    @property
    def device_bytes(self) -> int:
        """Bytes on each device of the mesh."""
        return math.prod(self.abstract.sharding.shard_shape(self.abstract.shape)) * self.abstract.dtype.itemsize

    def abstract_moved(self, num_pages: int, num_layers: int | None = None) -> jax.ShapeDtypeStruct:
        """Shape of pages on their way between pools: [X, L, S, K, G, H] with the model's own KV heads; if the mesh's
        differ, whole on every device. `num_layers`: default all of the pool's."""
        shape = (num_pages, num_layers or self.abstract.shape[0], self.abstract.shape[1], self.spec.num_kv_heads, *self.abstract.shape[4:])
        axes = self._axes if self.heads is None else _WHOLE
        sharding = named_sharding(self.mesh, self._rules, axes, shape, "the KV cache")
        return jax.ShapeDtypeStruct(shape, self.abstract.dtype, sharding=sharding)


def token_axis(pages: Pages) -> str | None:
    """The mesh axis over which each page's tokens are split; None if they aren't."""
    axis: str | None = jax.typeof(pages).sharding.spec[4]
    return axis


def own_places(
    page_ids: Int[Array, " T"], offsets: Int[Array, " T"], part_size: int, axis: str
) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
    """Pages and offsets of writes on a device that has `part_size` of each page's tokens; tokens of other devices go to
    the null page. For use in a `shard_map`."""
    is_own = offsets // part_size == jax.lax.axis_index(axis)
    return jnp.where(is_own, page_ids, NULL_PAGE), offsets % part_size


def own_length(kv_len: Int[Array, " B"], part_size: int, axis: str) -> Int[Array, " B"]:
    """The number of each context's tokens on such a device, which has a part of every page."""
    page_size = part_size * jax.lax.axis_size(axis)
    of_last = kv_len % page_size - jax.lax.axis_index(axis) * part_size
    return kv_len // page_size * part_size + jnp.clip(of_last, 0, part_size)
