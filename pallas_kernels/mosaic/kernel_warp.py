"""`warp_products.Warp` in a kernel for Mosaic GPU: each step is an instruction or two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, Float

from pallas_kernels.mosaic.warp_products import NUMBER, InterleavedTiles, RegisterFactor, Registers, SharedMemoryFactor, add_product


def product_in_kernel(
    total: Float[Array, "64 X"], a: Any, b: Any, transforms: Sequence[Any], *, a_is_transposed: bool = False, b_is_transposed: bool
) -> Float[Array, "64 X"]:
    """total + a @ b, or a @ b.T, in a kernel. a[64, K] is in registers in the layout of accumulators, or in shared
    memory, there also as [K, 64]; b is in shared memory. `transforms`: the memory layout of each factor that is a
    reference."""
    is_in_registers = isinstance(a, jax.Array)
    types = [plgpu.Layout.WGMMA if is_in_registers else plgpu.RefType(transforms[0]), plgpu.RefType(transforms[-1])]
    depth = b.shape[1] if b_is_transposed else b.shape[0]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, *types),
        return_type=plgpu.ShapeDtypeStruct(total.shape, total.dtype, layout=plgpu.Layout.WGMMA),
    )
    def emit(_: Any, total: Any, a: Any, b: Any) -> Any:
        factor = RegisterFactor(_blocks(a)) if is_in_registers else SharedMemoryFactor(_tiles(a), a_is_transposed)
        kind = "bf16" if isinstance(ir.MemRefType(b.type).element_type, ir.BF16Type) else "f16"
        sums = add_product(_KernelWarp.here(kind), _sums(total), factor, _tiles(b), depth, b_is_transposed=b_is_transposed)
        return _accumulator(sums, total)

    result: Array = emit(total, a, b)
    return result


def _as_operator(operation: Callable[[Any, Any], Any]) -> Callable[[_Bits, _Bits | int], _Bits]:
    return lambda left, right: _Bits(operation(left.value, right.value if isinstance(right, _Bits) else mgpu.c(right, _i32())))


@dataclass(frozen=True)
class _Bits:
    """An i32 of each thread."""

    value: Any

    __add__ = _as_operator(arith.addi)
    __mul__ = _as_operator(arith.muli)
    __and__ = _as_operator(arith.andi)
    __xor__ = _as_operator(arith.xori)
    __lshift__ = _as_operator(arith.shli)
    __rshift__ = _as_operator(arith.shrui)


@dataclass(frozen=True)
class _KernelWarp:
    """A warp of the compiled kernel."""

    lane: _Bits
    warp: _Bits
    kind: str  # bf16 or f16

    @classmethod
    def here(cls, kind: str) -> _KernelWarp:
        thread = _Bits(mgpu.utils.thread_idx())
        return cls(thread & 31, (thread >> 5) & 3, kind)

    def load(self, memory: Any, offset: _Bits, num_matrices: int, *, is_transposed: bool) -> Registers:
        # It reads memory, so it must keep its place between barriers.
        transposed, registers = ".trans" if is_transposed else "", ", ".join(f"${i}" for i in range(num_matrices))
        return _asm(
            f"ldmatrix.sync.aligned.m8n8.x{num_matrices}{transposed}.shared.b16 {{{registers}}}, [${num_matrices}];",
            [_i32()] * num_matrices,
            [((memory + offset).value, "r")],
            has_side_effects=True,
        )

    def multiply(self, total: Registers, a: Registers, b: Registers) -> Registers:
        return _asm(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{self.kind}.{self.kind}.f32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            [ir.F32Type.get()] * 4,
            [(value, "r") for value in (*a, *b)] + [(value, "f") for value in total],
        )


def _asm(text: str, types: Sequence[ir.Type], operands: Sequence[tuple[Any, str]], *, has_side_effects: bool = False) -> Registers:
    constraints = ["=f" if isinstance(kind, ir.F32Type) else "=r" for kind in types] + [kind for _, kind in operands]
    results: Any = llvm.inline_asm(
        llvm.StructType.get_literal(list(types)),
        [value for value, _ in operands],
        text,
        ",".join(constraints),
        has_side_effects=has_side_effects,
    )
    return tuple(llvm.extractvalue(kind, results, [i]) for i, kind in enumerate(types))


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _tiles(ref: Any) -> InterleavedTiles:
    """The tiles of a reference to [R / 8, C / columns, 8, columns]."""
    kind = ir.MemRefType(ref.type)
    strides, _ = kind.get_strides_and_offset()
    address = llvm.ptrtoint(_i32(), mgpu.utils.memref_ptr(ref))
    return InterleavedTiles(_Bits(address), kind.shape[3] * NUMBER, strides[0] * NUMBER, strides[1] * NUMBER)


def _sums(total: Any) -> list[Registers]:
    """A thread's 4 numbers of each 8 columns: 2 of a row, and 2 of the row 8 below."""
    pairs = total.registers.reshape(-1, 2)
    return [tuple(vector.extract(pair, [], [i]) for pair in both for i in range(2)) for both in pairs]


def _accumulator(sums: Sequence[Registers], like: Any) -> Any:
    registers = np.empty((len(sums), 2), dtype=object)
    for place, numbers in enumerate(sums):
        registers[place] = [vector.from_elements(ir.VectorType.get((2,), ir.F32Type.get()), list(numbers[i : i + 2])) for i in (0, 2)]
    return mgpu.FragmentedArray(_registers=registers.reshape(like.registers.shape), _layout=like.layout, _is_signed=None)


def _blocks(a: Any) -> list[Registers]:
    words = [mgpu.utils.bitcast(pair, _i32()) for pair in a.registers.reshape(-1)]
    return [tuple(words[i : i + 4]) for i in range(0, len(words), 4)]
