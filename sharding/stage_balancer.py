"""The layers of each stage of a pipeline: a partition that minimises the time of the slowest stage. Imports no JAX."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

_ROUNDING = 1e-9  # share of a sum by which floats may differ when they are added in another order


@dataclass(frozen=True)
class LayerCosts:
    """Costs in any unit, such as seconds or bytes. Raises `ValueError` for negative or non-finite costs."""

    layers: Sequence[float]
    first: float = 0.0  # additional cost of the first stage, such as the embedding
    last: float = 0.0  # additional cost of the last stage, such as the head

    def __post_init__(self) -> None:
        if any(not 0 <= cost < math.inf for cost in (*self.layers, self.first, self.last)):
            raise ValueError(
                f"costs are {list(self.layers)}, and {self.first} and {self.last} besides: each must be a number of at least 0"
            )

    def of(self, start: int, stop: int) -> float:
        """The cost of a stage with these layers."""
        return self._before[stop] - self._before[start] + self.first * (start == 0) + self.last * (stop == len(self.layers))

    @cached_property
    def _before(self) -> list[float]:
        return [0.0, *accumulate(self.layers)]


def balance(costs: LayerCosts, num_stages: int, sizes: LayerCosts | None = None, slack: float = 0.0) -> list[range]:
    """The layers of each stage, in order and each at least one, so that no other partition's costliest stage costs
    less. Among partitions within `slack`, a share, of that: those whose largest stage is smallest, where sizes are
    given; of those the one with the most even costs (least sum of squares).

    Raises `ValueError` for more stages than layers.
    """
    num_layers = len(costs.layers)
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"{num_stages} stages of {num_layers} layers: each stage needs a layer; use a pp of 1 to {num_layers}")
    bound, largest = _cut(num_layers, num_stages, costs.of, max)[0] * (1 + slack + _ROUNDING), math.inf
    if sizes is not None:
        largest = _cut(num_layers, num_stages, lambda *stage: _within(costs.of(*stage), bound, sizes.of(*stage)), max)[0] * (1 + _ROUNDING)

    def squared(start: int, stop: int) -> float:
        cost = costs.of(start, stop)
        return _within(cost, bound, cost * cost if sizes is None or sizes.of(start, stop) <= largest else math.inf)

    cuts = _cut(num_layers, num_stages, squared, lambda before, stage: before + stage)[1]
    return [range(start, stop) for start, stop in zip((0, *cuts), (*cuts, num_layers), strict=True)]


def _within(cost: float, bound: float, value: float) -> float:
    """Infinite over the bound."""
    return value if cost <= bound else math.inf


def _cut(
    num_layers: int, num_stages: int, cost: Callable[[int, int], float], join: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """The least of all partitions' costs, where a stage's is joined to those before it, and the first layer of each
    stage but the first; the earliest of equals."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {stop: (cost(0, stop), ()) for stop in range(1, num_layers + 1)}
    for stage in range(1, num_stages):
        best = {
            stop: min((join(best[start][0], cost(start, stop)), (*best[start][1], start)) for start in range(stage, stop))
            for stop in range(stage + 1, num_layers + 1)
        }
    return best[num_layers]
