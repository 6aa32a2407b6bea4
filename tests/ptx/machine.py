"""Runs a kernel's PTX: all blocks, one after the other.

An instruction that isn't known, a branch that a warp's threads don't agree on, an address outside of what there is, and warps that all wait are
errors. Warps take turns in the middle of anything, in a random order that is the same each time. What the copy engine brings arrives as late as may
be, when every warp waits; what it takes away is read at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from tests.ptx.block import Block, Memory
from tests.ptx.launch import Launch
from tests.ptx.program import steps_of


def run(launch: Launch, arrays: Sequence[np.ndarray]) -> None:
    """Results are written into their arrays, which follow the operands; one of them may be an operand."""
    memory, steps = Memory.of(arrays), steps_of(launch.ptx)
    with np.errstate(all="ignore"):
        for z, y, x in itertools.product(*map(range, reversed(launch.grid))):
            Block(launch, steps, memory, (x, y, z)).run()
    memory.write_back(arrays)
