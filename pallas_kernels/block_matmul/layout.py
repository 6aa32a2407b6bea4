"""A matrix in GGUF's blocks, in the order in which a CPU kernel reads it: the same bits in another order.

Its outputs are cut into panels of 16. A panel holds the blocks of its 16 outputs side by side, as a tile:

    scales     float16[16]; and float16[16] minima, for types that have them
    factors    uint8[groups, 16]; and those of the minima
    a group    uint32[16] each: four bits of 8 values of each output; then, for 5 and 6 bits, the upper ones of 32 or
               16. For 8 bits, uint32[16] of 4 values

Of the values of such a word each pair 2p, 2p + 1 has its bits in the lower half and in the upper half, at the same
place, the first pair's lowest. So one shift finds two values as a bfloat16 product takes them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int, Shaped, UInt8, UInt32

from pallas_kernels.block_matmul.block_types import Blocks, BlockType, read_blocks, values_of

LANES = 16


def packs(kind: BlockType, num_outputs: int, num_inputs: int) -> bool:
    """Whether a matrix whose innermost axes of outputs and of inputs have these sizes can be packed."""
    return num_outputs % LANES == 0 and num_inputs % kind.size == 0


def words_of_group(kind: BlockType) -> tuple[int, int]:
    """Words of each output in a group: of its first bits, and of those above four."""
    return (kind.group // 4, 0) if kind.bits == 8 else (kind.group // 8, kind.group * (kind.bits - 4) // 32)


def header_bytes(kind: BlockType) -> int:
    """Bytes of a tile before its groups."""
    return LANES * (1 + kind.has_minimum) * (2 + kind.has_factors * kind.groups)


def group_bytes(kind: BlockType) -> int:
    return 4 * LANES * sum(words_of_group(kind))


def tile_bytes(kind: BlockType) -> int:
    return header_bytes(kind) + kind.groups * group_bytes(kind)


def pack(kind: BlockType, stored: UInt8[Array, "*O_and_K B"], output_axes: int = 1) -> UInt8[Array, "*P K C"]:
    """A file's blocks [outputs..., inputs... / size, bytes of a block] of a matrix with `output_axes` axes of outputs,
    as tiles: [outputs... / 16, inputs... / size, bytes of a tile]. Of the outputs only the innermost axis is cut.
    Raises `ValueError` where it can't be."""
    outputs, inputs = stored.shape[:output_axes], stored.shape[output_axes:-1]
    if stored.shape[-1] != kind.num_bytes or stored.dtype != jnp.uint8 or outputs[-1] % LANES:
        raise ValueError(
            f"pack: {stored.dtype}{stored.shape} must be uint8 blocks of {kind.num_bytes} bytes, of outputs in multiples of {LANES}"
        )
    panels = (*outputs[:-1], outputs[-1] // LANES)
    cut = jnp.moveaxis(stored.reshape(*panels, LANES, *inputs, kind.num_bytes), output_axes, -2)  # [..., lane, bytes]
    blocks = read_blocks(kind, cut)
    parts = [_bytes(blocks.scale)] + ([] if blocks.minimum is None else [_bytes(blocks.minimum)])
    parts += [jnp.swapaxes(each, -1, -2) for each in (blocks.factors, blocks.minimum_factors) if each is not None]
    codes = blocks.codes.reshape(*blocks.codes.shape[:-1], kind.groups, kind.group)
    if kind.bits == 8:
        words = _words(codes, 8)
    else:
        words = _words(codes & 15, 4)
        if kind.bits > 4:
            words = jnp.concatenate([words, _words(codes >> 4, kind.bits - 4)], axis=-1)
    parts.append(_bytes(jnp.moveaxis(words, -3, -1)))  # [..., group, word, lane]
    flat = [part.reshape(*panels, *inputs, -1) for part in parts]
    return jnp.concatenate(flat, axis=-1)


def unpack(kind: BlockType, tiles: UInt8[Array, "*P K C"]) -> Float32[Array, "*O I"]:
    """The values, with flat inputs, of tiles with one axis of these."""
    *panels, _, _ = tiles.shape
    values = jnp.moveaxis(values_of(kind, _contents(kind, tiles, None)), -2, -3)  # [..., lane, block, value]
    return values.reshape(*panels[:-1], panels[-1] * LANES, -1)


def output_values(kind: BlockType, tiles: UInt8[Array, "T K C"], lanes: Int[Array, " T"]) -> Float32[Array, "T I"]:
    """Of each of T panels all inputs of one of its 16 outputs."""
    return values_of(kind, _contents(kind, tiles, lanes)).reshape(len(tiles), -1)


def _contents(kind: BlockType, tiles: UInt8[Array, "... K C"], lanes: Int[Array, " T"] | None) -> Blocks:
    """Blocks [..., K, 16], or [T, K] of one output of each panel."""

    def in_lanes(values: Shaped[Array, "... 16"]) -> Array:
        """Lanes last: the wanted one, or all, moved in front of what belongs to a block."""
        if lanes is None:
            return values
        index = lanes.reshape(-1, *[1] * (values.ndim - 1))
        return jnp.take_along_axis(values, jnp.broadcast_to(index, (*values.shape[:-1], 1)), axis=-1)[..., 0]

    at, rest = 0, tiles

    def take(size: int) -> UInt8[Array, "... N"]:
        nonlocal at
        at += size
        return rest[..., at - size : at]

    def halves() -> Array:
        return in_lanes(jax.lax.bitcast_convert_type(take(2 * LANES).reshape(*rest.shape[:-1], LANES, 2), jnp.dtype(kind.scale_type)))

    def factors() -> Array:
        found = in_lanes(take(LANES * kind.groups).reshape(*rest.shape[:-1], kind.groups, LANES))
        return found if lanes is not None else jnp.swapaxes(found, -1, -2)

    scale = halves()
    minimum = halves() if kind.has_minimum else None
    of_scale = factors() if kind.has_factors else None
    of_minimum = factors() if kind.has_factors and kind.has_minimum else None
    of_tile = take(kind.groups * group_bytes(kind)).reshape(*rest.shape[:-1], kind.groups, -1, LANES, 4)
    words = in_lanes(jax.lax.bitcast_convert_type(of_tile, jnp.uint32))
    words = words if lanes is not None else jnp.moveaxis(words, -1, -3)
    first, _ = words_of_group(kind)
    codes = _fields(words[..., :first], 8 if kind.bits == 8 else 4)
    if kind.bits in (5, 6):
        codes |= _fields(words[..., first:], kind.bits - 4) << 4
    return Blocks(codes.reshape(*codes.shape[:-2], kind.size).astype(jnp.uint8), scale, minimum, of_scale, of_minimum)


def _shifts(bits: int) -> UInt32[Array, " N"]:
    """Where each of a word's values has its bits."""
    return jnp.asarray([bits * (place // 2) + 16 * (place % 2) for place in range(32 // bits)], jnp.uint32)


def _words(codes: UInt8[Array, "... V"], bits: int) -> UInt32[Array, "... W"]:
    of_words = codes.astype(jnp.uint32).reshape(*codes.shape[:-1], -1, 32 // bits)
    return jnp.sum(of_words << _shifts(bits), axis=-1, dtype=jnp.uint32)


def _fields(words: UInt32[Array, "... W"], bits: int) -> UInt32[Array, "... V"]:
    """The inverse of `_words`."""
    return (words[..., None] >> _shifts(bits) & (1 << bits) - 1).reshape(*words.shape[:-1], -1)


def _bytes(values: Shaped[Array, "..."]) -> UInt8[Array, "... N"]:
    return jax.lax.bitcast_convert_type(values, jnp.uint8)
