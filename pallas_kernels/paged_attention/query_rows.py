"""Query tokens of a request, one or its last few, as rows by KV head: kernels read each page once for all of them."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def num_tokens(q: Float[Array, "B *T N H"]) -> int:
    """Query tokens of a request."""
    return q.shape[1] if q.ndim == 4 else 1


def group_by_kv_head(q: Float[Array, "B *T N H"], num_kv_heads: int) -> Float[Array, "B K R H"]:
    """Each KV head's queries, token by token: R = T * N / K."""
    batch, num_heads, head_size = q.shape[0], *q.shape[-2:]
    split = q.reshape(batch, num_tokens(q), num_kv_heads, num_heads // num_kv_heads, head_size)
    return split.swapaxes(1, 2).reshape(batch, num_kv_heads, -1, head_size)


def restore_token_order(results: Float[Array, "B K R *V"], q: Float[Array, "B *T N H"]) -> Float[Array, "B *T N *V"]:
    """Results of those rows, in q's order."""
    batch, num_kv_heads, _, *rest = results.shape
    return results.reshape(batch, num_kv_heads, num_tokens(q), -1, *rest).swapaxes(1, 2).reshape(*q.shape[:-1], *rest)


def query_ends(kv_len: Int[Array, " B"], num_rows: int, tokens: int) -> Int[Array, "B R"]:
    """The position after each query's own, where the last `query_rows` tokens of a request have num_rows queries of a
    KV head; below 1 where its context has no such token. For one token all are the same, and R is 1."""
    if tokens == 1:
        return kv_len[:, None]
    return kv_len[:, None] - (tokens - 1) + jnp.arange(num_rows) // (num_rows // tokens)
