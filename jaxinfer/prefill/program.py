"""The prefill program: a pure function from packed prompt tokens to filled pages and, for prompts that end here, a first token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxinfer.kv_cache.pages import Pages, write
from jaxinfer.kv_cache.spec import NULL_PAGE, LayerGroups
from jaxinfer.layers.attention import Attend, How
from jaxinfer.models.base import CausalLM
from jaxinfer.prefill.batch import PrefillBatch
from jaxinfer.request import MAX_TOP_LOGPROBS
from jaxinfer.runtime.buckets import query_tile
from jaxinfer.runtime.template import ModelTemplate, Weights
from jaxinfer.sampling.counting import TokenCounts
from jaxinfer.sampling.sampler import Sampled, sample, token_logprobs
from pallas_kernels.dispatch import Backend
from pallas_kernels.latent_prefill_attention.op import latent_prefill_attention
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
    num_tokens, page_size = batch.token_ids.shape[0], pages.shape[4]
    row, place, in_use = _rows_of_tokens(batch, num_tokens)
    positions = jnp.where(in_use, (batch.kv_len - batch.query_len)[row] + place, 0)
    groups = LayerGroups.of(model.config.layer_spans)
    by_group = batch.page_table.reshape(len(batch.page_table), -1, len(groups.spans))
    tables = tuple(by_group[:, :, group] for group in range(len(groups.spans)))
    page_ids = tuple(jnp.where(in_use, table[row, positions // page_size], NULL_PAGE) for table in tables)
    rows = (batch.query_start, batch.query_len, batch.kv_len)
    return model(batch.token_ids, positions, pages, _InLayers(mesh, attention, groups, tables, page_ids, positions % page_size, rows))


def _rows_of_tokens(batch: PrefillBatch, num_tokens: int) -> tuple[Int[Array, " T"], Int[Array, " T"], Bool[Array, " T"]]:
    """The row each packed token belongs to, its place in it, and whether it belongs to any."""
    place = jnp.arange(num_tokens)[:, None] - batch.query_start
    is_of_row = (place >= 0) & (place < batch.query_len)
    row = jnp.argmax(is_of_row, axis=1)
    return row, jnp.take_along_axis(place, row[:, None], axis=1)[:, 0], is_of_row.any(axis=1)


class _Place(NamedTuple):
    """A layer's own."""

    layer: Int[Any, ""]  # in its group's pages
    page_table: Int[Any, "R W"]
    page_ids: Int[Any, " T"]


@dataclass(frozen=True)
class _InLayers:
    """Attention of packed chunks in any layer; see `AttendInLayers`."""

    mesh: Mesh
    backend: Backend
    groups: LayerGroups
    tables: tuple[Int[Array, "R W"], ...]  # of each group
    page_ids: tuple[Int[Array, " T"], ...]  # into which each token's keys and values go
    offsets: Int[Array, " T"]
    rows: tuple[Int[Array, " R"], Int[Array, " R"], Int[Array, " R"]]  # query_start, query_len, kv_len

    def place(self, layer: int) -> Any:
        group, place = self.groups.places[layer]
        return _Place(jnp.int32(place), self.tables[group], self.page_ids[group])

    def at(self, place: Any) -> Attend:
        return _InLayer(self, place)


@dataclass(frozen=True)
class _InLayer:
    """In one layer; see `Attend`."""

    all: _InLayers
    place: _Place

    def __call__(
        self, q: Float[Array, "T N H"], k: Float[Array, "T K H"], v: Float[Array, "T K H"], pages: Pages, how: How
    ) -> tuple[Float[Array, "T N H"], Pages]:
        def local(
            q: Array, k: Array, v: Array, pages: Pages, place: _Place, offsets: Array, rows: tuple[Array, ...]
        ) -> tuple[Array, Pages]:
            pages = write(pages, place.layer, (k, v), place.page_ids, offsets)
            attended = ragged_prefill_attention(
                q,
                pages,
                place.layer,
                place.page_table,
                *rows,
                scale=how.scale,
                query_tile=query_tile(q.shape[0]),
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
        attended, written = over_heads(q, k, v, pages, self.place, self.all.offsets, self.all.rows)
        return attended, written

    def latents(
        self, q: Float[Array, "T N H"], latents: Float[Array, "T C"], up: Float[Array, "R N E"], pages: Pages, scale: float
    ) -> tuple[Float[Array, "T N V"], Pages]:
        def local(
            q: Array, latents: Array, up: Array, pages: Pages, place: _Place, offsets: Array, rows: tuple[Array, ...]
        ) -> tuple[Array, Pages]:
            pages = write(pages, place.layer, (latents[:, None],), place.page_ids, offsets)
            query_start, query_len, kv_len = rows
            attended = latent_prefill_attention(
                q,
                pages,
                place.layer,
                place.page_table,
                query_start,
                query_len,
                kv_len,
                up,
                scale=scale,
                query_tile=query_tile(q.shape[0]),
                pool_is_finite=True,
                backend=self.all.backend,
            )
            return attended, pages

        # Each device has its own heads, and all of the latents.
        heads, whole = PartitionSpec(None, TENSOR), PartitionSpec()
        over_heads = jax.shard_map(
            local,
            mesh=self.all.mesh,
            in_specs=(heads, whole, heads, whole, whole, whole, whole),
            out_specs=(heads, whole),
            check_vma=False,
        )
        attended, written = over_heads(q, latents, up, pages, self.place, self.all.offsets, self.all.rows)
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
