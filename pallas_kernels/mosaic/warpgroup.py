"""What Pallas kernels for Mosaic GPU use of a warpgroup: asynchronous products by Hopper's instructions (wgmma), or any
GPU's (`warp_products`), and replacements for both where a CPU interprets the kernel.

JAX's interpreter runs a kernel's grid, threads, copies, barriers and shared memory, and checks them. It knows no
register layouts and no products with one factor in registers (JAX 0.10): only those differ here. Tests that run the
compiled PTX (tests/aot/test_running.py) cover them without a GPU. Names that differ between JAX 0.10 and 0.11 are here
too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # public from JAX 0.11 on
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.mosaic.kernel_warp import product_in_kernel
from pallas_kernels.mosaic.warp_products import TILE_ROWS

ROWS = 64  # least rows of a warpgroup's product
_IS_0_10 = jax.__version_info__ < (0, 11)


def compiler_params(*, approx_math: bool = False, has_auto_barriers: bool = True) -> plgpu.CompilerParams:
    """How Mosaic compiles a kernel. Every kernel here is written for lane semantics. That is the default of JAX 0.10,
    not of 0.11, so it is always stated. Without automatic barriers a kernel itself orders what its threads write and
    read."""
    semantics = plgpu.LoweringSemantics.Lane
    return plgpu.CompilerParams(approx_math=approx_math, unsafe_no_auto_barriers=not has_auto_barriers, lowering_semantics=semantics)


@dataclass(frozen=True)
class TransposedRef:
    """[X, Y] of shared memory [Y, X], as the first factor of a product."""

    ref: Any


@dataclass(frozen=True)
class Warpgroup:
    """Values of shape [ROWS, X] have the layout of accumulators, and vectors [ROWS] that of accumulators reduced over
    X."""

    interpreted: bool = False
    has_wgmma: bool = True  # where the kernel is not interpreted

    @property
    def is_asynchronous(self) -> bool:
        """Whether products run asynchronously."""
        return self.has_wgmma and not self.interpreted

    def kernel(self, body: Callable[..., None], name: str, **options: Any) -> Callable[..., Any]:
        """`plgpu.kernel`, on the GPU or interpreted. A profile shows the kernel under `name`."""
        return plgpu.kernel(body, kernel_name=name, interpret=self.interpreter, **options)

    @property
    def interpreter(self) -> Any:
        """The `interpret` argument of kernels."""
        return InterpretGPUParams() if self.interpreted else False

    def union(self, *refs: Any) -> Any:
        """Shared memory that holds one of these at a time."""
        return refs if self.interpreted else plgpu.RefUnion(*refs)

    def full(self, shape: tuple[int, ...], value: float) -> Float[Array, "*shape"]:
        """float32[ROWS] or [ROWS, X] of one value."""
        layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
        return self._with_layout(jnp.full(shape, value, jnp.float32), layout)

    def iota(self, shape: tuple[int, int], axis: int) -> Int[Array, "64 X"]:
        """Each element's index along an axis."""
        if self.interpreted:
            return jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)

    def row_indices(self) -> Int[Array, " 64"]:
        """Each row's index."""
        if self.interpreted:
            return jnp.arange(ROWS)
        return plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))

    def load(self, ref: Any) -> Array:
        """[ROWS] or [ROWS, X] of shared memory."""
        layout = plgpu.Layout.WGMMA if len(ref.shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
        return ref[...] if self.interpreted else load_as(layout, ref, optimized=False)

    def load_to_widen(self, ref: Any) -> Array:
        """[ROWS, X] of bytes of shared memory, X a multiple of 32, to be stored there as 16 bits. Each thread has
        groups of 8 bytes, and as many threads as possible share a row, so that no two meet in a bank."""
        if self.interpreted:
            return ref[...]
        lanes = next(lanes for lanes in (16, 8, 4) if ref.shape[1] % (8 * lanes) == 0)
        tiling = Tiling(((ROWS, 8 * lanes), (16, 8 * lanes), (32 // lanes, 8 * lanes), (8,)))
        return load_as(plgpu.Layout.TILED(tiling, warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1), ref)

    def times_transposed(self, *factors: tuple[Any, Any], meanwhile: Callable[[], None] = lambda: None) -> Float[Array, "64 X"]:
        """The sum of a @ b.T in float32, for a[ROWS, H] and b[X, H] in shared memory; `meanwhile` runs while the
        products do."""
        num_columns = factors[0][1].shape[0]
        if not self.is_asynchronous:
            total = self.full((ROWS, num_columns), 0.0)
            for a, b in factors:
                total = self._add_synchronously(total, a, b, b_is_transposed=True)
            meanwhile()
            return total

        def multiply(accumulator: Any) -> Array:
            for a, b in factors:
                plgpu.wgmma(accumulator, a, transposed(b))
            meanwhile()
            return accumulator[...]

        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((ROWS, num_columns), jnp.float32))

    def add_product(
        self, total: Float[Array, "64 H"], a: Any, b: Any, meanwhile: Callable[[], None] = lambda: None
    ) -> Float[Array, "64 H"]:
        """total + a @ b, for a[ROWS, X] in registers or shared memory and b[X, H] there; `meanwhile` runs while the
        product does."""
        if not self.is_asynchronous:
            total = self._add_synchronously(total, a, b, b_is_transposed=False)
            meanwhile()
            return total

        def multiply(accumulator: Any) -> None:
            plgpu.wgmma(accumulator, a, b)
            meanwhile()

        return pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(total))

    def sum_of_products(
        self, shape: tuple[int, int], num_steps: Int[Array, ""] | int, step: Callable[[Array, Callable[[Any, Any], None]], None]
    ) -> Float[Array, "64 X"]:
        """Sum of a @ b.T over the products that step(i, multiply) computes by multiply(a, b): a[ROWS, K] in registers
        or shared memory, b[X, K] in shared memory. Where products are asynchronous `multiply` only starts one:
        `wait_for_products` waits for it."""
        if not self.is_asynchronous:

            def one(i: Array, total: Array) -> Array:
                totals = [total]
                step(i, lambda a, b: totals.append(self._add_synchronously(totals[-1], a, b, b_is_transposed=True)))
                return totals[-1]

            return jax.lax.fori_loop(0, num_steps, one, self.full(shape, 0.0))

        def all_steps(accumulator: Any) -> Array:
            def one(i: Array, _: None) -> None:
                step(i, lambda a, b: plgpu.wgmma(accumulator, transposed(a.ref) if isinstance(a, TransposedRef) else a, transposed(b)))

            jax.lax.fori_loop(0, num_steps, one, None)
            return accumulator[...]

        return pl.run_scoped(all_steps, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))

    def wait_for_products(self) -> None:
        """Waits until all products that were started are done."""
        if self.is_asynchronous:
            plgpu.wgmma_wait(0)

    def store_transposed(self, ref: Any, value: Float[Array, "64 X"]) -> None:
        """Writes the value to shared memory [X, ROWS] that is not interleaved."""
        if self.interpreted:
            ref[...] = value.T
        else:
            transposed(ref)[...] = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)

    def _add_synchronously(self, total: Float[Array, "64 X"], a: Any, b: Any, *, b_is_transposed: bool) -> Float[Array, "64 X"]:
        """total + a @ b, or a @ b.T, where products are not asynchronous."""
        if self.interpreted:
            factor = a.ref[...].T if isinstance(a, TransposedRef) else a[...]
            other = b[...].T if b_is_transposed else b[...]
            return total + jnp.dot(factor, other, preferred_element_type=jnp.float32, precision="highest")
        in_memory = [ref for ref in (a.ref if isinstance(a, TransposedRef) else a, b) if not isinstance(ref, jax.Array)]
        transforms = [interleaved(ref.shape[1], ref.dtype) for ref in in_memory]
        how = {"a_is_transposed": isinstance(a, TransposedRef), "b_is_transposed": b_is_transposed}
        return product_in_kernel(total, in_memory[0] if isinstance(a, TransposedRef) else a, b, transforms, **how)

    def _with_layout(self, value: Array, layout: Any) -> Array:
        return value if self.interpreted else plgpu.layout_cast(value, layout)


def load_as(layout: Any, ref: Any, optimized: bool = True) -> Array:
    """All of shared memory, in registers."""
    index = ((),) if _IS_0_10 else ()  # 0.11 deprecates an explicit index
    return plgpu.load(ref, *index, layout=layout, optimized=optimized)


def transposed(ref: Any) -> Any:
    """A view of shared memory with its two axes exchanged."""
    return plgpu.transpose_ref(ref, (1, 0)) if _IS_0_10 else ref.T


def interleaved(columns: int, dtype: jnp.dtype) -> tuple[Any, ...]:
    """The layout of rows of `columns` columns in shared memory that products read: tiles, interleaved so that no two
    rows of a tile meet in a bank. Raises `ValueError` for columns that no tile divides."""
    for swizzle in (128, 64, 32):
        width = swizzle // jnp.dtype(dtype).itemsize
        if columns % width == 0:
            return plgpu.TilingTransform((TILE_ROWS, width)), plgpu.SwizzleTransform(swizzle)
    raise ValueError(f"{columns} columns of {jnp.dtype(dtype).name} are no multiple of {32 // jnp.dtype(dtype).itemsize}")
