"""What attention kernels for GPUs share: masked scores, and the stages of shared memory that tiles pass through."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

LOG2_E = math.log2(math.e)  # exponents are of base 2
# The score of a masked position, and a row's maximum before its first score. The first stays far below the second
# whatever scores are multiplied by, if that is more than SMALLEST_FACTOR: their difference is still a weight of 0.
# (-inf minus itself would be NaN, also where the product and the difference are rounded at once.)
MASKED_SCORE, INITIAL_MAX = -3e38, -1e30
SMALLEST_FACTOR = 1e-8


def wait_if(condition: Array, barrier: Any) -> None:
    """Waits for a barrier's next phase where the condition holds."""
    pl.when(condition)(lambda: plgpu.barrier_wait(barrier))


def drain(consumed: Sequence[Any], num_tiles: Int[Array, ""], stages: int) -> None:
    """Waits until the last tiles of each side are consumed: no barrier may end in the middle of a phase."""

    @pl.loop(jnp.maximum(num_tiles - stages, 0), num_tiles)
    def _wait(i: Array) -> None:
        for barrier in consumed:
            plgpu.barrier_wait(barrier.at[lax.rem(i, stages)])
