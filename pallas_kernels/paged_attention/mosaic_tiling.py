"""Tile sizes of paged_attention's kernel for GPUs, and which calls it supports."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels.mosaic.card import Card, card_for, target_device
from pallas_kernels.mosaic.tuned_tilings import tuned_tiling
from pallas_kernels.mosaic.warp_products import TILE_ROWS
from pallas_kernels.mosaic.warpgroup import ROWS

_MAX_STAGES = 8
_MIN_SPLIT_TOKENS = 256  # tokens that are worth a block
_MAX_HEAD_SIZE = 256  # columns that fit in a warpgroup's registers
_MAX_LATENT_SIZE = 576
_RESERVED = 4096  # bytes of shared memory for barriers and alignment


@dataclass(frozen=True)
class DecodeTiling:
    """Tile sizes and pipeline depth of a call."""

    tokens: int  # of a tile: a multiple of 64, and of the page size or a part of it
    stages: int  # tiles of keys, and of values, that are in flight or in use
    splits: int  # KV splits of each context
    # consumers that process a split's tiles in rotation; each has stages / warpgroups of the stages. For latents 1
    warpgroups: int = 2
    writes: bool = False  # whether a launch that has new keys and values also writes them, or expects them written

    def __post_init__(self) -> None:
        if self.stages % self.warpgroups:
            raise ValueError(f"{self.stages} stages can't be shared by {self.warpgroups} warpgroups")


def tiling_for(
    batch: int,
    num_kv_heads: int,
    group: int,
    head_size: int,
    page_size: int,
    max_context: int,
    dtype: jnp.dtype,
    *,
    is_latent: bool = False,
    is_written: bool = True,
) -> DecodeTiling:
    """The fastest measured tiling on this GPU; for writing and attending together where the new keys and values are not
    written yet. Where nothing similar was measured, a tiling that fills the GPU and its multiprocessors' shared memory.
    """
    heads = {"num_heads": num_kv_heads * group, "num_kv_heads": num_kv_heads, "head_size": head_size, "page_size": page_size}
    shape = {"dtype": dtype.name, **heads, "batch": batch, "context": max_context}
    for op in () if is_latent else ("paged_attention",) if is_written else ("write_and_attend", "paged_attention"):
        if best := tuned_tiling(op, shape):
            return DecodeTiling(**best)
    card = card_for(target_device())
    tokens, stages, warpgroups = _fit_shared_memory(card, head_size, page_size, dtype, is_latent=is_latent)
    blocks = batch * num_kv_heads * num_row_tiles(group)
    splits = max(1, min(card.multiprocessors // blocks, -(-max_context // _MIN_SPLIT_TOKENS)))
    return DecodeTiling(tokens, stages, splits, warpgroups)


def _fit_shared_memory(card: Card, head_size: int, page_size: int, dtype: jnp.dtype, *, is_latent: bool) -> tuple[int, int, int]:
    """Tokens of a tile, stages and warpgroups that fit in a block's shared memory; no stages where nothing fits."""
    # For latents no stage holds more. Pages on many devices together are large, so they are read tile by tile.
    choices = [(ROWS, 1)] if is_latent else [(max(ROWS, page_size), 2), (ROWS, 2), (ROWS, 1)]
    size, total = dtype.itemsize, ROWS * head_size * 4  # totals overwrite the keys at the end
    for tokens, warpgroups in choices:
        wide = 0 if size > 1 else 2 * warpgroups * tokens * head_size * 2
        room = card.shared_memory - _RESERVED - ROWS * head_size * max(size, 2) - wide
        tile = tokens * head_size * size
        values = 0 if is_latent else tile
        stages = next((n for n in range(_MAX_STAGES, 0, -1) if max(n * tile, total) + n * values <= room), 0)
        if stages >= 2:
            return tokens, stages // 2 * 2, warpgroups
    return tokens, stages, warpgroups


def num_row_tiles(group: int) -> int:
    """Tiles of the queries that share a KV head."""
    return -(-group // ROWS)


def padded_rows(group: int) -> int:
    """Rows of those queries, padded to a whole tile of shared memory, or to a block's tile where there are several."""
    unit = TILE_ROWS if group <= ROWS else ROWS
    return -(-group // unit) * unit


def unsupported_reason(dtype: jnp.dtype, head_size: int, page_size: int, card: Card, *, is_latent: bool = False) -> str | None:
    """Why there is no kernel for such pages on this GPU; None if there is."""
    if dtype not in (jnp.bfloat16, jnp.float16, *(() if is_latent else (jnp.float8_e4m3fn,))):
        return f"it has no kernel for {dtype.name} pages{' of latents' if is_latent else ''}"
    multiple, largest = (64, _MAX_LATENT_SIZE) if is_latent else (32 // dtype.itemsize, _MAX_HEAD_SIZE)
    if head_size % multiple or head_size > largest:
        return f"it has no kernel for heads of {head_size}: they must be a multiple of {multiple}, at most {largest}"
    if page_size not in (8, 16, 32, 64, 128) and not (is_latent and page_size % ROWS == 0):
        return f"it has no kernel for pages of {page_size} tokens: they must be of 8, 16, 32, 64 or 128"
    if not _fit_shared_memory(card, head_size, page_size, dtype, is_latent=is_latent)[1]:
        return f"it has no kernel for heads of {head_size} on a card with {card.shared_memory} bytes of shared memory a block"
    return None
