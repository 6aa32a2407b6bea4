"""The prefill programs, pure functions: one fills pages from packed prompt tokens; others sample the first tokens of
prompts that end in the step, and score prompts on request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jaxinfer.kv_cache.pages import KVScales, Pages
from jaxinfer.kv_cache.spec import LayerGroups
from jaxinfer.layers.attention_kernels import PrefillKernels
from jaxinfer.layers.paged_attention import PagedAttentionBackend, pages_of_tokens
from jaxinfer.layers.step_context import NO_CONTEXT, StepContext
from jaxinfer.models.base import CausalLM, ModelSlice, run_slice
from jaxinfer.pipeline.expert_loads import with_loads
from jaxinfer.prefill.batch import PackedTokens
from jaxinfer.programs.buckets import query_tile
from jaxinfer.sampling.params import SamplingRows
from jaxinfer.sampling.sampler import Sampled, sample, token_logprobs
from jaxinfer.sampling.token_counts import TokenCounts
from jaxinfer.weights.template import ModelTemplate, Weights
from pallas_kernels.dispatch import KernelBackend


class PromptScores(NamedTuple):
    """Log-probabilities of each token's successor in its prompt."""

    logprobs: Float[Any, " T"]
    top_tokens: Int[Any, "T 20"]
    top_logprobs: Float[Any, "T 20"]


# The last stage's output: hidden states of all tokens, and of each row's last one.
Given = tuple[Float[Array, "T D"], Float[Array, "R D"]]
PrefillStep = Callable[..., tuple[Pages, Given | Float[Array, "T D"], Int[Array, "L E"] | None]]


def prefill_step(template: ModelTemplate, mesh: Mesh, attention: KernelBackend, *, splits_tokens: bool = False) -> PrefillStep:
    """The program that fills pages, for a whole model or a stage, which passes hidden states to the next. Pages are
    donated. `loads`: see `pipeline.expert_loads`; `splits_tokens`: see `models.base.run_slice`."""

    def step(
        weights: Weights,
        pages: Pages,
        kv_scales: KVScales | None,
        batch: PackedTokens,
        loads: Int[Array, "L E"] | None,
        hidden: Float[Array, "T D"] | None = None,
        context: StepContext = NO_CONTEXT,
    ) -> tuple[Pages, Given | Float[Array, "T D"], Int[Array, "L E"] | None]:
        model = template.merge(weights)
        of_stage = template.part, hidden, context, kv_scales
        hidden, pages = forward(model, mesh, pages, batch, attention, *of_stage, splits_tokens=splits_tokens)
        if loads is not None:
            loads = with_loads(loads, model, _rows_of_tokens(batch, len(batch.token_ids))[2])
        if not template.is_last:
            return pages, hidden, loads
        return pages, (hidden, hidden[jnp.maximum(batch.query_start + batch.query_len - 1, 0)]), loads

    return step


def sample_step(template: ModelTemplate) -> Callable[..., Sampled]:
    """The sampling programs, of a template's `head`. The host chooses: with sampling parameters each row is sampled by
    its own, without them greedily. The first R slots of the counts belong to the rows."""

    def step(
        weights: Weights,
        last: Float[Array, "R D"],
        counts: TokenCounts | None = None,
        num_generated: Int[Array, " R"] | None = None,
        sampling: SamplingRows | None = None,
        mask: Int[Array, "R W"] | None = None,
    ) -> Sampled:
        # The host knows all tokens before, so no bias depends on the newest.
        slots, newest = jnp.arange(len(last)), jnp.zeros(len(last), jnp.int32)
        num_generated = newest if num_generated is None else num_generated
        return sample(template.merge(weights), last, sampling, num_generated, counts, slots, newest, mask, is_chosen_by_host=True)

    return step


def repeat_step(num_rows: int) -> Callable[..., Float[Array, "X D"]]:
    """The program that copies one row's last hidden state to `num_rows` rows, for sequences that share a prompt."""

    def step(last: Float[Array, "R D"], row: Int[Array, ""]) -> Float[Array, "X D"]:
        return jnp.repeat(jax.lax.dynamic_slice_in_dim(last, row, 1), num_rows, axis=0)

    return step


def copy_pages(pages: Pages, source_ids: Int[Array, " X"], target_ids: Int[Array, " X"]) -> Pages:
    """Copy pages of a pool to others of it; padding copies the null page to itself."""
    # In two steps: XLA would fuse them into one read-write of the pool, for which it copies all of it.
    copies = jax.lax.optimization_barrier(pages[:, :, source_ids])
    return pages.at[:, :, target_ids].set(copies)


def score_step(template: ModelTemplate) -> Callable[..., PromptScores]:
    """The program that computes log-probabilities of each token's successor in its prompt."""

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
    attention: KernelBackend = "xla",
    part: ModelSlice | None = None,
    hidden: Float[Array, "T D"] | None = None,
    context: StepContext = NO_CONTEXT,
    kv_scales: KVScales | None = None,
    *,
    splits_tokens: bool = False,
) -> tuple[Float[Array, "T D"], Pages]:
    """Hidden states of the packed tokens, and the pages with keys and values written. `hidden`: from the slice before,
    for a slice (`part`) that is not the first. `kv_scales`: of float8 pages."""
    num_tokens, page_size = batch.token_ids.shape[0], pages.shape[4]
    row, place, in_use = _rows_of_tokens(batch, num_tokens)
    positions = jnp.where(in_use, (batch.kv_len - batch.query_len)[row] + place, 0)
    spans = model.config.layer_spans
    attend = PagedAttentionBackend.of(
        mesh,
        PrefillKernels(attention, query_tile(num_tokens)),
        spans,
        None if part is None else part.layers,
        batch.page_table,
        pages_of_tokens(batch.page_table, len(LayerGroups.of(spans).spans), row, positions // page_size, in_use),
        positions % page_size,
        (batch.query_start, batch.query_len, batch.kv_len),
        context.for_tokens(row),
        kv_scales,
    )
    return run_slice(model, part, batch.token_ids, hidden, positions, pages, attend, splits_tokens=splits_tokens)


def _rows_of_tokens(batch: PackedTokens, num_tokens: int) -> tuple[Int[Array, " T"], Int[Array, " T"], Bool[Array, " T"]]:
    """For each packed token: its row, its index in it, and whether it belongs to any."""
    place = jnp.arange(num_tokens)[:, None] - batch.query_start
    is_of_row = (place >= 0) & (place < batch.query_len)
    row = jnp.argmax(is_of_row, axis=1)
    return row, jnp.take_along_axis(place, row[:, None], axis=1)[:, 0], is_of_row.any(axis=1)
