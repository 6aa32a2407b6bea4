"""Stages of a pipeline, held against every cut there is."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.stage_balancer import LayerCosts, balance

COSTS = st.lists(st.integers(0, 20), min_size=1, max_size=9)


def stage_costs(costs: list[int], stages: list[range], first: int, last: int) -> list[int]:
    sums = [sum(costs[layer] for layer in stage) for stage in stages]
    sums[0] += first
    sums[-1] += last
    return sums


def every_cut(num_layers: int, num_stages: int) -> list[list[range]]:
    bounds = [(0, *cut, num_layers) for cut in combinations(range(1, num_layers), num_stages - 1)]
    return [[range(a, b) for a, b in pairwise(bound)] for bound in bounds]


@settings(deadline=None)
@given(COSTS, st.data(), st.integers(0, 40), st.integers(0, 40))
def test_no_other_cut_is_better(costs: list[int], data: st.DataObject, first: int, last: int) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    stages = balance(LayerCosts(costs, first, last), num_stages)
    assert [layer for stage in stages for layer in stage] == list(range(len(costs)))
    assert all(stages)
    made = stage_costs(costs, stages, first, last)
    every = [stage_costs(costs, cut, first, last) for cut in every_cut(len(costs), num_stages)]
    slowest = min(max(sums) for sums in every)
    assert max(made) == slowest
    assert sum(c * c for c in made) == min(sum(c * c for c in sums) for sums in every if max(sums) == slowest)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=8), st.data(), st.sampled_from([0.0, 0.02, 0.3]))
def test_of_cuts_nearly_as_fast_none_is_smaller(layers: list[tuple[int, int]], data: st.DataObject, slack: float) -> None:
    costs, sizes = [cost for cost, _ in layers], [size for _, size in layers]
    first, last, num_stages = data.draw(st.integers(0, 40)), data.draw(st.integers(0, 40)), data.draw(st.integers(1, len(layers)))
    stages = balance(LayerCosts(costs, last=last), num_stages, LayerCosts(sizes, first), slack)
    every = [(stage_costs(costs, cut, 0, last), stage_costs(sizes, cut, first, 0)) for cut in every_cut(len(layers), num_stages)]
    bound = min(max(sums) for sums, _ in every) * (1 + slack + 1e-9)
    made = stage_costs(costs, stages, 0, last)
    largest = min(max(of_sizes) for sums, of_sizes in every if max(sums) <= bound)
    assert max(made) <= bound
    assert max(stage_costs(sizes, stages, first, 0)) == largest
    alike = [sum(c * c for c in sums) for sums, of_sizes in every if max(sums) <= bound and max(of_sizes) == largest]
    assert sum(c * c for c in made) == min(alike)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e3), min_size=2, max_size=8), st.integers(1, 4))
def test_costs_may_be_any_numbers(costs: list[float], num_stages: int) -> None:
    num_stages = min(num_stages, len(costs))
    stages = balance(LayerCosts(costs), num_stages)
    slowest = min(max(sum(costs[i] for i in stage) for stage in cut) for cut in every_cut(len(costs), num_stages))
    assert max(sum(costs[i] for i in stage) for stage in stages) <= slowest * (1 + 1e-6) + 1e-9
    assert stages == balance(LayerCosts(costs), num_stages), "the same each time"


def test_equal_layers_are_cut_evenly_and_what_is_besides_counts() -> None:
    assert balance(LayerCosts([1.0] * 80), 4) == [range(20), range(20, 40), range(40, 60), range(60, 80)]
    assert balance(LayerCosts([1.0] * 8, last=2.0), 2) == [range(5), range(5, 8)]
    assert balance(LayerCosts([1.0] * 8, first=2.0), 2) == [range(3), range(3, 8)]
    assert balance(LayerCosts([0.1] * 30, 0.1, 0.1), 3)[1] in (range(9, 20), range(10, 20), range(10, 21)), (
        "30 layers and two more: 11, 11 and 10"
    )


@pytest.mark.parametrize(("num_layers", "num_stages"), [(3, 4), (3, 0), (0, 1)])
def test_every_stage_needs_a_layer(num_layers: int, num_stages: int) -> None:
    with pytest.raises(ValueError, match=rf"{num_stages} stages of {num_layers} layers: .* use a pp of 1 to {num_layers}"):
        balance(LayerCosts([1.0] * num_layers), num_stages)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_costs_that_are_none_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="each must be a number of at least 0"):
        LayerCosts([1.0, bad])
