"""How experts' matrices lie in memory: bfloat16 and float32 unchanged, or packed in the order in which a GPU kernel
reads them: `Int4`, `Fp8`, and `lossless.LosslessWeights`.

A packed matrix is cut into tiles of 128 outputs and 128 inputs, each contiguous in memory. Tensor cores read their
first factor from registers: thread q of the four that share a row holds the inputs 8t + 2q and 8t + 2q + 1 for every t.
So a row of 64 bytes is what four threads load by 16 bytes each. The codes of a 32-bit word are those inputs for some t.
The two codes of a pair are as far apart as the halves of a register: a shift and a mask leave a pair in place, and
threads exchange nothing.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float, Float8e4m3fn, Int32

from pallas_kernels.grouped_matmul.lossless import LosslessWeights, from_lossless, lossless_shape
from pallas_kernels.grouped_matmul.word_order import INPUTS as INPUTS
from pallas_kernels.grouped_matmul.word_order import OUTPUTS as OUTPUTS
from pallas_kernels.grouped_matmul.word_order import WORDS as WORDS
from pallas_kernels.grouped_matmul.word_order import pack_tiles, unpack_tiles

GROUP = 32  # inputs that share an int4 scale
LINE = 32  # a tile's scale is repeated to this many floats: the copy engine writes multiples of 128 bytes
INT4_ZERO = 8  # added to integers to make them codes
_PER_WORD = GROUP // 4  # codes of 4 bits in a 32-bit word


class Int4(NamedTuple):
    """Integers of 4 bits with a bfloat16 scale for 32 inputs of an output. A weight is integer times scale, rounded to
    bfloat16. 4.5 bits a weight."""

    words: Int32[Array, "E FT DT 128 16"]  # FT x DT tiles; a row is one output's 128 inputs
    # of each half of a tile's outputs: one output's four scales, then the next one's
    scale: BFloat16[Array, "E FT DT 2 256"]


class Fp8(NamedTuple):
    """float8_e4m3fn with a float32 scale for 128 x 128; a weight is their product. No code may represent NaN."""

    words: Int32[Array, "E FT DT 256 16"]  # of each tile: its first 64 inputs, a row an output, then the others
    scale: Float[Array, "E FT DT 32"]  # each tile's scale, repeated 32 times


Weights: TypeAlias = Float[Array, "E D F"] | Int4 | Fp8 | LosslessWeights  # bfloat16 or float32, or packed


def int4_from_compressed_tensors(weight_packed: Int32[Array, "E F D/8"], weight_scale: BFloat16[Array, "E F D/32"]) -> Int4:
    """Packs experts in compressed-tensors' `pack-quantized` format (Kimi K2.x). Rows are outputs. The lowest 4 bits of
    a 32-bit word are the first of eight inputs, each with 8 added; symmetric, in groups of 32. Raises `ValueError` for
    shapes that no tile divides."""
    experts, outputs, words = weight_packed.shape
    inputs = words * _PER_WORD
    _check("weight_packed", outputs, inputs)
    if weight_scale.shape != (experts, outputs, inputs // GROUP):
        raise ValueError(
            f"weight_scale {weight_scale.shape} must be {(experts, outputs, inputs // GROUP)} for weight_packed {weight_packed.shape}"
        )
    return Int4(int4_words(weight_packed), int4_scale(weight_scale))


def fp8_from_blocks(weight: Float8e4m3fn[Array, "E F D"], weight_scale_inv: Float[Array, "E F/128 D/128"]) -> Fp8:
    """Packs experts in DeepSeek-V3's format. Rows are outputs; `weight_scale_inv` multiplies each 128 x 128 block, in
    spite of its name there. Raises `ValueError` for shapes that no tile divides."""
    experts, outputs, inputs = weight.shape
    _check("weight", outputs, inputs)
    if weight_scale_inv.shape != (experts, outputs // OUTPUTS, inputs // INPUTS):
        raise ValueError(f"weight_scale_inv {weight_scale_inv.shape} must be a scale a 128 x 128 of weight {weight.shape}")
    return Fp8(fp8_words(weight), fp8_scale(weight_scale_inv))


def int4_words(weight_packed: Int32[Array, "E F D/8"]) -> Int32[Array, "E FT DT 128 16"]:
    """The words of `int4_from_compressed_tensors`."""
    codes = (weight_packed[..., None] >> (4 * jnp.arange(_PER_WORD))) & 15
    return pack_tiles(codes.reshape(*weight_packed.shape[:2], -1), 4)


def int4_scale(weight_scale: BFloat16[Array, "E F D/32"]) -> BFloat16[Array, "E FT DT 2 256"]:
    """The scales of `int4_from_compressed_tensors`."""
    experts, outputs, groups = weight_scale.shape
    of_tile = INPUTS // GROUP
    scale = weight_scale.reshape(experts, outputs // OUTPUTS, OUTPUTS, groups // of_tile, of_tile)
    return jnp.moveaxis(scale, 3, 2).reshape(experts, outputs // OUTPUTS, groups // of_tile, 2, -1)


def fp8_words(weight: Float8e4m3fn[Array, "E F D"]) -> Int32[Array, "E FT DT 256 16"]:
    """The words of `fp8_from_blocks`."""
    return pack_tiles(lax.bitcast_convert_type(weight, jnp.uint8).astype(jnp.int32), 8)


def fp8_scale(weight_scale_inv: Float[Array, "E FT DT"]) -> Float[Array, "E FT DT 32"]:
    """The scales of `fp8_from_blocks`."""
    return jnp.repeat(weight_scale_inv.astype(jnp.float32)[..., None], LINE, -1)


def expert_shape(weights: Weights) -> tuple[int, int, int]:
    """Numbers of experts, inputs and outputs."""
    if isinstance(weights, Int4 | Fp8):
        experts, output_tiles, input_tiles = weights.words.shape[:3]
        return experts, input_tiles * INPUTS, output_tiles * OUTPUTS
    if isinstance(weights, LosslessWeights):
        return lossless_shape(weights)
    experts, inputs, outputs = weights.shape
    return experts, inputs, outputs


def dequantise(weights: Weights) -> Float[Array, "E D F"]:
    """The matrices, in bfloat16 where that holds them exactly, else in float32."""
    if isinstance(weights, Int4):
        tiles = int4_tile(weights.words, weights.scale)
    elif isinstance(weights, Fp8):
        tiles = fp8_tile(weights.words).astype(jnp.float32) * weights.scale[..., :1, None]
    else:
        return from_lossless(weights) if isinstance(weights, LosslessWeights) else weights
    experts, inputs, outputs = expert_shape(weights)
    return jnp.transpose(tiles, (0, 2, 4, 1, 3)).reshape(experts, inputs, outputs)


def int4_tile(words: Int32[Array, "*T R 16"], scale: BFloat16[Array, "*T S C"]) -> BFloat16[Array, "*T R 128"]:
    """Weights of some rows of a tile, from their words and scales."""
    integers = (unpack_tiles(words, 4) - INT4_ZERO).astype(jnp.float32)
    of_inputs = jnp.repeat(scale.reshape(*words.shape[:-1], INPUTS // GROUP), GROUP, -1).astype(jnp.float32)
    # Rounded explicitly: XLA may leave out the rounding where it continues in float32.
    return lax.reduce_precision(integers * of_inputs, exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16)


def fp8_tile(words: Int32[Array, "*T 2R 16"]) -> BFloat16[Array, "*T R 128"]:
    """Weights of some rows of a tile, before its scale: from the words of their first 64 inputs, then of the others."""
    numbers = lax.bitcast_convert_type(unpack_tiles(words, 8).astype(jnp.uint8), jnp.float8_e4m3fn).astype(jnp.bfloat16)
    return jnp.concatenate(jnp.split(numbers, 2, axis=-2), -1)


def _check(name: str, outputs: int, inputs: int) -> None:
    if outputs % OUTPUTS or inputs % INPUTS:
        raise ValueError(f"{name} has {outputs} outputs and {inputs} inputs: both must be multiples of {OUTPUTS} to be packed")
