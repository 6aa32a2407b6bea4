"""What a step's batch becomes from step to step without the host writing its rows anew."""

from __future__ import annotations

import numpy as np

from jaxinfer.decode.batch import ON_DEVICE, empty_batch, increments_of


def test_rows_in_use_go_on_by_a_token_a_step_and_padding_stays() -> None:
    batch = empty_batch(4, 8)
    batch.slots[:3], batch.tokens[:3] = [5, 0, 2], [70, 71, ON_DEVICE]
    batch.positions[:3], batch.num_generated[:3], batch.pages[:3, 0] = [10, 20, 30], [1, 2, 3], [7, 8, 9]
    padding, steps = batch.packed[3].copy(), increments_of(batch, 3)
    after = type(batch)(batch.packed + steps.first + steps.later)
    np.testing.assert_array_equal(after.tokens[:3], [ON_DEVICE] * 3)
    np.testing.assert_array_equal(after.positions[:3], [12, 22, 32])
    np.testing.assert_array_equal(after.num_generated[:3], [3, 4, 5])
    np.testing.assert_array_equal(after.slots[:3], [5, 0, 2])
    np.testing.assert_array_equal(after.pages[:3, 0], [7, 8, 9])
    np.testing.assert_array_equal(after.packed[3], padding)
