"""A mixture of experts on one device: the rows of its experts, whole ones or some columns of each."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxinfer.layers.linear import silu
from pallas_kernels.grouped_matmul.formats import Weights, expert_shape
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
    """Each token's weighted sum over its experts. `first`: index of the first expert here, where others are on other
    devices: their outputs are left out, and their rows are not multiplied."""
    (num_experts, _, _), (num_tokens, top_k) = expert_shape(down), experts.shape
    chosen = experts.reshape(-1)
    is_here = None
    if first is not None:
        is_here = (chosen >= first) & (chosen < first + num_experts)
        chosen = jnp.where(is_here, chosen - first, num_experts)  # sorted after all experts here
    order = jnp.argsort(chosen, stable=True)  # of rows: k for each token, consecutively
    group_sizes = (chosen[:, None] == jnp.arange(num_experts)).sum(0, dtype=jnp.int32)
    # Gathered back instead of scatter-added: always summed in the same order.
    place = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype), unique_indices=True)
    order = order[: num_tokens * min(top_k, num_experts)]  # a token has at most this many experts here
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
    """The sum, on every device, of partial outputs of N devices along a mesh axis. `has_part`: which devices have one
    for each token. Each device sums a share of the tokens: it receives their parts, adds them in the order of devices,
    and all gather its sums."""
    (num_tokens, num_devices), me = has_part.shape, lax.axis_index(axis)
    share = -(-num_tokens // num_devices)
    by_home = jnp.pad(has_part, ((0, share * num_devices - num_tokens), (0, 0))).reshape(num_devices, share, num_devices)
    num_parts = by_home.sum(1, dtype=jnp.int32)  # that each device receives from each
    order = jnp.argsort(~by_home[:, :, me].reshape(-1), stable=True)  # ours first, grouped by receiver
    received = _exchange(part.at[order].get(mode="clip"), num_parts, share, axis).reshape(num_devices, share, -1)
    is_there = by_home[me]
    place = jnp.cumsum(is_there, 0) - 1  # index of a token's part among those from one device
    parts = received.at[jnp.arange(num_devices), place].get(mode="clip").astype(jnp.float32)
    total = jnp.where(is_there[:, :, None], parts, 0).sum(1).astype(part.dtype)
    gathered: Array = lax.all_gather(total, axis, tiled=True)
    return gathered[:num_tokens]


def _exchange(rows: Float[Array, "R D"], num_rows: Int[Array, "N N"], share: int, axis: str) -> Float[Array, "R D"]:
    """Rows from all devices to this one, a block of `share` rows from each, valid ones first. `num_rows`: how many each
    device (second axis) sends to each (first axis). `rows`: ours, sorted by receiver."""
    me, num_devices = lax.axis_index(axis), len(num_rows)
    sizes = num_rows[:, me]
    starts = jnp.cumsum(sizes) - sizes

    def ragged(rows: Float[Array, "R D"]) -> Float[Array, "R D"]:
        to = jnp.full(num_devices, me * share, jnp.int32)
        return lax.ragged_all_to_all(rows, jnp.zeros_like(rows), starts, sizes, to, num_rows[me], axis_name=axis)

    def dense(rows: Float[Array, "R D"]) -> Float[Array, "R D"]:
        runs = rows.at[starts[:, None] + jnp.arange(share)].get(mode="clip")
        return lax.all_to_all(runs, axis, 0, 0).reshape(rows.shape)

    # XLA has no ragged all-to-all on CPU.
    found: Array = lax.platform_dependent(rows, cpu=dense, default=ragged)
    return found
