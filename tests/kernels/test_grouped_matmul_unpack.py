"""What threads of a GPU make of packed weights: the instructions that the kernel is built of, with NumPy in the place of a GPU's registers.

A value here is what all threads of a warpgroup have in one register: [warp, lane, elements of 16 bits or one word].
"""

from __future__ import annotations

import re
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic import gpu as mgpu

from pallas_kernels.grouped_matmul import formats, mosaic_unpack
from pallas_kernels.grouped_matmul.cases import TINY
from tests.kernels.grouped_experts import experts

BFLOAT16 = jnp.bfloat16


def by_thread(values: np.ndarray, layout: mgpu.TiledLayout) -> np.ndarray:
    """Of an array in registers, what each thread of a warpgroup has: [warp, lane, registers in order, elements]."""
    tiles = values
    for tile in layout.tiling.tiles:
        kept = tiles.ndim - len(tile)
        cut = [part for size, of in zip(tiles.shape[kept:], tile, strict=True) for part in (size // of, of)]
        tiles = tiles.reshape(*tiles.shape[:kept], *cut)
        tiles = tiles.transpose(*range(kept), *range(kept, tiles.ndim, 2), *range(kept + 1, tiles.ndim, 2))
    lanes = [d + tiles.ndim if isinstance(d, int) else None for d in (*layout.warp_dims, *layout.lane_dims)]
    of_threads = [axis for axis in lanes if axis is not None]
    others = [axis for axis in range(tiles.ndim - 1) if axis not in of_threads]
    tiles = tiles.transpose(*of_threads, *others, tiles.ndim - 1)
    if None in lanes:  # four threads have the same
        tiles = np.repeat(tiles[:, :, None], 4, 2)
    return tiles.reshape(4, 32, -1, tiles.shape[-1])


def in_registers(values: np.ndarray, layout: mgpu.TiledLayout) -> SimpleNamespace:
    shape = layout.registers_shape(values.shape)
    registers = np.empty(int(np.prod(shape)), dtype=object)
    registers[:] = list(np.moveaxis(by_thread(values, layout), 2, 0))
    return SimpleNamespace(registers=registers.reshape(shape))


def lop3(_: object, operands: list[np.ndarray], code: str, constraints: str) -> np.ndarray:
    """Of three words, for each of the 8 cases of their bits, what a table says."""
    table = int(re.fullmatch(r"lop3\.b32 \$0, \$1, \$2, \$3, (0x[0-9A-F]+);", code).group(1), 16)
    cases = [[operand if i >> (2 - n) & 1 else ~operand for n, operand in enumerate(operands)] for i in range(8) if table >> i & 1]
    return np.bitwise_or.reduce([a & b & c for a, b, c in cases])


def extract(values: np.ndarray, dynamic: list, places: list[int]) -> np.ndarray:
    assert not dynamic
    return values[..., places[0]]


@pytest.fixture
def numpy_registers(monkeypatch):
    bfloat16 = SimpleNamespace(get=lambda: BFLOAT16)
    words = SimpleNamespace(get_signless=lambda bits: {32: np.uint32}[bits])
    fakes = {
        "ir": SimpleNamespace(BF16Type=bfloat16, IntegerType=words, VectorType=SimpleNamespace(get=lambda shape, kind: (shape[0], kind))),
        "arith": SimpleNamespace(
            andi=np.bitwise_and, ori=np.bitwise_or, shli=np.left_shift, shrui=np.right_shift, mulf=np.multiply, subf=np.subtract
        ),
        "llvm": SimpleNamespace(inline_asm=lop3),
        "vector": SimpleNamespace(
            extract=extract,
            broadcast=lambda kind, value: np.stack([value] * kind[0], -1) if isinstance(value, np.ndarray) else np.full(kind[0], value),
            bitcast=lambda kind, value: np.ascontiguousarray(value).view(kind[1]),
        ),
        "mgpu": SimpleNamespace(
            WGMMA_LAYOUT=mgpu.WGMMA_LAYOUT,
            FragmentedArray=lambda _registers, _layout, _is_signed: _registers,
            c=lambda value, kind: np.dtype(kind).type(value & 0xFFFFFFFF if kind is np.uint32 else value),
        ),
        "plgpu": SimpleNamespace(inline_mgpu=lambda **_: lambda function: lambda *arguments: function(None, *arguments)),
        "load_as": lambda layout, values: in_registers(values, layout.to_mgpu()),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(mosaic_unpack, name, fake)


@pytest.mark.parametrize("case", TINY[1:], ids=lambda case: case.format)
def test_each_thread_has_the_weights_that_its_share_of_a_product_needs(case, numpy_registers):
    packed = experts(case, np.random.default_rng(0)).weights
    words, scale = (np.asarray(a)[1, 0, 1] for a in packed)
    for half in range(2):  # of the rows
        parts = [words[first + 64 * half :][:64] for first in ((0,) if case.format == "int4" else (0, 128))]
        if case.format == "int4":
            expected = formats.int4_tile(parts[0], jnp.asarray(scale[half]))
            found = mosaic_unpack.unpack_int4(parts[0].view(np.uint32), scale[half])
        else:
            expected = formats.fp8_tile(jnp.concatenate(parts))
            found = mosaic_unpack.unpack_fp8(*(part.view(np.uint32) for part in parts))
        for first, of_half in zip((0, 64), found, strict=True):
            registers = np.stack(of_half().reshape(-1), 2)
            assert registers.dtype == BFLOAT16
            np.testing.assert_array_equal(registers, by_thread(np.asarray(expected)[:, first : first + 64], mgpu.WGMMA_LAYOUT))
