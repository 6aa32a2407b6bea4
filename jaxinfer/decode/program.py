"""The decode program: a pure function that feeds one token a row and samples the next, all on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxinfer.decode.batch import ON_DEVICE, DecodeBatch
from jaxinfer.kv_cache.pages import Pages, write
from jaxinfer.kv_cache.spec import LayerGroups
from jaxinfer.layers.attention import Attend, How
from jaxinfer.layers.latent_attention import absorbed
from jaxinfer.models.base import CausalLM
from jaxinfer.runtime.template import ModelTemplate, Weights
from jaxinfer.sampling.counting import TokenCounts
from jaxinfer.sampling.params import SamplingRows
from jaxinfer.sampling.penalties import add_sampled
from jaxinfer.sampling.sampler import Sampled, sample
from pallas_kernels.dispatch import Backend
from pallas_kernels.paged_attention.op import paged_attention
from sharding.mesh import TENSOR


class DecodeState(NamedTuple):
    """What stays on the device between steps: a place a slot, and one more for padding."""

    tokens: Int[Any, " S+1"]  # the last sampled
    page_table: Int[Any, "S+1 W"]
    counts: TokenCounts


DecodeStep = Callable[[Weights, Pages, DecodeState, DecodeBatch, SamplingRows], tuple[Pages, DecodeState, Sampled]]


def decode_step(template: ModelTemplate, mesh: Mesh, attention: Backend) -> DecodeStep:
    """The program's function. It takes pages and state donated."""

    def step(
        weights: Weights, pages: Pages, state: DecodeState, batch: DecodeBatch, sampling: SamplingRows
    ) -> tuple[Pages, DecodeState, Sampled]:
        model = template.merge(weights)
        tokens = jnp.where(batch.tokens == ON_DEVICE, state.tokens[batch.slots], batch.tokens)
        num_groups = batch.pages.shape[1]
        run = batch.positions // pages.shape[4]
        places = run[:, None] * num_groups + jnp.arange(num_groups)
        page_table = state.page_table.at[batch.slots[:, None], places].set(batch.pages)
        hidden, pages = forward(model, mesh, pages, tokens, batch, page_table, attention)
        sampled = sample(model, hidden, sampling, batch.num_generated, state.counts, batch.slots)
        counts = add_sampled(state.counts, batch.slots, sampled.tokens)
        return pages, DecodeState(state.tokens.at[batch.slots].set(sampled.tokens), page_table, counts), sampled

    return step


def seat(page_table: Int[Array, "S+1 W"], slot: Int[Array, ""], row: Int[Array, " W"]) -> Int[Array, "S+1 W"]:
    """Give a slot a sequence's page table."""
    return page_table.at[slot].set(row)


def forward(
    model: CausalLM,
    mesh: Mesh,
    pages: Pages,
    tokens: Int[Array, " B"],
    batch: DecodeBatch,
    page_table: Int[Array, "S+1 W"],
    attention: Backend = "xla",
) -> tuple[Float[Array, "B D"], Pages]:
    """Hidden states of the rows' tokens, and the pages with their keys and values written."""
    num_slots = page_table.shape[0] - 1
    kv_len = jnp.where(batch.slots < num_slots, batch.positions + 1, 0)
    groups = LayerGroups.of(model.config.layer_spans)
    by_group = page_table[batch.slots].reshape(len(batch.slots), -1, len(groups.spans))
    tables = tuple(by_group[:, :, group] for group in range(len(groups.spans)))
    return model(
        tokens, batch.positions, pages, _InLayers(mesh, attention, groups, tables, batch.pages, batch.positions % pages.shape[4], kv_len)
    )


class _Place(NamedTuple):
    """A layer's own."""

    layer: Int[Any, ""]  # in its group's pages
    page_table: Int[Any, "B W"]
    page_ids: Int[Any, " B"]


@dataclass(frozen=True)
class _InLayers:
    """Attention of one token a row in any layer; see `AttendInLayers`."""

    mesh: Mesh
    backend: Backend
    groups: LayerGroups
    tables: tuple[Int[Array, "B W"], ...]  # of each group
    page_ids: Int[Array, "B C"]  # into which each token's keys and values go
    offsets: Int[Array, " B"]
    kv_len: Int[Array, " B"]

    def place(self, layer: int) -> Any:
        group, place = self.groups.places[layer]
        return _Place(jnp.int32(place), self.tables[group], self.page_ids[:, group])

    def at(self, place: Any) -> Attend:
        return _InLayer(self, place)


@dataclass(frozen=True)
class _InLayer:
    """In one layer; see `Attend`."""

    all: _InLayers
    place: _Place

    def __call__(
        self, q: Float[Array, "B N H"], k: Float[Array, "B K H"], v: Float[Array, "B K H"], pages: Pages, how: How
    ) -> tuple[Float[Array, "B N H"], Pages]:
        def local(q: Array, k: Array, v: Array, pages: Pages, place: _Place, offsets: Array, kv_len: Array) -> tuple[Array, Pages]:
            pages = write(pages, place.layer, (k, v), place.page_ids, offsets)
            attended = paged_attention(
                q,
                pages,
                place.layer,
                place.page_table,
                kv_len,
                scale=how.scale,
                pool_is_finite=True,
                span=how.span,
                soft_cap=how.soft_cap,
                backend=self.all.backend,
            )
            return attended, pages

        # Heads are independent: each device attends with its own, over its own part of every page.
        heads, whole = PartitionSpec(None, TENSOR), PartitionSpec()
        kv_heads = PartitionSpec(None, None, None, TENSOR)
        over_heads = jax.shard_map(
            local,
            mesh=self.all.mesh,
            in_specs=(heads, heads, heads, kv_heads, whole, whole, whole),
            out_specs=(heads, kv_heads),
            check_vma=False,
        )
        attended, written = over_heads(q, k, v, pages, self.place, self.all.offsets, self.all.kv_len)
        return attended, written

    def latents(
        self, q: Float[Array, "B N H"], latents: Float[Array, "B C"], up: Float[Array, "R N E"], pages: Pages, scale: float
    ) -> tuple[Float[Array, "B N V"], Pages]:
        def local(q: Array, latents: Array, up: Array, pages: Pages, place: _Place, offsets: Array, kv_len: Array) -> tuple[Array, Pages]:
            pages = write(pages, place.layer, (latents[:, None],), place.page_ids, offsets)
            attend = partial(
                paged_attention,
                kv_pages=pages,
                layer=place.layer,
                page_table=place.page_table,
                kv_len=kv_len,
                scale=scale,
                pool_is_finite=True,
                value_size=len(up),
                backend=self.all.backend,
            )
            return absorbed(q, up, latents.shape[1], attend), pages

        # Each device has its own heads, and all of the latents.
        heads, whole = PartitionSpec(None, TENSOR), PartitionSpec()
        over_heads = jax.shard_map(
            local,
            mesh=self.all.mesh,
            in_specs=(heads, whole, heads, whole, whole, whole, whole),
            out_specs=(heads, whole),
            check_vma=False,
        )
        attended, written = over_heads(q, latents, up, pages, self.place, self.all.offsets, self.all.kv_len)
        return attended, written
