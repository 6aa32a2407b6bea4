"""bfloat16 in 12 bits a weight, without loss.

A tile has a byte of each weight, its sign and mantissa, and four bits of its exponent: 1 to 15, counted from the
tile's own. 0 stands for a weight that is 0. The few weights with other exponents, escapes, are listed at the tile's
end with their places. Places are in the order of a warp's registers, so each warp finds its own in one piece.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Int, Int32, UInt16

from pallas_kernels.grouped_matmul.word_order import INPUTS, OUTPUTS, WORDS, pack_tiles, unpack_tiles

ROWS = (2 * OUTPUTS, OUTPUTS, 2)  # of words in a tile: bytes, exponents, header
CODES = 15  # exponents that a tile's codes stand for
LARGEST_BASE = 127  # so that 2 ** base is a bfloat16
# Words of a header: 2 ** base as a pair of bfloat16; where each of the 8 warps' escapes begin, where those among the
# last 64 inputs do, and where they end, a byte each; the number of escapes that there was no room for; the escapes.
SCALE, RANGES, MISSING, FIRST = 0, 1, 9, 10
ESCAPES = 2 * WORDS - FIRST  # of a tile, at most: 22
NONE = -1  # in the place of an escape; else its place << 16 | its bits
_BIAS = 127  # of bfloat16's exponents
_SEGMENT = OUTPUTS * INPUTS // 16  # places of a warp and half of the inputs


class LosslessWeights(NamedTuple):
    """bfloat16 of any bits, with at most 22 escapes a tile. 12.06 bits a weight."""

    tiles: Int32[Array, "E FT DT 386 16"]  # of each tile: rows of bytes, of exponents, and its header


class Escapes(NamedTuple):
    """Of tiles; those that they have fewer than 22 of have an output of -1."""

    output: Int[Array, "... 22"]
    input: Int[Array, "... 22"]
    bits: UInt16[Array, "... 22"]


def lossless_from_bfloat16(weight: BFloat16[Array, "E F D"]) -> LosslessWeights:
    """Packs matrices, rows are outputs; `num_misfits` says whether all of it fitted. Raises `ValueError` for shapes
    that no tile divides."""
    _, outputs, inputs = weight.shape
    if outputs % OUTPUTS or inputs % INPUTS:
        raise ValueError(f"weight has {outputs} outputs and {inputs} inputs: both must be multiples of {OUTPUTS} to be packed")
    bits = lax.bitcast_convert_type(weight, jnp.uint16)
    is_zero, exponent = (bits & 0x7FFF) == 0, ((bits >> 7) & 0xFF).astype(jnp.uint8)
    base = _best_base(exponent)
    # One below the base comes out above all codes.
    code = exponent - base.astype(jnp.uint8).repeat(OUTPUTS, 1).repeat(INPUTS, 2)
    is_escape = ~is_zero & ((code < 1) | (code > CODES))
    sign_and_mantissa = ((bits >> 8) & 0x80 | bits & 0x7F).astype(jnp.uint8)
    planes = _exchange_signs(pack_tiles(sign_and_mantissa, 8)), pack_tiles(jnp.where(is_escape | is_zero, 0, code), 4)
    return LosslessWeights(jnp.concatenate([*planes, _headers(base, is_escape, bits)], 3))


def num_misfits(weights: LosslessWeights) -> Int[Array, ""]:
    """How many weights are in no list for lack of room."""
    return headers(weights.tiles)[..., MISSING].sum()


def lossless_shape(weights: LosslessWeights) -> tuple[int, int, int]:
    """Numbers of experts, inputs and outputs."""
    experts, output_tiles, input_tiles = weights.tiles.shape[:3]
    return experts, input_tiles * INPUTS, output_tiles * OUTPUTS


def from_lossless(weights: LosslessWeights) -> BFloat16[Array, "E D F"]:
    """The matrices, to the bit."""
    experts, inputs, outputs = lossless_shape(weights)
    of_bytes, of_codes, _ = jnp.split(weights.tiles, (ROWS[0], ROWS[0] + ROWS[1]), 3)
    header = headers(weights.tiles)
    tiles = tile_bits(of_bytes, of_codes, header[..., SCALE])
    bits = jnp.transpose(tiles, (0, 2, 4, 1, 3)).reshape(experts, inputs, outputs)
    found = escapes(header)
    expert, output_tile, input_tile = jnp.indices(header.shape[:3], sparse=True)
    output = jnp.where(found.output < 0, outputs, output_tile[..., None] * OUTPUTS + found.output)
    patched = bits.at[expert[..., None], input_tile[..., None] * INPUTS + found.input, output].set(found.bits, mode="drop")
    return lax.bitcast_convert_type(patched, jnp.bfloat16)


def tile_bits(
    of_bytes: Int32[Array, "*T 2R 16"], of_codes: Int32[Array, "*T R 16"], scale: Int32[Array, "*T"]
) -> UInt16[Array, "*T R 128"]:
    """Bits of weights of some rows of a tile, before its escapes are put in. `scale`: the header's word."""
    sign_and_mantissa = jnp.concatenate(jnp.split(unpack_tiles(_exchange_signs(of_bytes), 8), 2, axis=-2), -1)
    code = unpack_tiles(of_codes, 4)
    base = ((scale & 0xFFFF) >> 7) - _BIAS
    exponent = jnp.where(code == 0, 0, code + base[..., None, None])
    return ((sign_and_mantissa & 0x80) << 8 | exponent << 7 | sign_and_mantissa & 0x7F).astype(jnp.uint16)


