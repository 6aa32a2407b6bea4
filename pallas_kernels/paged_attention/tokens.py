"""Queries of one token a request or of its last few, as those of a KV head: kernels read each page once for all of them."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def num_tokens(q: Float[Array, "B *T N H"]) -> int:
    """That a request has queries of."""
    return q.shape[1] if q.ndim == 4 else 1


def by_kv_head(q: Float[Array, "B *T N H"], num_kv_heads: int) -> Float[Array, "B K R H"]:
    """Each KV head's queries, token by token: R = T * N / K."""
    batch, num_heads, head_size = q.shape[0], *q.shape[-2:]
    split = q.reshape(batch, num_tokens(q), num_kv_heads, num_heads // num_kv_heads, head_size)
    return split.swapaxes(1, 2).reshape(batch, num_kv_heads, -1, head_size)


def by_token(results: Float[Array, "B K R *V"], q: Float[Array, "B *T N H"]) -> Float[Array, "B *T N *V"]:
    """Results of those queries, in q's order."""
    batch, num_kv_heads, _, *rest = results.shape
    return results.reshape(batch, num_kv_heads, num_tokens(q), -1, *rest).swapaxes(1, 2).reshape(*q.shape[:-1], *rest)


def ends_of_rows(kv_len: Int[Array, " B"], num_rows: int, tokens: int) -> Int[Array, "B R"]:
    """The position after each query's own, where so many last tokens of a request have num_rows queries of a KV head; below 1 where its context
    has no such token. Of one token all are the same: R is 1 then."""
    if tokens == 1:
        return kv_len[:, None]
    return kv_len[:, None] - (tokens - 1) + jnp.arange(num_rows) // (num_rows // tokens)
