"""The decode program: a pure function that feeds one token a row and samples the next, all on the device; or, over several devices, a program that
feeds and two that sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxinfer.decode.batch import ON_DEVICE, DecodeBatch
from jaxinfer.kv_cache.pages import Pages, own_length
from jaxinfer.kv_cache.spec import LayerGroups
from jaxinfer.layers.attention import AttentionParams
from jaxinfer.layers.latent_attention import absorbed, attend_over_token_shards
from jaxinfer.layers.paged_attention import KVCacheLocation, PagedAttentionBackend
from jaxinfer.models.base import CausalLM, ModelSlice, run_slice
from jaxinfer.runtime.expert_loads import with_loads
from jaxinfer.runtime.template import ModelTemplate, Weights
from jaxinfer.sampling.params import SamplingRows
from jaxinfer.sampling.penalties import add_sampled
from jaxinfer.sampling.sampler import Sampled, best, sample, sample_from_logits
from jaxinfer.sampling.token_counts import TokenCounts
from pallas_kernels.dispatch import Backend
from pallas_kernels.paged_attention.op import paged_attention, paged_attention_and_lse, write_and_attend

# What stays on the devices between steps has a place a slot, and one more for padding: S + 1. Every stage has page tables, the last alone the tokens
# that were sampled last and the counts for penalties.
ForwardStep = Callable[..., tuple[Pages, Int[Array, "S+1 W"], Float[Array, "B D"], Int[Array, "B 3"], Int[Array, "L E"] | None]]
DecodeStep = Callable[..., tuple[Pages, Int[Array, "S+1 W"], Int[Array, " S+1"], TokenCounts, Sampled, Int[Array, "L E"] | None]]


def decode_step(template: ModelTemplate, mesh: Mesh, attention: Backend) -> DecodeStep:
    """The program's function where one device has all of the vocabulary, of a whole model or of its last stage. It takes pages, page table, tokens
    and counts donated. See `forward_step`. Feeding and sampling are one program here: on a CPU a step of two takes longer."""
    feed, head = forward_step(template, mesh, attention), template.head

    def step(
        weights: Weights,
        pages: Pages,
        page_table: Int[Array, "S+1 W"],
        batch: DecodeBatch,
        loads: Int[Array, "L E"] | None,
        tokens: Int[Array, " S+1"],
        counts: TokenCounts,
        sampling: SamplingRows,
        hidden: Float[Array, "B D"] | None = None,
    ) -> tuple[Pages, Int[Array, "S+1 W"], Int[Array, " S+1"], TokenCounts, Sampled, Int[Array, "L E"] | None]:
        pages, page_table, hidden, _, loads = feed(weights, pages, page_table, batch, loads, tokens if hidden is None else hidden)
        model = head.merge(template.head_weights(weights))
        sampled = sample(model, hidden, sampling, batch.num_generated, counts, batch.slots, _fed(batch.tokens, tokens, batch.slots))
        tokens = tokens.at[batch.slots].set(sampled.tokens)
        return pages, page_table, tokens, add_sampled(counts, batch.slots, sampled.tokens), sampled, loads

    return step


def forward_step(template: ModelTemplate, mesh: Mesh, attention: Backend) -> ForwardStep:
    """The function of the program that feeds a token a row, of the whole model or of a stage of it. It takes pages and page table donated. A first
    stage is handed the tokens that were sampled last, a later one the hidden states of the stage before it. `loads` are `runtime.expert_loads`'s.
    What the last stage gives the next two take, with each row's slot, number of generated tokens and token."""

    def step(
        weights: Weights,
        pages: Pages,
        page_table: Int[Array, "S+1 W"],
        batch: DecodeBatch,
        loads: Int[Array, "L E"] | None,
        handed: Int[Array, " S+1"] | Float[Array, "B D"],
    ) -> tuple[Pages, Int[Array, "S+1 W"], Float[Array, "B D"], Int[Array, "B 3"], Int[Array, "L E"] | None]:
        model = template.merge(weights)
        hidden, tokens = (None, batch.tokens) if template.is_first else (handed, batch.tokens)
        if template.is_first:
            tokens = _fed(tokens, handed, batch.slots)
        num_groups = batch.pages.shape[1]
        run = batch.positions // pages.shape[4]
        places = run[:, None] * num_groups + jnp.arange(num_groups)
        page_table = page_table.at[batch.slots[:, None], places].set(batch.pages)
        hidden, pages = forward(model, mesh, pages, tokens, batch, page_table, attention, template.part, hidden)
        loads = with_loads(loads, model, batch.slots < len(page_table) - 1)
        # From here, since an array that the host brings again costs it more.
        rows = jnp.stack([batch.slots, batch.num_generated, batch.tokens], axis=1)
        return pages, page_table, hidden, rows, loads

    return step


