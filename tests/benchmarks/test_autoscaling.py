"""The simulated pools: what fixed ones cost is known, and those that follow a load cost less than its peak."""

from __future__ import annotations

from benchmarks.disaggregated.autoscaling import PoolMachines, PoolSimulation, best_fixed
from benchmarks.disaggregated.routing import TracedRequest
from server.cluster.scaling_policy import ScalingSettings

# Each request takes a prefill worker for a second, and a quarter of a decode worker's batch for two.
MACHINES = PoolMachines(tokens_per_second=1000.0, seconds_per_token=0.1, max_batch_size=4, start_seconds=5.0, target_ttft=2.0)


def every(gap: float, start: float, end: float) -> list[TracedRequest]:
    return [TracedRequest(start + number * gap, 1000, 20, ()) for number in range(int((end - start) / gap))]


def test_fixed_pools_cost_their_size() -> None:
    load = every(0.5, 0.0, 100.0)  # two at once in prefill, four in decode
    cost = PoolSimulation(MACHINES, (2, 1), None).play(load)
    assert (cost.attained, cost.most) == (1.0, (2, 1))
    end = load[-1].seconds + 1.0 + 2.0
    assert cost.gpu_seconds == 3 * end / len(load)
    assert PoolSimulation(MACHINES, (1, 1), None).play(load).attained < 0.1, "prompts come twice as fast"
    assert best_fixed(load, MACHINES, 1.0)[0] == (2, 1)


def test_pools_follow_their_load() -> None:
    load = every(0.25, 0.0, 300.0) + every(4.0, 300.0, 1500.0)
    scaling = ScalingSettings(target_ttft=MACHINES.target_ttft)
    pools = PoolSimulation(MACHINES, (6, 3), scaling).play(load)
    assert pools.attained > 0.99
    size, fixed = best_fixed(load, MACHINES, pools.attained)
    assert size == (4, 2)
    assert pools.gpu_seconds < 0.65 * fixed.gpu_seconds
