"""Unpacks weights from shared memory into registers, as the first factor of a tensor-core product.

A warpgroup's registers for 64 rows have the layout that `formats` packs for, so every thread unpacks what it loads
itself. 8 integers need 3 shifts, 4 masks, 4 subtractions and 4 products of pairs; 4 numbers of 8 bits need 3 shifts, 4
masks and 2 products of pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu.fragmented_array import Replicated, Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, BFloat16

from pallas_kernels.grouped_matmul.formats import INPUTS
from pallas_kernels.mosaic.warpgroup import ROWS, load_as

HALF = INPUTS // 2
# Functions that return the weights of the first half of a tile's inputs and of the second. One half is multiplied while
# the other is unpacked.
Halves: TypeAlias = tuple[Callable[[], BFloat16[Array, "64 64"]], Callable[[], BFloat16[Array, "64 64"]]]

# Thread q of the four of a row has words 4q to 4q + 3. All four have the row's scales.
WORDS_LAYOUT = plgpu.Layout.WGMMA_8BIT
_SCALES = plgpu.Layout.TILED(Tiling(((256,), (64,), (32,), (4,))), warp_dims=(-4,), lane_dims=(-2, Replicated(4)), vector_dim=-1)
FIRST_FACTOR = plgpu.ShapeDtypeStruct((ROWS, HALF), jnp.bfloat16, layout=plgpu.Layout.WGMMA)

# Bits of pairs of bfloat16. At the exponent of 128 the lowest mantissa bit counts 1.
_NIBBLES, _128, _BIASED_128 = 0x000F000F, 0x43004300, 136.0
_MAGNITUDES, _SIGNS, _UNIT = 0x07F007F0, -0x7FFF8000, 2.0**120


def unpack_int4(words: Any, scale: Any) -> Halves:
    """Weights of 64 rows of a tile, from their words [64, 16] and scales [256]."""
    loaded = load_as(WORDS_LAYOUT, words), load_as(_SCALES, scale)

    def half(places: range) -> BFloat16[Array, "64 64"]:
        @plgpu.inline_mgpu(arg_types=(WORDS_LAYOUT, _SCALES), return_type=FIRST_FACTOR)
        def unpack(_: Any, words: Any, scale: Any) -> Any:
            def pairs(side: int, place: int, word: Any) -> list[Any]:
                of_row = scale.registers[0, 0, side, 0, 0]
                factor = vector.broadcast(pair_type(), vector.extract(of_row, [], [place]))
                codes = [as_pair(_masked_or(_right(word, 4 * i), _NIBBLES, _128)) for i in range(4)]
                return [arith.mulf(arith.subf(code, _both(_BIASED_128)), factor) for code in codes]

            return _first_factor(words, places, pairs)

        return unpack(*loaded)

    return lambda: half(range(2)), lambda: half(range(2, 4))


def unpack_fp8(first: Any, second: Any) -> Halves:
    """Weights of 64 rows of a tile, before its scale, from the words [64, 16] of their first 64 inputs and of the
    others."""

    @plgpu.inline_mgpu(arg_types=(WORDS_LAYOUT,), return_type=FIRST_FACTOR)
    def unpack(_: Any, words: Any) -> Any:
        def pairs(side: int, place: int, word: Any) -> list[Any]:
            del side, place
            low = _or(_and(_left(word, 4), _MAGNITUDES), _and(_left(word, 8), _SIGNS))
            high = _or(_and(_right(word, 4), _MAGNITUDES), _and(word, _SIGNS))
            return [arith.mulf(as_pair(bits), _both(_UNIT)) for bits in (low, high)]

        return _first_factor(words, range(4), pairs)

    loaded = [load_as(WORDS_LAYOUT, words) for words in (first, second)]
    return lambda: unpack(loaded[0]), lambda: unpack(loaded[1])


def _first_factor(words: Any, places: range, pairs: Callable[[int, int, Any], list[Any]]) -> Any:
    """A product's first factor [64, 64], from a thread's words at `places`. `pairs` converts each word: (upper or lower
    8 of 16 rows, place, word)."""
    layout = mgpu.WGMMA_LAYOUT
    registers = np.empty(layout.registers_shape((ROWS, HALF)), dtype=object)
    for side in range(2):
        of_thread = words.registers[0, 0, 0, 0, side, 0, 0, 0, 0]
        columns = [pair for place in places for pair in pairs(side, place, vector.extract(of_thread, [], [place]))]
        registers[0, :, 0, 0, side, 0, 0, 0, 0] = columns
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def pair_type() -> ir.Type:
    return ir.VectorType.get((2,), ir.BF16Type.get())


def word_type() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _both(value: float) -> Any:
    return vector.broadcast(pair_type(), mgpu.c(value, ir.BF16Type.get()))


def as_pair(bits: Any) -> Any:
    return vector.bitcast(pair_type(), vector.broadcast(ir.VectorType.get((1,), word_type()), bits))


def number(value: int) -> Any:
    return mgpu.c(value, word_type())


def _and(bits: Any, mask: int) -> Any:
    return arith.andi(bits, number(mask))


def _or(bits: Any, others: Any) -> Any:
    return arith.ori(bits, number(others) if isinstance(others, int) else others)


def _masked_or(bits: Any, mask: int, others: int) -> Any:
    """bits & mask | others in one instruction, of which the compiler would make two."""
    return llvm.inline_asm(word_type(), [bits, number(mask), number(others)], "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,n,r")


def _left(bits: Any, by: int) -> Any:
    return arith.shli(bits, number(by))


def _right(bits: Any, by: int) -> Any:
    return arith.shrui(bits, number(by)) if by else bits