def greedy_step(template: ModelTemplate) -> Callable[..., tuple[Int[Array, " S+1"], Sampled]]:
    """The function of the program that gives every row its best token, of a template's `head`. It takes `tokens` donated."""

    def step(
        weights: Weights, hidden: Float[Array, "B D"], rows: Int[Array, "B 3"], tokens: Int[Array, " S+1"]
    ) -> tuple[Int[Array, " S+1"], Sampled]:
        sampled = best(template.merge(weights), hidden)
        return tokens.at[rows[:, 0]].set(sampled.tokens), sampled

    return step


def sample_step(template: ModelTemplate) -> Callable[..., tuple[Int[Array, " S+1"], TokenCounts, Sampled]]:
    """The function of the program that gives every row the token that its parameters ask for. It takes `tokens` and `counts` donated."""

    def step(
        weights: Weights,
        hidden: Float[Array, "B D"],
        rows: Int[Array, "B 3"],
        tokens: Int[Array, " S+1"],
        counts: TokenCounts,
        sampling: SamplingRows,
    ) -> tuple[Int[Array, " S+1"], TokenCounts, Sampled]:
        slots, num_generated, newest = rows[:, 0], rows[:, 1], _fed(rows[:, 2], tokens, rows[:, 0])
        sampled = sample_from_logits(template.merge(weights).logits(hidden), sampling, num_generated, counts, slots, newest)
        return tokens.at[slots].set(sampled.tokens), add_sampled(counts, slots, sampled.tokens), sampled

    return step


def _fed(tokens: Int[Array, " B"], sampled: Int[Array, " S+1"], slots: Int[Array, " B"]) -> Int[Array, " B"]:
    """The rows' tokens: the host's, or what was sampled last for their slots."""
    return jnp.where(tokens == ON_DEVICE, sampled[slots], tokens)


def assign_slot(page_table: Int[Array, "S+1 W"], slot: Int[Array, ""], row: Int[Array, " W"]) -> Int[Array, "S+1 W"]:
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
    part: ModelSlice | None = None,
    hidden: Float[Array, "B D"] | None = None,
) -> tuple[Float[Array, "B D"], Pages]:
    """Hidden states of the rows' tokens, and the pages with their keys and values written. See `prefill.program.forward`."""
    num_slots = page_table.shape[0] - 1
    kv_len = jnp.where(batch.slots < num_slots, batch.positions + 1, 0)
    groups = LayerGroups.of(model.config.layer_spans)
    by_group = page_table[batch.slots].reshape(len(batch.slots), -1, len(groups.spans))
    tables = tuple(by_group[:, :, group] for group in range(len(groups.spans)))
    page_ids = tuple(batch.pages[:, group] for group in range(len(groups.spans)))
    of_part = groups if part is None else groups.of_stage(part.layers)
    attend = PagedAttentionBackend(mesh, _AttentionKernels(attention), of_part, tables, page_ids, batch.positions % pages.shape[4], kv_len)
    return run_slice(model, part, tokens, hidden, batch.positions, pages, attend)


@dataclass(frozen=True)
class _AttentionKernels:
    """One token a request; `rows` is kv_len. See `AttentionKernels`."""

    backend: Backend

    def write_and_attend(
        self,
        q: Float[Array, "B N H"],
        k: Float[Array, "B K H"],
        v: Float[Array, "B K H"],
        pages: Pages,
        location: KVCacheLocation,
        offsets: Int[Array, " B"],
        rows: Int[Array, " B"],
        params: AttentionParams,
    ) -> tuple[Float[Array, "B N H"], Pages]:
        return write_and_attend(
            q,
            k,
            v,
            pages,
            location.layer,
            location.page_table,
            location.page_ids,
            offsets,
            rows,
            scale=params.scale,
            pool_is_finite=True,
            span=params.span,
            soft_cap=params.soft_cap,
            backend=self.backend,
        )

    def attend_to_latents(
        self,
        q: Float[Array, "B N H"],
        up: Float[Array, "R N E"],
        pages: Pages,
        location: KVCacheLocation,
        rows: Int[Array, " B"],
        scale: float,
        axis: str | None,
    ) -> Float[Array, "B N V"]:
        where = pages, location.layer, location.page_table
        options: dict[str, Any] = {"scale": scale, "pool_is_finite": True, "value_size": len(up), "backend": self.backend}

        def attend(q: Float[Array, "B N C"]) -> Float[Array, "B N R"]:
            if axis is None:
                return paged_attention(q, *where, rows, **options)
            own_rows = own_length(rows, pages.shape[4], axis)
            return attend_over_token_shards(q, lambda every: paged_attention_and_lse(every, *where, own_rows, **options), axis)

        return absorbed(q, up, pages.shape[5], attend)
