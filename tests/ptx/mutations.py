"""Takes one fence, barrier, arrival or wait after another out of the compiled kernels, and counts which of these faults the PTX emulator finds.

    AOT_CARDS=hopper JAX_PLATFORMS=cpu python -m tests.ptx.mutations [--kernel NAME] [--kind NAME] [--seeds N]

AOT_CARDS is hopper (an H200) or blackwell (a B200). Every kernel is compiled once in a small case (`cases`); each fault is made in its PTX, which then
runs with several seeds, each of which interleaves the warps in another way. A fault is found when the emulator raises an error, when warps
wait for ever, or when results are not the sound kernel's. Of those that are not found the table says whether the case reaches the
instruction at all. docs/gpu.md has the results, with the reason for each that is not found.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from tests.ptx.cases import CASES, first_launch
from tests.ptx.faults import Mutation, Outcome, mutations_of, outcome_of, unknown_in

TARGETS = {"hopper": "h200", "blackwell": "b200"}


def report(kernel: str, outcomes: Sequence[Outcome]) -> None:
    """A table of how often faults of each kind are found, and every one that isn't."""
    ways = ("race", "deadlock", "wrong result", "other error", "NOT FOUND", "not reached")
    print(f"\n{kernel}\n{'':32}" + "".join(f"{way:>14}" for way in ways))
    kinds = Counter(outcome.mutation.kind for outcome in outcomes)
    for kind in kinds:
        counts = Counter(outcome.found for outcome in outcomes if outcome.mutation.kind == kind)
        print(f"{kind:32}" + "".join(f"{counts[way] or '':>14}" for way in ways))
    for outcome in outcomes:
        print(f"  {outcome.found:12} {outcome.mutation.kind:28} {outcome.mutation.place:32} {outcome.message}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", action="append", choices=list(CASES), help="more than once for several; all by default")
    parser.add_argument("--kind", help="only faults whose kind begins so")
    parser.add_argument("--seeds", type=int, default=2, help="interleavings that a fault is looked for in")
    asked = parser.parse_args()
    target, total = TARGETS[os.environ.get("AOT_CARDS", "hopper")], Counter[str]()
    for kernel in asked.kernel or CASES:
        start, sound = time.monotonic(), first_launch(CASES[kernel], target)
        if unknown := unknown_in(sound.launch.ptx):
            raise SystemExit(f"{kernel}: {sorted(unknown)} are in no list of what orders instructions")
        for seed in range(asked.seeds):
            same = Mutation("none", "", sound.launch.ptx, "")
            assert outcome_of(sound, replace(same, reached=sound.launch.ptx), [seed]).found == "not reached", "the sound kernel is faulty"
        outcomes = [
            outcome_of(sound, mutation, range(asked.seeds))
            for mutation in mutations_of(sound.launch.ptx)
            if mutation.kind.startswith(asked.kind or "")
        ]
        report(f"{kernel}, {target}: {len(outcomes)} faults, {time.monotonic() - start:.0f} s", outcomes)
        total.update(outcome.found for outcome in outcomes)
    print(f"\n{target}: {sum(total.values())} faults: {dict(total)}", flush=True)


if __name__ == "__main__":
    main()
