"""The prefill programs, pure functions: one fills pages from packed prompt tokens, others take the first tokens of prompts that end here from what it
gives, and score the prompts where that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jaxinfer.kv_cache.pages import Pages
from jaxinfer.kv_cache.spec import NULL_PAGE, LayerGroups
from jaxinfer.layers.attention import AttentionParams
from jaxinfer.layers.paged_attention import KVCacheLocation, PagedAttentionBackend
from jaxinfer.models.base import CausalLM, ModelSlice, run_slice
from jaxinfer.prefill.batch import PackedTokens
from jaxinfer.runtime.buckets import query_tile
from jaxinfer.runtime.expert_loads import with_loads
from jaxinfer.runtime.template import ModelTemplate, Weights
from jaxinfer.sampling.params import SamplingRows
from jaxinfer.sampling.sampler import Sampled, best, sample_from_logits, token_logprobs
from jaxinfer.sampling.token_counts import TokenCounts
from pallas_kernels.dispatch import Backend
from pallas_kernels.latent_prefill_attention.op import latent_prefill_attention
from pallas_kernels.page_write import write
from pallas_kernels.ragged_prefill_attention.op import ragged_prefill_attention


class PromptScores(NamedTuple):
    """Of each token's successor in its prompt."""

    logprobs: Float[Any, " T"]
    top_tokens: Int[Any, "T 20"]
    top_logprobs: Float[Any, "T 20"]


Rows = tuple[Int[Array, " R"], Int[Array, " R"], Int[Array, " R"]]
Given = tuple[Float[Array, "T D"], Float[Array, "R D"]]  # by the last stage: hidden states of all tokens, and of each row's last one
PrefillStep = Callable[..., tuple[Pages, Given | Float[Array, "T D"], Int[Array, "L E"] | None]]


def prefill_step(template: ModelTemplate, mesh: Mesh, attention: Backend, *, splits_tokens: bool = False) -> PrefillStep:
    """The function of the program that fills pages, of the whole model or of a stage of it, which passes hidden states on to the next. It takes the
    pages donated. `loads` are `runtime.expert_loads`'s; `splits_tokens` is `models.base.run_slice`'s."""

    def step(
        weights: Weights,
        pages: Pages,
        batch: PackedTokens,
        loads: Int[Array, "L E"] | None,
        hidden: Float[Array, "T D"] | None = None,
    ) -> tuple[Pages, Given | Float[Array, "T D"], Int[Array, "L E"] | None]:
        model = template.merge(weights)
        hidden, pages = forward(model, mesh, pages, batch, attention, template.part, hidden, splits_tokens=splits_tokens)
        if loads is not None:
            loads = with_loads(loads, model, _rows_of_tokens(batch, len(batch.token_ids))[2])
        if not template.is_last:
            return pages, hidden, loads
        return pages, (hidden, hidden[jnp.maximum(batch.query_start + batch.query_len - 1, 0)]), loads

    return step


def greedy_step(template: ModelTemplate) -> Callable[..., Sampled]:
    """The function of the program that gives every row its best token, of a template's `head`."""

    def step(weights: Weights, last: Float[Array, "R D"]) -> Sampled:
        return best(template.merge(weights), last)

    return step


def sample_step(template: ModelTemplate) -> Callable[..., Sampled]:
    """The function of the program that gives every row the token that its parameters ask for; the first R slots of the counts are the rows'."""

    def step(
        weights: Weights, last: Float[Array, "R D"], counts: TokenCounts, num_generated: Int[Array, " R"], sampling: SamplingRows
    ) -> Sampled:
        # The host knows all tokens before: its rows have no bias that depends on the newest.
        slots, newest = jnp.arange(len(last)), jnp.zeros_like(num_generated)
        return sample_from_logits(template.merge(weights).logits(last), sampling, num_generated, counts, slots, newest)

    return step


def repeat_step(num_rows: int) -> Callable[..., Float[Array, "X D"]]:
    """The function of the program that gives one row's last hidden state to as many rows, for sequences that start from one prompt."""

    def step(last: Float[Array, "R D"], row: Int[Array, ""]) -> Float[Array, "X D"]:
        return jnp.repeat(jax.lax.dynamic_slice_in_dim(last, row, 1), num_rows, axis=0)

    return step


def copy_pages(pages: Pages, source_ids: Int[Array, " X"], target_ids: Int[Array, " X"]) -> Pages:
    """Pages of a pool, copied to others of it; padding goes from the null page to the null page."""
    # In two steps: else XLA reads and writes the pool in one operation, for which it copies all of it.
    copies = jax.lax.optimization_barrier(pages[:, :, source_ids])
    return pages.at[:, :, target_ids].set(copies)


