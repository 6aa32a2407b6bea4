"""latent_prefill_attention for any device XLA compiles for: a loop over runs of context, each expanded once, online
softmax.

Expanding a token of context to DeepSeek-V3's sizes is as much arithmetic as the attention of 410 queries to it, so no
token is expanded twice. A run is expanded for all heads; then the queries that see some of it are processed in chunks.
(Expanding anew for every 128 of 512 queries makes a step 1.7 times as long on a CPU.) The pages of all requests follow
one another in one list that is cut into runs. So many short prompts share a run just as the queries of a long one do,
and a mask separates requests. The lengths of both loops are known at run time.

Where devices have a part of each page, they gather several runs at a time: starting a collective takes as long as
attending to a few hundred tokens. The alternative, each device expanding its own part for all heads, sends queries and
outputs. That is more bytes up to contexts of some 70 times the step's tokens (DeepSeek-V3's sizes).

Memory with DeepSeek-V3's 128 heads on one device, T = 4,096 and bfloat16: queries by chunk (201 MB) and float32 sums
(272 MB); for a run of 512 tokens keys and values (42 MB, twice that while they are computed); for a chunk of 512
queries scores (134 MB) and weights (67 MB). It does not grow with the context. Compiled for an H200 it is 886 MB in
all, 111 MB with the 16 heads of one in eight devices.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.float8_pages import widened
from pallas_kernels.latent_prefill_attention.page_list import PageList

# Tokens of context that are expanded at once, and of queries that are then processed at once. Products should be large:
# a GPU starts several kernels for each. But at least one run is expanded, and a chunk with several requests' queries is
# masked for each.
_MIN_RUN_TOKENS, _MAX_RUN_TOKENS = 128, 512
_MIN_CHUNK_TOKENS, _MAX_CHUNK_TOKENS = 128, 512
_RUNS_GATHERED = 8
_MASKED = -1e30

SoftmaxState = tuple[
    Float[Array, "*C N Q"], Float[Array, "*C N Q"], Float[Array, "*C N Q V"]
]  # of queries: largest score, sum of weights, sum of weighted values


def latent_prefill_attention(
    q: Float[Array, "T N H"],
    latent_pages: Float[Array, "L 1 P 1 G C"],
    layer: Int[Array, ""],
    page_table: Int[Array, "X W"],
    query_start: Int[Array, " X"],
    query_len: Int[Array, " X"],
    kv_len: Int[Array, " X"],
    up: Float[Array, "R N E"],
    *,
    scale: float,
    query_tile: int,
    pool_is_finite: bool,
    axis: str | None = None,
) -> Float[Array, "T N V"]:
    """See op.py."""
    # a chunk may hold parts of several requests; masking what is not finite costs nothing here
    del query_tile, pool_is_finite
    pages = PageList.for_rows(latent_pages, layer, page_table, jnp.where(query_len > 0, kv_len, 0), axis)
    part_size, width = latent_pages.shape[4:]
    num_parts, page_size = pages.num_parts, pages.page_size
    num_tokens, num_heads, head_size = q.shape
    num_rows = len(page_table)
    dtype = q.dtype if q.dtype == latent_pages.dtype else jnp.dtype("float32")
    run_pages = max(min(max(num_tokens, _MIN_RUN_TOKENS), _MAX_RUN_TOKENS) // page_size, 1)
    num_chunks = -(-num_tokens // min(max(num_tokens // num_rows, _MIN_CHUNK_TOKENS), _MAX_CHUNK_TOKENS))
    chunk = -(-num_tokens // num_chunks)

    # By chunk, with the heads first, as batched products need them.
    padding = num_chunks * chunk - num_tokens
    queries = jnp.pad(q, ((0, padding), (0, 0), (0, 0))).astype(dtype).reshape(num_chunks, chunk, num_heads, head_size).swapaxes(1, 2)
    place = jnp.arange(num_chunks * chunk)[:, None] - query_start
    is_of_row = (place >= 0) & (place < query_len)
    cached = kv_len - query_len
    query_row = jnp.argmax(is_of_row, axis=1).reshape(num_chunks, chunk)
    position = jnp.where(is_of_row, cached + place, -1).max(axis=1).reshape(num_chunks, chunk)

    num_runs = pages.num_runs(run_pages)

    def one_run(i: Int[Array, ""], parts: Float[Array, "*D C g*W"], sums: SoftmaxState) -> SoftmaxState:
        place = i * run_pages + jnp.arange(run_pages)
        row, page = pages.locate(place)
        keys, values = _expand(widened(parts.reshape(run_pages * page_size, width)), up, head_size, dtype)
        # Tokens are in the order of the devices' parts.
        part = jnp.arange(num_parts)[:, None, None] * part_size
        context_row = jnp.tile(jnp.repeat(row, part_size), num_parts)
        context = (page[:, None] * page_size + part + jnp.arange(part_size)).reshape(-1)

        def one_chunk(j: Int[Array, ""], sums: SoftmaxState) -> SoftmaxState:
            seen = (context_row == query_row[j][:, None]) & (context <= position[j][:, None])
            top, total, out = _attend(queries[j], keys, values, seen, scale, (sums[0][j], sums[1][j], sums[2][j]))
            return sums[0].at[j].set(top), sums[1].at[j].set(total), sums[2].at[j].set(out)

        # The queries that see any of these pages: those of their requests that don't come before the page.
        first = jnp.where(place < pages.end[-1], query_start[row] + jnp.maximum(page * page_size - cached[row], 0), num_tokens).min()
        end = (query_start + query_len)[row].max()
        return jax.lax.fori_loop(first // chunk, (end + chunk - 1) // chunk, one_chunk, sums)

    shape = (num_chunks, num_heads, chunk)
    value_size = up.shape[2] - (head_size - (width - len(up)))
    start = (jnp.full(shape, _MASKED), jnp.zeros(shape), jnp.zeros((*shape, value_size)))
    if axis is None:
        _, total, out = jax.lax.fori_loop(
            0, num_runs, lambda i, sums: one_run(i, pages.read(i * run_pages + jnp.arange(run_pages)), sums), start
        )
    else:
        most = min(_RUNS_GATHERED, -(-page_table.size // run_pages))

        def one_gathering(i: Int[Array, ""], sums: SoftmaxState) -> SoftmaxState:
            # All devices count the same runs, so that none waits for one that has finished.
            parts = jax.lax.all_gather(pages.read(i * most * run_pages + jnp.arange(most * run_pages)), axis)

            def one(j: Int[Array, ""], sums: SoftmaxState) -> SoftmaxState:
                return one_run(j, jax.lax.dynamic_slice_in_dim(parts, (j - i * most) * run_pages, run_pages, axis=1), sums)

            return jax.lax.fori_loop(i * most, jnp.minimum((i + 1) * most, num_runs), one, sums)

        _, total, out = jax.lax.fori_loop(0, (num_runs + most - 1) // most, one_gathering, start)
    out = jnp.where((position >= 0)[:, None, :, None], out / jnp.maximum(total, 1e-30)[..., None], 0.0)
    return out.swapaxes(1, 2).reshape(num_chunks * chunk, num_heads, -1)[:num_tokens].astype(q.dtype)


def _expand(
    latents: Float[Array, "S C"], up: Float[Array, "R N E"], head_size: int, dtype: jnp.dtype
) -> tuple[Float[Array, "N S H"], Float[Array, "N S V"]]:
    """Expands latents to keys and values of every head."""
    own_size = head_size - (latents.shape[1] - len(up))
    both = jnp.einsum("sr,rne->nse", latents[:, : len(up)].astype(up.dtype), up, preferred_element_type=jnp.float32).astype(dtype)
    # A query that doesn't see a value has a weight of 0 for it, and 0 times NaN would be NaN. Values may be NaN outside
    # of contexts, or in another request whose numbers overflow.
    values = jnp.where(jnp.isfinite(both[..., own_size:]), both[..., own_size:], 0)
    shared = jnp.broadcast_to(latents[:, len(up) :].astype(dtype), (up.shape[1], len(latents), latents.shape[1] - len(up)))
    return jnp.concatenate([both[..., :own_size], shared], axis=-1), values


def _attend(
    queries: Float[Array, "N Q H"],
    keys: Float[Array, "N S H"],
    values: Float[Array, "N S V"],
    seen: Bool[Array, "Q S"],
    scale: float,
    sums: SoftmaxState,
) -> SoftmaxState:
    """The queries' softmax state after these keys and values."""
    top, total, out = sums
    scores = jnp.einsum("nqh,nsh->nqs", queries, keys, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(seen, scores, _MASKED)
    new_top = jnp.maximum(top, scores.max(-1))
    # Masked weights are 0 once a query has seen a token. Whatever was summed before that is rescaled to 0 then.
    weights = jnp.exp(scores - new_top[..., None])
    rescale = jnp.exp(top - new_top)
    attended = jnp.einsum("nqs,nsv->nqv", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return new_top, total * rescale + weights.sum(-1), out * rescale[..., None] + attended
