"""Runs a kernel's PTX: blocks one after the other, or several at once as on a card.

An instruction that isn't known, a branch that a warp's threads don't agree on, an address outside of what there is, and warps that all wait are
errors, and so are two accesses to shared memory that nothing orders (`ordering`). Warps and blocks are interleaved in the middle of anything, in a
random order that is the same each time (`seed` gives another). What the copy engine brings arrives as late as may be, when every warp waits; what it
takes away is read at once, though it may be until it is waited for. Half of the products by wgmma are done when they are started, the others
when they are waited for.

Not in it: what one block writes to global memory is seen by all others at once and in order, whatever fences there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from tests.ptx.block import Block
from tests.ptx.launch import Launch
from tests.ptx.memory import AnyArray, Memory
from tests.ptx.program import steps_of

_OVERTAKEN = (0.3, 0.05, 0.005)  # how likely a block becomes the last, in each of its rounds: seeds have one or another
_MOST_ROUNDS = 1_000_000  # of all blocks together: a warp that asks memory again and again never stands still


def run(launch: Launch, arrays: Sequence[AnyArray], *, num_resident: int = 1, seed: int = 0, max_steps: int = 200) -> None:
    """Results are written into their arrays, which follow the operands; one of them may be an operand. `num_resident`: blocks at a time;
    `max_steps`: of a warp before others go on."""
    memory, steps = Memory.of(arrays), steps_of(launch.ptx)
    waiting = (
        Block(launch, steps, memory, (x, y, z), seed, max_steps) for z, y, x in itertools.product(*map(range, reversed(launch.grid)))
    )
    with np.errstate(all="ignore"):
        _run_blocks(waiting, num_resident, np.random.default_rng(seed))
    memory.write_back(arrays)


def _run_blocks(waiting: Iterator[Block], num_resident: int, random: np.random.Generator) -> None:
    """The first of the blocks that can go on does, until it ends or, at random, becomes the last: so others overtake it as far as can be
    (probabilistic concurrency testing, Burckhardt et al. 2010)."""
    resident = [(block, block.rounds()) for block in itertools.islice(waiting, num_resident)]
    random.shuffle(resident)
    overtaken = random.choice(_OVERTAKEN)
    num_stuck = 0  # blocks that nothing has moved in since anything else moved
    for _ in range(_MOST_ROUNDS):
        if not resident:
            return
        _, rounds = resident[0]
        try:
            has_moved = next(rounds)
        except StopIteration:
            resident.pop(0)
            for next_block in itertools.islice(waiting, 1):
                resident.insert(int(random.integers(len(resident) + 1)), (next_block, next_block.rounds()))
            num_stuck = 0
            continue
        num_stuck = 0 if has_moved else num_stuck + 1
        if num_stuck == len(resident):
            raise RuntimeError("; ".join(f"block {block.place}: warps {sorted(block.alive)} wait for ever" for block, _ in resident))
        if not has_moved or random.random() < overtaken:
            resident.append(resident.pop(0))
    raise RuntimeError(f"blocks {[block.place for block, _ in resident]} have not ended in {_MOST_ROUNDS} rounds")
