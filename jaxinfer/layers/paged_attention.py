"""Attention over KV pages in any layer: writes the tokens' KV, then calls the role's kernels. Page groups are resolved
here, for prefill and decode alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxinfer.kv_cache.pages import KVScales, Pages, own_places, token_axis
from jaxinfer.kv_cache.spec import NULL_PAGE, LayerGroups
from jaxinfer.layers.attention import AttentionParams, LayerAttention
from jaxinfer.layers.attention_kernels import AttentionKernels, KVCacheLocation
from jaxinfer.layers.step_context import NO_CONTEXT, StepContext
from pallas_kernels.page_write import write
from pallas_kernels.span import Span
from sharding.mesh import TENSOR


@dataclass(frozen=True)
class PagedAttentionBackend:
    """See `AttentionBackend`. Has a page table and page ids for each of the model's groups of layers."""

    mesh: Mesh
    kernels: AttentionKernels
    groups: LayerGroups
    page_tables: tuple[Int[Array, "R W"], ...]
    page_ids: tuple[Int[Array, " T"], ...]
    offsets: Int[Array, " T"]  # of each token within its page
    rows: Any
    context: StepContext = NO_CONTEXT
    scales: KVScales | None = None  # of float8 pages, for the layers that run
    first_layer: int = 0

    @classmethod
    def of(
        cls,
        mesh: Mesh,
        kernels: AttentionKernels,
        spans: tuple[Span, ...],
        layers: range | None,
        page_table: Int[Array, "R W*C"],
        page_ids: Int[Array, "T C"],
        offsets: Int[Array, " T"],
        rows: Any,
        context: StepContext = NO_CONTEXT,
        scales: KVScales | None = None,
    ) -> PagedAttentionBackend:
        """From a flat page table: for each token block, the pages of C groups. `spans`: one for each of the model's
        layers. `layers`: those of a pipeline stage; None: all. `scales`: of float8 pages."""
        groups = LayerGroups.of(spans)
        by_group = page_table.reshape(len(page_table), -1, len(groups.spans))
        every = range(len(groups.spans))
        tables, ids = tuple(by_group[:, :, group] for group in every), tuple(page_ids[:, group] for group in every)
        of_stage, first = (groups, 0) if layers is None else (groups.of_stage(layers), layers.start)
        return cls(mesh, kernels, of_stage, tables, ids, offsets, rows, context, scales, first)

    def location(self, layer: int) -> Any:
        group, location = self.groups.places[layer]
        scales = None if self.scales is None else self.scales[layer - self.first_layer]
        return KVCacheLocation(jnp.int32(location), self.page_tables[group], self.page_ids[group]), scales

    def at(self, location: Any) -> LayerAttention:
        return _PagedLayerAttention(self, *location)


def pages_of_tokens(
    page_table: Int[Array, "R W*C"], num_groups: int, row: Int[Array, " T"], block: Int[Array, " T"], in_use: Bool[Array, " T"]
) -> Int[Array, "T C"]:
    """Each group's page for a row's token block, from a flat page table; the null page where not in use."""
    by_group = page_table.reshape(len(page_table), -1, num_groups)
    return jnp.where(in_use[:, None], by_group[row, block], NULL_PAGE)


@dataclass(frozen=True)
class _PagedLayerAttention:
    """See `LayerAttention`. Heads are independent: each device computes its own; where pages' tokens are split, all
    heads over its tokens."""

    program: PagedAttentionBackend
    location: KVCacheLocation
    scales: Float[Array, "S K"] | None

    def __call__(
        self, q: Float[Array, "T N H"], k: Float[Array, "T K H"], v: Float[Array, "T K H"], pages: Pages, params: AttentionParams
    ) -> tuple[Float[Array, "T N H"], Pages]:
        def local(
            q: Array, k: Array, v: Array, pages: Pages, scales: Any, location: KVCacheLocation, offsets: Array, rows: Any
        ) -> tuple[Array, Pages]:
            if scales is None:
                return self.program.kernels.write_and_attend(q, k, v, pages, location, offsets, rows, params)
            of_keys, of_values = scales.astype(q.dtype)[:, :, None]  # powers of two: multiplying and dividing is exact
            group = q.shape[1] // k.shape[1]
            scaled = q * jnp.repeat(of_keys, group, axis=0), k / of_keys, v / of_values
            out, pages = self.program.kernels.write_and_attend(*scaled, pages, location, offsets, rows, params)
            return out * jnp.repeat(of_values, group, axis=0), pages

        return self._over_heads(local, (_HEADS, _HEADS, _HEADS, _KV_HEADS, _HEADS), _KV_HEADS)(q, k, v, pages, self.scales)

    def latents(
        self, q: Float[Array, "T N H"], latents: Float[Array, "T C"], up: Float[Array, "R N E"], pages: Pages, scale: float
    ) -> tuple[Float[Array, "T N V"], Pages]:
        axis = token_axis(pages)

        def local(
            q: Array, latents: Array, up: Array, pages: Pages, scales: Any, location: KVCacheLocation, offsets: Array, rows: Any
        ) -> tuple[Array, Pages]:
            scale_of = None if scales is None else scales[0, 0].astype(q.dtype)
            if scale_of is not None:  # keys and values are linear in latents
                q, latents = q * scale_of, latents / scale_of
            page_ids, places = location.page_ids, offsets
            if axis is not None:
                page_ids, places = own_places(page_ids, offsets, pages.shape[4], axis)
            pages = write(pages, location.layer, (latents[:, None],), page_ids, places)
            out = self.program.kernels.attend_to_latents(q, up, pages, location, rows, scale, axis)
            return (out if scale_of is None else out * scale_of), pages

        of_pages = _WHOLE if axis is None else _TOKENS
        return self._over_heads(local, (_HEADS, _WHOLE, _HEADS, of_pages, _WHOLE), of_pages)(q, latents, up, pages, self.scales)

    def _over_heads(self, local: Any, specs: tuple[PartitionSpec, ...], of_pages: PartitionSpec) -> Any:
        """`local` on every device with its shards of the arguments, and the layer's location, offsets and rows."""
        over_heads = jax.shard_map(
            local,
            mesh=self.program.mesh,
            in_specs=(*specs, _WHOLE, _WHOLE, _WHOLE),
            out_specs=(_HEADS, of_pages),
            check_vma=False,
        )
        return lambda *arguments: over_heads(*arguments, self.location, self.program.offsets, self.program.rows)


_HEADS, _WHOLE = PartitionSpec(None, TENSOR), PartitionSpec()
_KV_HEADS = PartitionSpec(None, None, None, TENSOR)  # of pages: each device has its own heads
_TOKENS = PartitionSpec(None, None, None, None, TENSOR)  # of latents' pages: each device has some tokens
