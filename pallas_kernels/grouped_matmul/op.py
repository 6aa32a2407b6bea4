"""grouped_matmul: rows sorted by expert, each times its expert's matrix (mixture-of-experts layers)."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul import mosaic_gpu, reference, xla
from pallas_kernels.grouped_matmul.formats import INPUTS, OUTPUTS, Fp8, Int4, Weights, expert_shape
from pallas_kernels.grouped_matmul.lossless import LosslessWeights

_TYPES = (jnp.bfloat16, jnp.float32)  # of rows
_IMPLEMENTATIONS = {"mosaic_gpu": mosaic_gpu.grouped_matmul, "xla": xla.grouped_matmul, "reference": reference.grouped_matmul}


def grouped_matmul(
    x: Float[Array, "T D"],
    weights: Weights,
    group_sizes: Int[Array, " E"],
    *,
    backend: Literal["mosaic_gpu", "xla", "reference"] = "xla",
) -> Float[Array, "T F"]:
    """Rows times the matrices of their experts.

    Args:
      x: T rows of D inputs, bfloat16 or float32, sorted by expert.
      weights: E matrices of D inputs and F outputs: bfloat16 or float32 [E, D, F], or packed (`formats.Int4`,
        `formats.Fp8`, `lossless.LosslessWeights`). Those of experts without rows are not read.
      group_sizes: number of rows of each expert, 0 or more; at most T in all. Rows past the last expert's come out as
        0, whatever they hold.
      backend: 'mosaic_gpu' (NVIDIA GPUs from Hopper on; see `unsupported_reason`), 'xla' or 'reference'.

    Returns [T, F] in x's type, summed in float32 and rounded once. Where x or the weights are bfloat16, both are
    converted to bfloat16 before they are multiplied: a CPU runs such weights at twice float32's speed that way. A row's
    result depends on no other row. Raises `ValueError` for inconsistent shapes or types, or for what the backend can't
    run.
    """
    num_experts, inputs, outputs = expert_shape(weights)
    if x.ndim != 2 or x.dtype not in _TYPES or x.shape[1] != inputs or not len(x):
        raise ValueError(
            f"grouped_matmul: x {x.dtype}{x.shape} must be one or more rows of {inputs} bfloat16 or float32, as the weights have inputs"
        )
    if group_sizes.shape != (num_experts,) or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(
            f"grouped_matmul: group_sizes {group_sizes.dtype}{group_sizes.shape} must be integers, one for each of {num_experts} experts"
        )
    types = (x.dtype,) if isinstance(weights, Int4 | Fp8 | LosslessWeights) else (x.dtype, weights.dtype)
    if backend == "mosaic_gpu" and (reason := next(filter(None, (unsupported_reason(inputs, outputs, dtype) for dtype in types)), None)):
        raise ValueError(f"grouped_matmul: mosaic_gpu can't run: {reason}")
    return _IMPLEMENTATIONS[backend](x, weights, group_sizes)


def unsupported_reason(inputs: int, outputs: int, dtype: jnp.dtype) -> str | None:
    """Why 'mosaic_gpu' can't multiply rows of this type by matrices of so many inputs and outputs, packed or of this
    type, on such a GPU; None if it can."""
    if dtype != jnp.bfloat16:
        return f"it multiplies bfloat16, not {dtype}"
    if inputs % INPUTS or outputs % OUTPUTS:
        return f"it has no kernel for {inputs} inputs and {outputs} outputs: both must be multiples of {OUTPUTS}"
    return None
