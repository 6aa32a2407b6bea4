"""What one device does of a mixture of experts: the rows of those experts that it has, whole or some columns of each."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxinfer.layers.linear import silu
from pallas_kernels.grouped_matmul.formats import Weights, shape_of
from pallas_kernels.grouped_matmul.op import grouped_matmul


def through_experts(
    x: Float[Array, "T D"],
    experts: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    gate_up: Weights,
    down: Weights,
    *,
    first: Int[Array, ""] | None,
    scales_input: bool,
    backend: Literal["mosaic_gpu", "xla"],
) -> Float[Array, "T D"]:
    """Each token's sum over its experts, by their weights. `first`: of the experts that are here, where others are elsewhere: what these give
    is left out, and no product is made of their rows."""
    (num_experts, _, _), (num_tokens, top_k) = shape_of(down), experts.shape
    chosen = experts.reshape(-1)
    is_here = None
    if first is not None:
        is_here = (chosen >= first) & (chosen < first + num_experts)
        chosen = jnp.where(is_here, chosen - first, num_experts)  # after all that are here
    order = jnp.argsort(chosen, stable=True)  # of rows, a token's in turn
    group_sizes = (chosen[:, None] == jnp.arange(num_experts)).sum(0, dtype=jnp.int32)
    # Back by their places, not added up where they belong: always in the same order.
    place = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype), unique_indices=True)
    order = order[: num_tokens * min(top_k, num_experts)]  # no token has more here
    rows = x.at[order // top_k].get(mode="clip")
    if scales_input:
        rows = (rows.astype(jnp.float32) * weights.reshape(-1).at[order].get(mode="clip")[:, None]).astype(x.dtype)
    gate, up = jnp.split(grouped_matmul(rows, gate_up, group_sizes, backend=backend), 2, axis=1)
    rows = grouped_matmul(silu(gate) * up, down, group_sizes, backend=backend)
    of_tokens = rows.at[place].get(mode="clip").reshape(num_tokens, top_k, -1).astype(jnp.float32)
    of_tokens = of_tokens if scales_input else of_tokens * weights[:, :, None]
    if is_here is not None:
        of_tokens = jnp.where(is_here.reshape(num_tokens, top_k, 1), of_tokens, 0)
    return of_tokens.sum(1).astype(x.dtype)


def combine_expert_outputs(part: Float[Array, "T D"], has_part: Bool[Array, "T N"], axis: str) -> Float[Array, "T D"]:
    """The sum, on every device, of the parts of N devices along this mesh axis; `has_part`: which devices have one of each token. Each device
    is home to a share of the tokens: it gets their parts, adds them up in the order of devices, and all get its sums."""
    (num_tokens, num_devices), me = has_part.shape, lax.axis_index(axis)
    share = -(-num_tokens // num_devices)
    by_home = jnp.pad(has_part, ((0, share * num_devices - num_tokens), (0, 0))).reshape(num_devices, share, num_devices)
    num_parts = by_home.sum(1, dtype=jnp.int32)  # that each home gets from each device
    order = jnp.argsort(~by_home[:, :, me].reshape(-1), stable=True)  # ours first, those of one home together
    received = _exchange(part.at[order].get(mode="clip"), num_parts, share, axis).reshape(num_devices, share, -1)
    is_there = by_home[me]
    place = jnp.cumsum(is_there, 0) - 1  # of a token's part among those that its device sent
    parts = received.at[jnp.arange(num_devices), place].get(mode="clip").astype(jnp.float32)
    total = jnp.where(is_there[:, :, None], parts, 0).sum(1).astype(part.dtype)
    gathered: Array = lax.all_gather(total, axis, tiled=True)
    return gathered[:num_tokens]


def _exchange(rows: Float[Array, "R D"], num_rows: Int[Array, "N N"], share: int, axis: str) -> Float[Array, "R D"]:
    """What all devices send to this one, a run of `share` rows from each, of which the first ones are there: of `num_rows` from each (second
    axis) to each (first axis). `rows` has ours, those to the first device first, and so on."""
    me, num_devices = lax.axis_index(axis), len(num_rows)
    sizes = num_rows[:, me]
    starts = jnp.cumsum(sizes) - sizes

    def ragged(rows: Float[Array, "R D"]) -> Float[Array, "R D"]:
        to = jnp.full(num_devices, me * share, jnp.int32)
        return lax.ragged_all_to_all(rows, jnp.zeros_like(rows), starts, sizes, to, num_rows[me], axis_name=axis)

    def dense(rows: Float[Array, "R D"]) -> Float[Array, "R D"]:
        runs = rows.at[starts[:, None] + jnp.arange(share)].get(mode="clip")
        return lax.all_to_all(runs, axis, 0, 0).reshape(rows.shape)

    # XLA has no ragged one for CPUs.
    found: Array = lax.platform_dependent(rows, cpu=dense, default=ragged)
    return found
