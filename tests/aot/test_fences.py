"""The PTX emulator finds a compiled kernel's missing fences, barriers and waits: the first few of each kind that `python -m tests.ptx.mutations`
takes out."""

from __future__ import annotations

import functools

import pytest

from tests.ptx.cases import CASES, first_launch
from tests.ptx.faults import Mutation, Run, mutations_of, outcome_of, unknown_in

pytestmark = pytest.mark.aot

# Of the first four of each kind, how many the kernel needs (docs/gpu.md says why not all).
NEEDED = {
    "fence.proxy.async": 2,
    "fence.mbarrier_init": 1,
    "bar.sync": 2,
    "mbarrier.init": 4,
    "mbarrier.init of half": 4,
    "mbarrier.arrive.expect_tx": 4,
    "expect_tx of nothing": 4,
    "mbarrier.arrive": 2,
    "mbarrier.try_wait": 4,
    "cp.async.bulk.commit_group": 1,
    "cp.async.bulk.wait_group": 1,
    "cp.async.bulk.wait_group of one less": 1,
    "wgmma.fence": 2,
    "wgmma.commit_group": 2,
    "wgmma.wait_group": 2,
    "wgmma.wait_group of one less": 2,
}


@functools.cache
def decode() -> tuple[Run, list[Mutation]]:
    sound = first_launch(CASES["decode, one warpgroup"], "h200")
    return sound, list(mutations_of(sound.launch.ptx))


def test_every_instruction_that_orders_others_is_taken_out():
    sound, mutations = decode()
    assert not unknown_in(sound.launch.ptx)
    assert {mutation.kind for mutation in mutations} == set(NEEDED)


@pytest.mark.parametrize("kind", NEEDED)
def test_what_is_missing_is_found(kind):
    sound, mutations = decode()
    first = [mutation for mutation in mutations if mutation.kind == kind][:4]
    assert sum(outcome_of(sound, mutation, [0]).is_found for mutation in first) == NEEDED[kind]
