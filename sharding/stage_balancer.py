"""Which layers each stage of a pipeline has: a cut that makes the slowest stage as fast as it can be. Imports no JAX."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

_ROUNDING = 1e-9  # share of a sum that floats may differ by, added up in another order


def balance(costs: Sequence[float], num_stages: int, first_extra: float = 0.0, last_extra: float = 0.0) -> list[range]:
    """The layers of each stage, in turn and each at least one, so that no other cut's costliest stage costs less; of all such cuts the one
    whose stages are most alike (least sum of squares). `costs`: of each layer, in any unit; `first_extra` and `last_extra`: what the first
    and the last stage have besides, such as the embedding and the head.

    Raises `ValueError` for more stages than layers and for costs below zero.
    """
    num_layers = len(costs)
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"{num_stages} stages of {num_layers} layers: each stage needs a layer; use a pp of 1 to {num_layers}")
    if any(not 0 <= cost < math.inf for cost in (*costs, first_extra, last_extra)):
        raise ValueError(f"costs are {list(costs)}, and {first_extra} and {last_extra} besides: each must be a number of at least 0")
    before = [0.0, *accumulate(costs)]

    def cost(start: int, stop: int) -> float:
        return before[stop] - before[start] + first_extra * (start == 0) + last_extra * (stop == num_layers)

    slowest = _cut(num_layers, num_stages, cost, max)[0]
    bound = slowest * (1 + _ROUNDING)
    cuts = _cut(num_layers, num_stages, lambda start, stop: _squared(cost(start, stop), bound), lambda before, stage: before + stage)[1]
    return [range(start, stop) for start, stop in zip((0, *cuts), (*cuts, num_layers), strict=True)]


def _squared(cost: float, bound: float) -> float:
    """Infinite over the bound."""
    return cost * cost if cost <= bound else math.inf


def _cut(
    num_layers: int, num_stages: int, cost: Callable[[int, int], float], join: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """The least of all cuts' costs, a stage's joined to those before it, and where each stage but the first begins; the earliest of equals."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {stop: (cost(0, stop), ()) for stop in range(1, num_layers + 1)}
    for stage in range(1, num_stages):
        best = {
            stop: min((join(best[start][0], cost(start, stop)), (*best[start][1], start)) for start in range(stage, stop))
            for stop in range(stage + 1, num_layers + 1)
        }
    return best[num_layers]
