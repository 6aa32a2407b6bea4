"""Kernels for Mosaic GPU that update an operand in place, one row at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.mosaic.warpgroup import Warpgroup, load_as


def kernel_in_place(
    warpgroup: Warpgroup,
    body: Callable[..., None],
    name: str,
    *,
    out_type: Any,
    scratch_types: Mapping[str, Any],
    compiler_params: plgpu.CompilerParams,
    thread_name: str,
    **mesh: Any,
) -> Callable[..., Any]:
    """`Warpgroup.kernel` whose operands may be `jax.Ref`s too. Writes of the body to them persist, and XLA gives such
    an operand and the result that replaces it one buffer. `plgpu.kernel` itself accepts no `Ref`: it uses
    `jax.custom_batching.custom_vmap`, which has no rule for them (JAX 0.10 and 0.11). This function does the same
    without it."""

    def with_scratch(*refs: Any) -> None:
        pl.run_scoped(partial(body, *refs), collective_axes=thread_name, **scratch_types)

    return pl.kernel(
        with_scratch,
        out_type=out_type,
        mesh=plgpu.Mesh(thread_name=thread_name, kernel_name=name, **mesh),
        name=name,
        compiler_params=compiler_params,
        interpret=warpgroup.interpreter,
    )


def load_row(warpgroup: Warpgroup, ref: Any) -> Array:
    """[X] of global memory in the layout that `broadcast_row` needs."""
    return ref[...] if warpgroup.interpreted else load_as(plgpu.Layout.WGMMA.reduce(0), ref, optimized=False)


def broadcast_row(warpgroup: Warpgroup, row: Float[Array, " X"], num_rows: int) -> Float[Array, "R X"]:
    """The row repeated `num_rows` times, in the layout of accumulators."""
    wide = jnp.broadcast_to(row, (num_rows, len(row)))
    return wide if warpgroup.interpreted else plgpu.layout_cast(wide, plgpu.Layout.WGMMA)
