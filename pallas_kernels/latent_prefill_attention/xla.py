"""latent_prefill_attention for any device XLA compiles for: a loop over runs of context, each expanded once, online softmax.

Expanding a token of context to DeepSeek-V3's sizes takes as much arithmetic as 410 queries that look at it, so no token is expanded twice:
a run is expanded for all heads, then the step's queries that see some of it go by in chunks. (Expanded anew for every 128 of 512 queries, on a
CPU, a step takes 1.7 times as long.) The pages of all requests follow one another in one list that runs are cut from, so many short prompts
share a run as the queries of a long one do; a mask keeps requests apart. Both loops are as long as what is there when the program runs.

What is held, with DeepSeek-V3's 128 heads on one device, T = 4,096 and bfloat16: queries by chunk (201 MB) and float32 sums (272 MB); for a run
of 512 tokens its keys and values (42 MB, while they are made as much again), for a chunk of 512 queries scores (134 MB) and weights (67 MB); of
none of it more for longer contexts. Compiled for an H200 it is 886 MB in all, 111 MB with the 16 heads of one in eight devices.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Tokens: of context that are expanded at once, and of queries that then go by at once. Products should be large, for a GPU starts several kernels for
# each; but one run is the least that is expanded, and a chunk of several requests' queries is masked for each.
_SHORTEST_RUN, _LONGEST_RUN = 128, 512
_SHORTEST_CHUNK, _LONGEST_CHUNK = 128, 512
_MASKED = -1e30


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
) -> Float[Array, "T N V"]:
    """See op.py."""
    del query_tile, pool_is_finite  # chunks need not begin with a request, and a mask over latents, before they are expanded, costs nothing
    num_layers, _, num_pages, _, page_size, width = latent_pages.shape
    num_tokens, num_heads, head_size = q.shape
    rank, num_rows = len(up), len(page_table)
    own_size = head_size - (width - rank)  # of a key's columns that are its head's own
    dtype = q.dtype if q.dtype == latent_pages.dtype else jnp.dtype("float32")
    run_pages = max(min(max(num_tokens, _SHORTEST_RUN), _LONGEST_RUN) // page_size, 1)
    num_chunks = -(-num_tokens // min(max(num_tokens // num_rows, _SHORTEST_CHUNK), _LONGEST_CHUNK))
    chunk = -(-num_tokens // num_chunks)

    # By chunk, with the heads first, as batched products want them.
    padding = num_chunks * chunk - num_tokens
    queries = jnp.pad(q, ((0, padding), (0, 0), (0, 0))).astype(dtype).reshape(num_chunks, chunk, num_heads, head_size).swapaxes(1, 2)
    place = jnp.arange(num_chunks * chunk)[:, None] - query_start
    is_of_row = (place >= 0) & (place < query_len)
    query_row = jnp.argmax(is_of_row, axis=1)
    cached = kv_len - query_len
    position = jnp.where(is_of_row, cached + place, -1).max(axis=1).reshape(num_chunks, chunk)
    query_row = query_row.reshape(num_chunks, chunk)

    last_page = jnp.cumsum(
        jnp.where(query_len > 0, (kv_len + page_size - 1) // page_size, 0)
    )  # of each row in the list of all pages, excluded
    pool = latent_pages.reshape(num_layers * num_pages, page_size * width)

    def one_run(i: Int[Array, ""], sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        place = i * run_pages + jnp.arange(run_pages)
        row = jnp.minimum(jnp.sum(place[:, None] >= last_page, axis=1), num_rows - 1)
        page = jnp.clip(place - jnp.where(row > 0, last_page[row - 1], 0), 0, page_table.shape[1] - 1)
        is_listed = place < last_page[-1]
        context = page[:, None] * page_size + jnp.arange(page_size)  # the tokens' positions, by page
        is_cached = (is_listed[:, None] & (context < kv_len[row][:, None])).reshape(-1)
        context_row = jnp.where(is_cached, jnp.repeat(row, page_size), -1)
        # "clip": page numbers are the allocator's, always in range, and the default mode would mask every element.
        latents = jnp.take(pool, layer * num_pages + page_table[row, page], axis=0, mode="clip").reshape(-1, width)
        latents = jnp.where(is_cached[:, None], latents, 0)
        keys, values = _expanded(latents, up, own_size, dtype)

        def one_chunk(j: Int[Array, ""], sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, out = (s[j] for s in sums)
            scores = jnp.einsum("nqh,nsh->nqs", queries[j], keys, preferred_element_type=jnp.float32) * scale
            seen = (context_row == query_row[j][:, None]) & (context.reshape(-1) <= position[j][:, None])
            scores = jnp.where(seen, scores, _MASKED)
            new_top = jnp.maximum(top, scores.max(-1))
            # 0 where masked, once a query has seen a token; whatever comes before that is shrunk to 0 when it does.
            weights = jnp.exp(scores - new_top[..., None])
            shrink = jnp.exp(top - new_top)
            attended = jnp.einsum("nqs,nsv->nqv", weights.astype(dtype), values, preferred_element_type=jnp.float32)
            new_total, new_out = total * shrink + weights.sum(-1), out * shrink[..., None] + attended
            return sums[0].at[j].set(new_top), sums[1].at[j].set(new_total), sums[2].at[j].set(new_out)

        # The queries that see any of these pages: of their requests, those that don't come before the page.
        first = query_start[row] + jnp.maximum(page * page_size - cached[row], 0)
        first, end = jnp.where(is_listed, first, num_tokens).min(), jnp.where(is_listed, (query_start + query_len)[row], 0).max()
        return jax.lax.fori_loop(first // chunk, (end + chunk - 1) // chunk, one_chunk, sums)

    shape = (num_chunks, num_heads, chunk)
    start = (jnp.full(shape, _MASKED), jnp.zeros(shape), jnp.zeros((*shape, up.shape[2] - own_size)))
    _, total, out = jax.lax.fori_loop(0, (last_page[-1] + run_pages - 1) // run_pages, one_run, start)
    out = jnp.where((position >= 0)[:, None, :, None], out / jnp.maximum(total, 1e-30)[..., None], 0.0)
    return out.swapaxes(1, 2).reshape(num_chunks * chunk, num_heads, -1)[:num_tokens].astype(q.dtype)


def _expanded(
    latents: Float[Array, "S C"], up: Float[Array, "R N E"], own_size: int, dtype: jnp.dtype
) -> tuple[Float[Array, "N S H"], Float[Array, "N S V"]]:
    """Keys and values of every head."""
    expanded = jnp.einsum("sr,rne->nse", latents[:, : len(up)].astype(up.dtype), up, preferred_element_type=jnp.float32).astype(dtype)
    # A request whose numbers overflow has neighbours in this run, whose weights for its values are 0: 0 times infinity would be NaN.
    values = jnp.where(jnp.isfinite(expanded[..., own_size:]), expanded[..., own_size:], 0)
    shared = jnp.broadcast_to(latents[:, len(up) :].astype(dtype), (up.shape[1], len(latents), latents.shape[1] - len(up)))
    return jnp.concatenate([expanded[..., :own_size], shared], axis=-1), values
