"""DecodeBatch: one decode step as a padded NumPy array, where the host half and the device half meet. Imports no JAX."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

# In `tokens`: take the slot's last sampled token, which is still on the device.
ON_DEVICE = -1
PAGES = 4  # the first column of `pages`


class DecodeBatch(NamedTuple):
    """B rows of one token each. A padded row has the slot past the last, and writes to the null page. Page tables stay on the device, a
    row a slot: a step brings only the pages that take its token, one for each of the model's C groups of layers.

    All in one array, whose columns have names here, on the host and on the device alike: each array costs the host 25 microseconds a call.
    """

    packed: Int32[Any, "B 4+C"]

    @property
    def slots(self) -> Int32[Any, " B"]:
        return self.packed[:, 0]

    @property
    def tokens(self) -> Int32[Any, " B"]:
        """The row's newest token, or ON_DEVICE."""
        return self.packed[:, 1]

    @property
    def positions(self) -> Int32[Any, " B"]:
        """Of that token."""
        return self.packed[:, 2]

    @property
    def num_generated(self) -> Int32[Any, " B"]:
        return self.packed[:, 3]

    @property
    def pages(self) -> Int32[Any, "B C"]:
        """Into which that token's keys and values go."""
        return self.packed[:, PAGES:]


class Steps(NamedTuple):
    """What a batch's array changes by from step to step. One addition makes the next one: a call of NumPy costs 20 microseconds between
    two steps of the device, which leave nothing of its code in the caches."""

    first: Int32[Any, "B 4+C"]  # tokens become ON_DEVICE: each row feeds what the step before it samples
    later: Int32[Any, "B 4+C"]


def steps_of(batch: DecodeBatch, num_rows: int) -> Steps:
    """For a batch of which the first `num_rows` rows are in use."""
    later = np.zeros_like(batch.packed)
    later[:num_rows, 2:4] = 1
    first = later.copy()
    first[:num_rows, 1] = ON_DEVICE - batch.tokens[:num_rows]
    return Steps(first, later)


def empty_batch(num_rows: int, num_slots: int, num_groups: int = 1) -> DecodeBatch:
    """Padding only."""
    batch = DecodeBatch(np.zeros((num_rows, PAGES + num_groups), np.int32))
    batch.slots[:] = num_slots
    return batch
