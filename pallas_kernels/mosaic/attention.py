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
NOTHING = -1e30  # a score that counts for nothing; -inf less itself would be NaN


def wait_if(condition: Array, barrier: Any) -> None:
    """Wait for a barrier's next phase where the condition holds."""
    pl.when(condition)(lambda: plgpu.barrier_wait(barrier))


def drain(consumed: Sequence[Any], num_tiles: Int[Array, ""], stages: int) -> None:
    """Wait until the last tiles are consumed, of each side: no barrier may be left in the middle of a phase."""

    @pl.loop(jnp.maximum(num_tiles - stages, 0), num_tiles)
    def _wait(i: Array) -> None:
        for barrier in consumed:
            plgpu.barrier_wait(barrier.at[lax.rem(i, stages)])