def score_step(template: ModelTemplate) -> Callable[..., PromptScores]:
    """The function of the program that gives log-probabilities of each token's successor in its prompt."""

    def step(weights: Weights, hidden: Float[Array, "T D"], next_token_ids: Int[Array, " T"]) -> PromptScores:
        model, num_tokens = template.merge(weights), len(next_token_ids)
        at_once = query_tile(num_tokens)  # tokens whose logits exist at a time

        def of_run(run: tuple[Array, Array]) -> tuple[Array, Array, Array]:
            return token_logprobs(model.logits(run[0]), run[1])

        runs = jax.lax.map(of_run, (hidden.reshape(-1, at_once, hidden.shape[1]), next_token_ids.reshape(-1, at_once)))
        return PromptScores(*(r.reshape(num_tokens, *r.shape[2:]) for r in runs))

    return step


def forward(
    model: CausalLM,
    mesh: Mesh,
    pages: Pages,
    batch: PackedTokens,
    attention: Backend = "xla",
    part: ModelSlice | None = None,
    hidden: Float[Array, "T D"] | None = None,
    *,
    splits_tokens: bool = False,
) -> tuple[Float[Array, "T D"], Pages]:
    """Hidden states of the packed tokens, and the pages with their keys and values written; of a part of the model that is not its first,
    from those of the part before."""
    num_tokens, page_size = batch.token_ids.shape[0], pages.shape[4]
    row, place, in_use = _rows_of_tokens(batch, num_tokens)
    positions = jnp.where(in_use, (batch.kv_len - batch.query_len)[row] + place, 0)
    groups = LayerGroups.of(model.config.layer_spans)
    by_group = batch.page_table.reshape(len(batch.page_table), -1, len(groups.spans))
    tables = tuple(by_group[:, :, group] for group in range(len(groups.spans)))
    page_ids = tuple(jnp.where(in_use, table[row, positions // page_size], NULL_PAGE) for table in tables)
    rows = (batch.query_start, batch.query_len, batch.kv_len)
    of_part = groups if part is None else groups.of_stage(part.layers)
    attend = PagedAttentionBackend(mesh, _AttentionKernels(attention), of_part, tables, page_ids, positions % page_size, rows)
    return run_slice(model, part, batch.token_ids, hidden, positions, pages, attend, splits_tokens=splits_tokens)


def _rows_of_tokens(batch: PackedTokens, num_tokens: int) -> tuple[Int[Array, " T"], Int[Array, " T"], Bool[Array, " T"]]:
    """The row each packed token belongs to, its place in it, and whether it belongs to any."""
    place = jnp.arange(num_tokens)[:, None] - batch.query_start
    is_of_row = (place >= 0) & (place < batch.query_len)
    row = jnp.argmax(is_of_row, axis=1)
    return row, jnp.take_along_axis(place, row[:, None], axis=1)[:, 0], is_of_row.any(axis=1)


@dataclass(frozen=True)
class _AttentionKernels:
    """Packed chunks of several requests; `rows` are query_start, query_len and kv_len. See `AttentionKernels`."""

    backend: Backend

    def write_and_attend(
        self,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        pages: Pages,
        location: KVCacheLocation,
        offsets: Int[Array, " T"],
        rows: Rows,
        params: AttentionParams,
    ) -> tuple[Float[Array, "T N H"], Pages]:
        pages = write(pages, location.layer, (k, v), location.page_ids, offsets)
        out = ragged_prefill_attention(
            q,
            pages,
            location.layer,
            location.page_table,
            *rows,
            scale=params.scale,
            query_tile=query_tile(len(q)),
            pool_is_finite=True,
            span=params.span,
            soft_cap=params.soft_cap,
            backend=self.backend,
        )
        return out, pages

    def attend_to_latents(
        self,
        q: Float[Array, "T N H"],
        up: Float[Array, "R N E"],
        pages: Pages,
        location: KVCacheLocation,
        rows: Rows,
        scale: float,
        axis: str | None,
    ) -> Float[Array, "T N V"]:
        return latent_prefill_attention(
            q,
            pages,
            location.layer,
            location.page_table,
            *rows,
            up,
            scale=scale,
            query_tile=query_tile(len(q)),
            pool_is_finite=True,
            axis=axis,
            backend=self.backend,
        )
