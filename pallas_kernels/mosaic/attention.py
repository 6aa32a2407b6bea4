"""What attention kernels for GPUs have in common: how scores are counted, and how tiles go through stages of shared memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

LOG2_E = math.log2(math.e)  # exponents are of 2
# A score that counts for nothing, and what the largest of a row is before it has any that counts. The first is far below the second, whatever more
# than SMALLEST_FACTOR scores are multiplied by: less each other they are nothing too. (-inf less itself would be NaN, and so, where the
# product and the difference are rounded at once, would be what is made of the one less the same.)
NOTHING, LOWEST = -3e38, -1e30
SMALLEST_FACTOR = 1e-8


def wait_if(condition: Array, barrier: Any) -> None:
    """Wait for a barrier's next phase where the condition holds."""
    pl.when(condition)(lambda: plgpu.barrier_wait(barrier))


def drain(consumed: Sequence[Any], num_tiles: Int[Array, ""], stages: int) -> None:
    """Wait until the last tiles are consumed, of each side: no barrier may be left in the middle of a phase."""

    @pl.loop(jnp.maximum(num_tiles - stages, 0), num_tiles)
    def _wait(i: Array) -> None:
        for barrier in consumed:
            plgpu.barrier_wait(barrier.at[lax.rem(i, stages)])
