"""The prefill program: a pure function from packed prompt tokens to filled pages and, for prompts that end here, a first token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxinfer.kv_cache.pages import Pages, write
from jaxinfer.kv_cache.spec import NULL_PAGE
from jaxinfer.models.base import CausalLM
from jaxinfer.prefill.batch import PrefillBatch
from jaxinfer.request import MAX_TOP_LOGPROBS
from jaxinfer.runtime.buckets import query_tile
from jaxinfer.runtime.template import ModelTemplate, Weights
from jaxinfer.sampling.counting import TokenCounts
from jaxinfer.sampling.sampler import Sampled, sample, token_logprobs
from pallas_kernels.dispatch import Backend
from pallas_kernels.ragged_prefill_attention.op import ragged_prefill_attention
from sharding.mesh import TENSOR

_SCORED_AT_ONCE = 32  # prompt tokens whose logits exist at a time when prompt log-probabilities are asked for


class PromptScores(NamedTuple):
    """Of each token's successor in its prompt; zeros unless asked for."""

    logprobs: Float[Any, " T"]
    top_tokens: Int[Any, "T 20"]
    top_logprobs: Float[Any, "T 20"]


PrefillStep = Callable[[Weights, Pages, TokenCounts, PrefillBatch], tuple[Pages, Sampled, PromptScores]]


def prefill_step(template: ModelTemplate, mesh: Mesh, attention: Backend) -> PrefillStep:
    """The program's function. It takes the pages donated; the first R slots of the counts belong to the batch's rows."""

    def step(weights: Weights, pages: Pages, counts: TokenCounts, batch: PrefillBatch) -> tuple[Pages, Sampled, PromptScores]:
        model = template.merge(weights)
        hidden, pages = forward(model, mesh, pages, batch, attention)
        last = jnp.maximum(batch.query_start + batch.query_len - 1, 0)
        sampled = sample(model, hidden[last], batch.sampling, batch.num_generated, counts, jnp.arange(len(last)))
        return pages, sampled, _score_prompt(model, hidden, batch.next_token_ids, batch.wants_prompt_logprobs)

    return step


def forward(
    model: CausalLM, mesh: Mesh, pages: Pages, batch: PrefillBatch, attention: Backend = "xla"
) -> tuple[Float[Array, "T D"], Pages]:
    """Hidden states of the packed tokens, and the pages with their keys and values written."""
    num_tokens = batch.token_ids.shape[0]
    row, place, in_use = _rows_of_tokens(batch, num_tokens)
    positions = jnp.where(in_use, (batch.kv_len - batch.query_len)[row] + place, 0)
    page_size = pages.shape[4]
    page_ids = jnp.where(in_use, batch.page_table[row, positions // page_size], NULL_PAGE)
    rows = (batch.page_table, batch.query_start, batch.query_len, batch.kv_len)
    attend = partial(_attend, mesh, attention, page_ids, positions % page_size, rows)
    return model(batch.token_ids, positions, pages, attend)


def _rows_of_tokens(batch: PrefillBatch, num_tokens: int) -> tuple[Int[Array, " T"], Int[Array, " T"], Bool[Array, " T"]]:
    """The row each packed token belongs to, its place in it, and whether it belongs to any."""
    place = jnp.arange(num_tokens)[:, None] - batch.query_start
    is_of_row = (place >= 0) & (place < batch.query_len)
    row = jnp.argmax(is_of_row, axis=1)
    return row, jnp.take_along_axis(place, row[:, None], axis=1)[:, 0], is_of_row.any(axis=1)


def _attend(
    mesh: Mesh,
    attention: Backend,
    page_ids: Int[Array, " T"],
    offsets: Int[Array, " T"],
    rows: tuple[Array, Array, Array, Array],
    layer: Int[Array, ""],
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    pages: Pages,
) -> tuple[Float[Array, "T N H"], Pages]:
    def local(
        q: Array, k: Array, v: Array, pages: Pages, layer: Array, page_ids: Array, offsets: Array, rows: tuple[Array, Array, Array, Array]
    ) -> tuple[Array, Pages]:
        pages = write(pages, layer, k, v, page_ids, offsets)
        scale, tile = q.shape[-1] ** -0.5, query_tile(q.shape[0])
        attended = ragged_prefill_attention(q, pages, layer, *rows, scale=scale, query_tile=tile, pool_is_finite=True, backend=attention)
        return attended, pages

    # Heads are independent: each device attends with its own, over its own part of every page.
    heads, whole = PartitionSpec(None, TENSOR), PartitionSpec()
    kv_heads = PartitionSpec(None, None, None, TENSOR)
    over_heads = jax.shard_map(
        local, mesh=mesh, in_specs=(heads, heads, heads, kv_heads, whole, whole, whole, whole), out_specs=(heads, kv_heads), check_vma=False
    )
    attended, written = over_heads(q, k, v, pages, layer, page_ids, offsets, rows)
    return attended, written


def _score_prompt(model: CausalLM, hidden: Float[Array, "T D"], targets: Int[Array, " T"], wanted: Bool[Array, ""]) -> PromptScores:
    num_tokens, num_top = targets.shape[0], min(MAX_TOP_LOGPROBS, model.config.vocab_size)
    at_once = query_tile(num_tokens)

    def scored() -> PromptScores:
        def of_run(run: tuple[Array, Array]) -> tuple[Array, Array, Array]:
            return token_logprobs(model.logits(run[0]), run[1], jnp.asarray(True))

        runs = jax.lax.map(of_run, (hidden.reshape(-1, at_once, hidden.shape[1]), targets.reshape(-1, at_once)))
        return PromptScores(*(r.reshape(num_tokens, *r.shape[2:]) for r in runs))

    def skipped() -> PromptScores:
        return PromptScores(jnp.zeros(num_tokens), jnp.zeros((num_tokens, num_top), jnp.int32), jnp.zeros((num_tokens, num_top)))

    return jax.lax.cond(wanted, scored, skipped)
