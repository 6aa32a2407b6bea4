"""Attention kernels of both roles, for the heads of one device: prefill over packed chunks, decode over the newest
tokens of each request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxinfer.kv_cache.pages import Pages, own_length
from jaxinfer.layers.attention import AttentionParams
from jaxinfer.layers.latent_attention import absorbed, attend_over_token_shards
from pallas_kernels.dispatch import KernelBackend
from pallas_kernels.latent_prefill_attention.op import latent_prefill_attention
from pallas_kernels.page_write import write
from pallas_kernels.paged_attention.op import paged_attention, paged_attention_and_lse, write_and_attend
from pallas_kernels.ragged_prefill_attention.op import ragged_prefill_attention

PrefillRows = tuple[Int[Array, " R"], Int[Array, " R"], Int[Array, " R"]]  # query_start, query_len, kv_len


class KVCacheLocation(NamedTuple):
    """A layer's pages in the pool, and its page table."""

    layer: Int[Any, ""]  # index in its group's pages
    page_table: Int[Any, "R W"]
    page_ids: Int[Any, " T"]  # that each token's keys and values are written to


class AttentionKernels(Protocol):
    """Kernels of a program, for the heads of one device. `rows`: which tokens belong to which request."""

    def write_and_attend(
        self,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        pages: Pages,
        location: KVCacheLocation,
        offsets: Int[Array, " T"],
        rows: Any,
        params: AttentionParams,
    ) -> tuple[Float[Array, "T N H"], Pages]:
        """Write keys and values to their pages at these offsets, then attend."""
        ...

    def attend_to_latents(
        self,
        q: Float[Array, "T N H"],
        up: Float[Array, "R N E"],
        pages: Pages,
        location: KVCacheLocation,
        rows: Any,
        scale: float,
        axis: str | None,
    ) -> Float[Array, "T N V"]:
        """`axis`: the mesh axis over which each page's tokens are split; None where pages are whole."""
        ...


@dataclass(frozen=True)
class PrefillKernels:
    """Packed chunks of several requests; `rows` are query_start, query_len and kv_len. See `AttentionKernels`."""

    backend: KernelBackend
    query_tile: int  # tokens; chunks start at multiples of it

    def write_and_attend(
        self,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        pages: Pages,
        location: KVCacheLocation,
        offsets: Int[Array, " T"],
        rows: PrefillRows,
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
            query_tile=self.query_tile,
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
        rows: PrefillRows,
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
            query_tile=self.query_tile,
            pool_is_finite=True,
            axis=axis,
            backend=self.backend,
        )


@dataclass(frozen=True)
class DecodeKernels:
    """The newest T tokens of each request, usually one; `rows` is kv_len, including these tokens. See
    `AttentionKernels`."""

    backend: KernelBackend

    def write_and_attend(
        self,
        q: Float[Array, "B*T N H"],
        k: Float[Array, "B*T K H"],
        v: Float[Array, "B*T K H"],
        pages: Pages,
        location: KVCacheLocation,
        offsets: Int[Array, " B*T"],
        rows: Int[Array, " B"],
        params: AttentionParams,
    ) -> tuple[Float[Array, "B*T N H"], Pages]:
        options: dict[str, Any] = {
            "scale": params.scale,
            "pool_is_finite": True,
            "span": params.span,
            "soft_cap": params.soft_cap,
            "backend": self.backend,
        }
        if len(q) == len(rows):
            where = pages, location.layer, location.page_table, location.page_ids, offsets
            return write_and_attend(q, k, v, *where, rows, **options)
        pages = write(pages, location.layer, (k, v), location.page_ids, offsets)
        if self.backend == "llvm_cpu":  # its kernel takes one token a row
            table, kv_len = _row_a_token(location.page_table, rows, len(q))
            return paged_attention(q, pages, location.layer, table, kv_len, **options), pages
        out = paged_attention(_by_row(q, rows), pages, location.layer, location.page_table, rows, **options)
        return out.reshape(q.shape), pages

    def attend_to_latents(
        self,
        q: Float[Array, "B*T N H"],
        up: Float[Array, "R N E"],
        pages: Pages,
        location: KVCacheLocation,
        rows: Int[Array, " B"],
        scale: float,
        axis: str | None,
    ) -> Float[Array, "B*T N V"]:
        options: dict[str, Any] = {"scale": scale, "pool_is_finite": True, "value_size": len(up), "backend": self.backend}

        def attend(q: Float[Array, "B*T N C"]) -> Float[Array, "B*T N R"]:
            if axis is None:
                out = paged_attention(_by_row(q, rows), pages, location.layer, location.page_table, rows, **options)
                return out.reshape(*q.shape[:2], -1)
            # Newest tokens are not the last of a device's own part of a context: each token has its own length.
            table, kv_len = (location.page_table, rows) if len(q) == len(rows) else _row_a_token(location.page_table, rows, len(q))
            where = pages, location.layer, table, own_length(kv_len, pages.shape[4], axis)
            return attend_over_token_shards(q, lambda every: paged_attention_and_lse(every, *where, **options), axis)

        return absorbed(q, up, pages.shape[5], attend)


def _by_row(q: Float[Array, "B*T N H"], rows: Int[Array, " B"]) -> Float[Array, "B *T N H"]:
    """Queries in the shape that `paged_attention` takes for one token a row, or several."""
    return q if len(q) == len(rows) else q.reshape(len(rows), -1, *q.shape[1:])


def _row_a_token(
    page_table: Int[Array, "B W"], kv_len: Int[Array, " B"], num_tokens: int
) -> tuple[Int[Array, "B*T W"], Int[Array, " B*T"]]:
    """Page table and context length of each token, as if it were a request of its own."""
    num_new = num_tokens // len(kv_len)
    of_tokens = jnp.where(kv_len > 0, kv_len - num_new, -num_new)[:, None] + jnp.arange(1, num_new + 1, dtype=jnp.int32)
    return jnp.repeat(page_table, num_new, axis=0), jnp.maximum(of_tokens, 0).reshape(-1)