def half_of_tile(
    of_bytes: Int32[Array, "128 16"], of_codes: Int32[Array, "64 16"], header: Int32[Array, " 32"], half: Int[Array, ""]
) -> BFloat16[Array, "64 128"]:
    """The first 64 outputs of a tile, or the others."""
    bits = tile_bits(of_bytes, of_codes, header[SCALE]).astype(jnp.int32)
    found = escapes(header)
    rows = (found.output - half * len(bits))[:, None, None] == jnp.arange(len(bits))[:, None]
    is_here = rows & (found.input[:, None, None] == jnp.arange(INPUTS)) & (found.output[:, None, None] >= 0)
    patched = jnp.where(is_here.any(0), jnp.where(is_here, found.bits[:, None, None].astype(jnp.int32), 0).sum(0), bits)
    return lax.bitcast_convert_type(patched.astype(jnp.uint16), jnp.bfloat16)


def headers(tiles: Int32[Array, "*T 386 16"]) -> Int32[Array, "*T 32"]:
    """Of whole tiles."""
    return tiles[..., ROWS[0] + ROWS[1] :, :].reshape(*tiles.shape[:-2], -1)


def escapes(header: Int32[Array, "*T 32"]) -> Escapes:
    """The weights of tiles that stand in their headers."""
    words = header[..., FIRST:]
    place = words >> 16

    def part(first: int, bits: int) -> Array:
        return (place >> first) & (2**bits - 1)

    # Of a place, from its lowest bit: half of a register, thread of a row, row, 8 inputs, upper or lower rows, half of
    # the inputs, 16 outputs.
    output = part(11, 3) * 16 + part(9, 1) * 8 + part(3, 3)
    return Escapes(
        jnp.where(words == NONE, -1, output), part(10, 1) * 64 + part(6, 3) * 8 + part(0, 3), (words & 0xFFFF).astype(jnp.uint16)
    )


def _by_place(weights: Array) -> Array:
    """[E, F, D] as [E, FT, DT, 16384], tile by tile in the order of places."""
    experts, outputs, inputs = weights.shape
    # 16 outputs, upper or lower 8, row; half of the inputs, 8 of them, thread and half of its register.
    cut = weights.reshape(experts, outputs // OUTPUTS, 8, 2, 8, inputs // INPUTS, 2, 8, 8)
    return jnp.transpose(cut, (0, 1, 5, 2, 6, 3, 7, 4, 8)).reshape(*_num_tiles(weights), -1)


def _num_tiles(weights: Array) -> tuple[int, int, int]:
    experts, outputs, inputs = weights.shape
    return experts, outputs // OUTPUTS, inputs // INPUTS


def _best_base(exponent: Array) -> Int32[Array, "E FT DT"]:
    """The base by which the fewest weights of a tile are escapes."""
    experts, output_tiles, input_tiles = _num_tiles(exponent)
    tiles = exponent.reshape(experts, output_tiles, OUTPUTS, input_tiles, INPUTS)

    def one(base: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
        is_coded = (tiles > base) & (tiles <= base + CODES)
        number = is_coded.sum((2, 4), dtype=jnp.int32)
        return jnp.maximum(number, best[0]), jnp.where(number > best[0], base, best[1])

    none = jnp.zeros((experts, output_tiles, input_tiles), jnp.int32)
    return lax.fori_loop(0, LARGEST_BASE + 1, one, (none, none))[1]


def _headers(base: Int32[Array, "E FT DT"], is_escape: Array, bits: Array) -> Int32[Array, "E FT DT 2 16"]:
    """Of weights [E, F, D]."""
    number = jnp.cumsum(_by_place(is_escape), -1, dtype=jnp.int16)
    # Mapped over axes that stay apart: XLA would gather what devices have split if they were one.
    place_of = jax.vmap(jax.vmap(jax.vmap(lambda counts: jnp.searchsorted(counts, jnp.arange(1, ESCAPES + 1, dtype=jnp.int16)))))
    place = place_of(number).astype(jnp.int32)
    found = jnp.take_along_axis(_by_place(bits), place, -1, mode="clip").astype(jnp.int32)
    listed = jnp.where(place < number.shape[-1], place << 16 | found, NONE)
    number = number[..., _SEGMENT - 1 :: _SEGMENT].astype(jnp.int32)
    ends = FIRST + jnp.minimum(number, ESCAPES)
    ends = jnp.concatenate([jnp.full((*base.shape, 1), FIRST), ends], -1)
    ranges = ends[..., :-1:2] | ends[..., 1::2] << 8 | ends[..., 2::2] << 16
    scale = ((base + _BIAS) << 7) * 0x10001
    missing = jnp.maximum(number[..., -1] - ESCAPES, 0)
    return jnp.concatenate([scale[..., None], ranges, missing[..., None], listed], -1).reshape(*base.shape, 2, WORDS)


def _exchange_signs(words: Int32[Array, "..."]) -> Int32[Array, "..."]:
    """With the signs of the two bytes of each half exchanged: so a mask leaves the lower byte's weight where it belongs
    in a bfloat16, but for its exponent, and the same mask the upper one's once the bytes are exchanged."""
    pairs = words.astype(jnp.uint32)
    low, high = jnp.uint32(0x00800080), jnp.uint32(0x80008000)
    return lax.bitcast_convert_type((pairs & ~(low | high)) | (pairs & low) << 8 | (pairs & high) >> 8, jnp.int32)
