"""Attention over pages, in any layer of a model: what they keep is written, and the program's kernels read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxinfer.kv_cache.pages import Pages, own_places, token_axis
from jaxinfer.kv_cache.spec import LayerGroups
from jaxinfer.layers.attention import AttentionParams, LayerAttention
from pallas_kernels.page_write import write
from sharding.mesh import TENSOR


class KVCacheLocation(NamedTuple):
    """A layer's pages in the pool, and its page table."""

    layer: Int[Any, ""]  # in its group's pages
    page_table: Int[Any, "R W"]
    page_ids: Int[Any, " T"]  # into which each token's keys and values go


class AttentionKernels(Protocol):
    """A program's, for the heads of one device. `rows` is whatever says which of the tokens are whose."""

    def write_and_attend(
        self,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        pages: Pages,
        location: KVCacheLocation,
        offsets: Int[Array, " T"],
        rows: Any,
        params: AttentionParams,
    ) -> tuple[Float[Array, "T N H"], Pages]:
        """Keys and values go to their pages, each to its offset there, and queries attend to them as well."""
        ...

    def attend_to_latents(
        self,
        q: Float[Array, "T N H"],
        up: Float[Array, "R N E"],
        pages: Pages,
        location: KVCacheLocation,
        rows: Any,
        scale: float,
        axis: str | None,
    ) -> Float[Array, "T N V"]:
        """`axis`: of the mesh, whose devices each have a part of every page's tokens; None where pages are whole."""
        ...


@dataclass(frozen=True)
class PagedAttentionBackend:
    """See `AttentionBackend`. A page table, and page ids, for each of the model's groups of layers."""

    mesh: Mesh
    kernels: AttentionKernels
    groups: LayerGroups
    page_tables: tuple[Int[Array, "R W"], ...]
    page_ids: tuple[Int[Array, " T"], ...]
    offsets: Int[Array, " T"]  # of each token in its page
    rows: Any

    def location(self, layer: int) -> Any:
        group, location = self.groups.places[layer]
        return KVCacheLocation(jnp.int32(location), self.page_tables[group], self.page_ids[group])

    def at(self, location: Any) -> LayerAttention:
        return _PagedLayerAttention(self, location)


@dataclass(frozen=True)
class _PagedLayerAttention:
    """See `LayerAttention`. Heads are independent: each device attends with its own, or where it has but some of each page's tokens, to those with all."""

    program: PagedAttentionBackend
    location: KVCacheLocation

    def __call__(
        self, q: Float[Array, "T N H"], k: Float[Array, "T K H"], v: Float[Array, "T K H"], pages: Pages, params: AttentionParams
    ) -> tuple[Float[Array, "T N H"], Pages]:
        def local(q: Array, k: Array, v: Array, pages: Pages, location: KVCacheLocation, offsets: Array, rows: Any) -> tuple[Array, Pages]:
            return self.program.kernels.write_and_attend(q, k, v, pages, location, offsets, rows, params)

        return self._over_heads(local, (_HEADS, _HEADS, _HEADS, _KV_HEADS), _KV_HEADS)(q, k, v, pages)

    def latents(
        self, q: Float[Array, "T N H"], latents: Float[Array, "T C"], up: Float[Array, "R N E"], pages: Pages, scale: float
    ) -> tuple[Float[Array, "T N V"], Pages]:
        axis = token_axis(pages)

        def local(
            q: Array, latents: Array, up: Array, pages: Pages, location: KVCacheLocation, offsets: Array, rows: Any
        ) -> tuple[Array, Pages]:
            page_ids, places = location.page_ids, offsets
            if axis is not None:
                page_ids, places = own_places(page_ids, offsets, pages.shape[4], axis)
            pages = write(pages, location.layer, (latents[:, None],), page_ids, places)
            return self.program.kernels.attend_to_latents(q, up, pages, location, rows, scale, axis), pages

        of_pages = _WHOLE if axis is None else _TOKENS
        return self._over_heads(local, (_HEADS, _WHOLE, _HEADS, of_pages), of_pages)(q, latents, up, pages)

    def _over_heads(self, local: Any, specs: tuple[PartitionSpec, ...], of_pages: PartitionSpec) -> Any:
        """`local` on every device, with its part of what it is called with, by these specs, and the layer's location, offsets and rows."""
        over_heads = jax.shard_map(
            local,
            mesh=self.program.mesh,
            in_specs=(*specs, _WHOLE, _WHOLE, _WHOLE),
            out_specs=(_HEADS, of_pages),
            check_vma=False,
        )
        return lambda *arguments: over_heads(*arguments, self.location, self.program.offsets, self.program.rows)


_HEADS, _WHOLE = PartitionSpec(None, TENSOR), PartitionSpec()
_KV_HEADS = PartitionSpec(None, None, None, TENSOR)  # of pages: each device has its own heads' part of every one
_TOKENS = PartitionSpec(None, None, None, None, TENSOR)  # of pages of latents: some of every one's tokens
