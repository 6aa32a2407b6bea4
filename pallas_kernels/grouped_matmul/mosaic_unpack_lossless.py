"""Unpacks lossless bfloat16 from shared memory into registers, as `mosaic_unpack` does.

4 weights of a word of bytes need a shift of bytes, and of each pair 2 masks, a multiply-add that puts the exponents'
codes in place, and a product by the tile's power of 2, which makes exponents of them; every second word needs a shift
of its codes. Then each warp writes its escapes over what it has: of the few that a tile has, most warps have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, scf, vector
from jaxtyping import Array, BFloat16

from pallas_kernels.grouped_matmul.lossless import RANGES, SCALE
from pallas_kernels.grouped_matmul.mosaic_unpack import FIRST_FACTOR, HALF, WORDS_LAYOUT, Halves, as_pair, number, word_type
from pallas_kernels.grouped_matmul.word_order import WORDS
from pallas_kernels.mosaic.warpgroup import ROWS, load_as

_SIDES, _COLUMNS = 2, HALF // 8  # registers of a thread: upper or lower 8 of 16 rows, and 8 inputs
_NIBBLES, _SIGN_AND_MANTISSA, _EXPONENT_BIT = 0x000F000F, -0x7F807F81, 7
_OTHER_BYTES = 0x2301  # prmt's order of bytes that exchanges those of each half


def unpack_lossless(first: Any, second: Any, codes: Any, header: Any) -> Halves:
    """Weights of 64 rows of a tile, from the words [64, 16] of their first 64 inputs' bytes, of the others', of all
    exponents' codes, and the tile's header [2, 16]."""
    of_codes = load_as(WORDS_LAYOUT, codes)

    def half(part: int, words: Any) -> BFloat16[Array, "64 64"]:
        @plgpu.inline_mgpu(arg_types=(WORDS_LAYOUT, WORDS_LAYOUT, plgpu.RefType()), return_type=FIRST_FACTOR)
        def unpack(_: Any, words: Any, codes: Any, header: Any) -> Any:
            scale = as_pair(_word_of(header, number(SCALE)))
            pairs = []
            for side in range(_SIDES):
                of_bytes, of_codes = (each.registers[0, 0, 0, 0, side, 0, 0, 0, 0] for each in (words, codes))
                for place in range(4):
                    code = vector.extract(of_codes, [], [2 * part + place // 2])
                    pairs += _two_pairs(vector.extract(of_bytes, [], [place]), code, place % 2, scale)
            return _first_factor(_with_escapes(pairs, header, part))

        result: Array = unpack(words, of_codes, header)
        return result

    loaded = [load_as(WORDS_LAYOUT, words) for words in (first, second)]
    return lambda: half(0, loaded[0]), lambda: half(1, loaded[1])


def _two_pairs(of_bytes: Any, codes: Any, upper: int, scale: Any) -> list[Any]:
    """Bits of two registers, from a word of bytes and the lower or upper codes of each half of a word."""
    codes = arith.shrui(codes, number(8)) if upper else codes
    other = llvm.inline_asm(word_type(), [of_bytes, number(_OTHER_BYTES)], "prmt.b32 $0, $1, 0, $2;", "=r,r,n")
    registers = []
    for i, values in enumerate((of_bytes, other)):
        code = arith.muli(arith.andi(codes, number(_NIBBLES << 4 * i)), number(1 << (_EXPONENT_BIT - 4 * i)))
        bits = arith.addi(code, arith.andi(values, number(_SIGN_AND_MANTISSA)))
        registers.append(_as_word(arith.mulf(as_pair(bits), scale)))
    return registers


def _with_escapes(registers: Sequence[Any], header: Any, part: int) -> Sequence[Any]:
    """These registers with the warp's escapes among them."""
    thread = mgpu.thread_idx()  # consumer warpgroups are the block's first
    warp, lane = arith.shrui(thread, number(5)), arith.andi(thread, number(31))
    ends = _word_of(header, arith.addi(warp, number(RANGES)))
    begin, end = (arith.andi(arith.shrui(ends, number(8 * i)), number(255)) for i in (part, part + 1))
    new_loop: Any = scf.ForOp  # its type stub is another class's
    loop = new_loop(begin, end, number(1), list(registers))
    with ir.InsertionPoint(loop.body):
        escape = _word_of(header, loop.induction_variable)
        # Of its place (`lossless.escapes`): half of a register, thread, register.
        is_upper = arith.trunci(ir.IntegerType.get_signless(1), arith.shrui(escape, number(16)))
        is_ours = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(arith.shrui(escape, number(17)), number(31)), lane)
        register = arith.andi(arith.shrui(escape, number(22)), number(len(registers) - 1))
        register = arith.select(is_ours, register, number(len(registers)))
        value = arith.andi(escape, number(0xFFFF))
        value = arith.select(is_upper, arith.shli(value, number(16)), value)
        kept = arith.select(is_upper, number(0xFFFF), number(-0x10000))
        patched = []
        for i, bits in enumerate(loop.inner_iter_args):
            is_it = arith.cmpi(arith.CmpIPredicate.eq, register, number(i))
            patched.append(arith.select(is_it, arith.ori(arith.andi(bits, kept), value), bits))
        scf.YieldOp(patched)
    return list(loop.results)


def _first_factor(registers: Sequence[Any]) -> Any:
    """A product's first factor [64, 64] of a thread's registers, the upper rows' first."""
    layout = mgpu.WGMMA_LAYOUT
    found = np.empty(layout.registers_shape((ROWS, HALF)), dtype=object)
    for side in range(_SIDES):
        found[0, :, 0, 0, side, 0, 0, 0, 0] = [as_pair(bits) for bits in registers[side * _COLUMNS :][:_COLUMNS]]
    return mgpu.FragmentedArray(_registers=found, _layout=layout, _is_signed=None)


def _word_of(header: Any, i: Any) -> Any:
    """The header's i-th word, of rows of 16."""
    index = ir.IndexType.get()
    row, column = arith.divui(i, number(WORDS)), arith.remui(i, number(WORDS))
    return memref.load(header, [arith.index_cast(index, row), arith.index_cast(index, column)])


def _as_word(pair: Any) -> Any:
    return vector.extract(vector.bitcast(ir.VectorType.get((1,), word_type()), pair), [], [0])
