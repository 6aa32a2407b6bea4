"""Both ways do the same work, each with the collectives that it is named after."""

from collections import Counter

import jax
import numpy as np

from benchmarks.residual_split import MlpSizes, implementations, measure
from sharding.collectives import collectives


def kinds(run) -> Counter[str]:
    return Counter(found.kind for found in collectives(run.func.as_text()).elements())


def test_both_ways_give_the_same_by_other_collectives():
    both = implementations(jax.devices()[:4], 16, MlpSizes(32, 64, 2), "float32")
    np.testing.assert_allclose(both.all_reduce(), both.reduce_scatter(), atol=1e-5)
    assert kinds(both.all_reduce) == {"all-reduce": 4}
    assert kinds(both.reduce_scatter) == {"reduce-scatter": 4, "all-gather": 4 + 1}  # one at the end


def test_a_round_is_a_measurement_of_each():
    both = implementations(jax.devices()[:2], 16, MlpSizes(32, 64, 1), "bfloat16")
    assert len(measure(both, 3)) == 3
