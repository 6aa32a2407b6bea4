"""The decode program: a pure function that feeds one token a row and samples the next, all on the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxinfer.decode.batch import ON_DEVICE, DecodeBatch
from jaxinfer.kv_cache.pages import Pages, write
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
        page_table = state.page_table.at[batch.slots, batch.positions // pages.shape[4]].set(batch.pages)
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
    attend = partial(_attend, mesh, attention, batch.pages, batch.positions % pages.shape[4], page_table[batch.slots], kv_len)
    return model(tokens, batch.positions, pages, attend)


def _attend(
    mesh: Mesh,
    attention: Backend,
    page_ids: Int[Array, " B"],
    offsets: Int[Array, " B"],
    page_table: Int[Array, "B W"],
    kv_len: Int[Array, " B"],
    layer: Int[Array, ""],
    q: Float[Array, "B N H"],
    k: Float[Array, "B K H"],
    v: Float[Array, "B K H"],
    pages: Pages,
) -> tuple[Float[Array, "B N H"], Pages]:
    def local(
        q: Array, k: Array, v: Array, pages: Pages, layer: Array, page_ids: Array, offsets: Array, page_table: Array, kv_len: Array
    ) -> tuple[Array, Pages]:
        pages = write(pages, layer, k, v, page_ids, offsets)
        scale = q.shape[-1] ** -0.5
        return paged_attention(q, pages, layer, page_table, kv_len, scale=scale, pool_is_finite=True, backend=attention), pages

    # Heads are independent: each device attends with its own, over its own part of every page.
    heads, whole = PartitionSpec(None, TENSOR), PartitionSpec()
    kv_heads = PartitionSpec(None, None, None, TENSOR)
    over_heads = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(heads, heads, heads, kv_heads, whole, whole, whole, whole, whole),
        out_specs=(heads, kv_heads),
        check_vma=False,
    )
    attended, written = over_heads(q, k, v, pages, layer, page_ids, offsets, page_table, kv_len)
    return attended, written
