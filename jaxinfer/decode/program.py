"""The decode program: a pure function that feeds one token a row and samples the next, all on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxinfer.decode.batch import ON_DEVICE, DecodeBatch
from jaxinfer.kv_cache.pages import Pages, own_length
from jaxinfer.kv_cache.spec import LayerGroups
from jaxinfer.layers.attention import How
from jaxinfer.layers.attention_over_pages import AttendOverPages, Place
from jaxinfer.layers.latent_attention import absorbed, over_parts
from jaxinfer.models.base import CausalLM, Part, run_part
from jaxinfer.runtime.expert_loads import with_loads
from jaxinfer.runtime.template import ModelTemplate, Weights
from jaxinfer.sampling.counting import TokenCounts
from jaxinfer.sampling.params import SamplingRows
from jaxinfer.sampling.penalties import add_sampled
from jaxinfer.sampling.sampler import Sampled, sample
from pallas_kernels.dispatch import Backend
from pallas_kernels.paged_attention.op import paged_attention, paged_attention_and_lse, write_and_attend


class DecodeState(NamedTuple):
    """What stays on the devices between steps: a place a slot, and one more for padding. Every stage has the page tables, the last alone
    the rest."""

    tokens: Int[Any, " S+1"] | None  # the last sampled
    page_table: Int[Any, "S+1 W"]
    counts: TokenCounts | None


DecodeStep = Callable[..., tuple[Pages, DecodeState, Sampled | Float[Array, "B D"], Int[Array, "L E"] | None]]


def decode_step(template: ModelTemplate, mesh: Mesh, attention: Backend) -> DecodeStep:
    """The program's function, of the whole model or of a stage of it. It takes pages and state donated. A first stage that is not the last
    is handed the tokens that the last one sampled, a later one the hidden states of the stage before it. `loads` are `runtime.expert_loads`'s."""

    def step(
        weights: Weights,
        pages: Pages,
        state: DecodeState,
        batch: DecodeBatch,
        sampling: SamplingRows | None,
        loads: Int[Array, "L E"] | None,
        handed: Array | None = None,
    ) -> tuple[Pages, DecodeState, Sampled | Float[Array, "B D"], Int[Array, "L E"] | None]:
        model = template.merge(weights)
        hidden = None if template.is_first else handed
        newest = state.tokens if handed is None else handed
        tokens = batch.tokens
        if template.is_first:
            assert newest is not None
            tokens = jnp.where(tokens == ON_DEVICE, newest[batch.slots], tokens)
        num_groups = batch.pages.shape[1]
        run = batch.positions // pages.shape[4]
        places = run[:, None] * num_groups + jnp.arange(num_groups)
        page_table = state.page_table.at[batch.slots[:, None], places].set(batch.pages)
        hidden, pages = forward(model, mesh, pages, tokens, batch, page_table, attention, template.part, hidden)
        loads = with_loads(loads, model, batch.slots < len(page_table) - 1)
        if state.tokens is None or state.counts is None or sampling is None:
            return pages, DecodeState(None, page_table, None), hidden, loads
        sampled = sample(model, hidden, sampling, batch.num_generated, state.counts, batch.slots)
        counts = add_sampled(state.counts, batch.slots, sampled.tokens)
        return pages, DecodeState(state.tokens.at[batch.slots].set(sampled.tokens), page_table, counts), sampled, loads

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
    part: Part | None = None,
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
    attend = AttendOverPages(mesh, _Kernels(attention), of_part, tables, page_ids, batch.positions % pages.shape[4], kv_len)
    return run_part(model, part, tokens, hidden, batch.positions, pages, attend)


@dataclass(frozen=True)
class _Kernels:
    """One token a request; `rows` is kv_len. See `Kernels`."""

    backend: Backend

    def write_and_attend(
        self,
        q: Float[Array, "B N H"],
        k: Float[Array, "B K H"],
        v: Float[Array, "B K H"],
        pages: Pages,
        place: Place,
        offsets: Int[Array, " B"],
        rows: Int[Array, " B"],
        how: How,
    ) -> tuple[Float[Array, "B N H"], Pages]:
        return write_and_attend(
            q,
            k,
            v,
            pages,
            place.layer,
            place.page_table,
            place.page_ids,
            offsets,
            rows,
            scale=how.scale,
            pool_is_finite=True,
            span=how.span,
            soft_cap=how.soft_cap,
            backend=self.backend,
        )

    def attend_to_latents(
        self,
        q: Float[Array, "B N H"],
        up: Float[Array, "R N E"],
        pages: Pages,
        place: Place,
        rows: Int[Array, " B"],
        scale: float,
        axis: str | None,
    ) -> Float[Array, "B N V"]:
        where = pages, place.layer, place.page_table
        options: dict[str, Any] = {"scale": scale, "pool_is_finite": True, "value_size": len(up), "backend": self.backend}

        def attend(q: Float[Array, "B N C"]) -> Float[Array, "B N R"]:
            if axis is None:
                return paged_attention(q, *where, rows, **options)
            own_rows = own_length(rows, pages.shape[4], axis)
            return over_parts(q, lambda every: paged_attention_and_lse(every, *where, own_rows, **options), axis)

        return absorbed(q, up, pages.shape[5], attend)
