"""DecodeBatch: one decode step as a padded NumPy array, where the host half and the device half meet. Imports no JAX."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

# In `tokens`: take the slot's last sampled token, which is still on the device.
ON_DEVICE = -1
_NUM_COLUMNS = 5


class DecodeBatch(NamedTuple):
    """B rows of one token each. A padded row has the slot past the last, and writes to the null page. Page tables stay on the device, a
    row a slot: a step brings only the page that takes its token.

    All in one array, whose columns have names here, on the host and on the device alike: each array costs the host 25 microseconds a call.
    """

    packed: Int32[Any, "B 5"]

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
    def pages(self) -> Int32[Any, " B"]:
        """Into which that token's key and value go."""
        return self.packed[:, 4]

    def advanced(self, num_rows: int) -> DecodeBatch:
        """The next step of the same rows, of which the first `num_rows` are in use: each feeds the token that this step samples.
        A copy: the device may still be reading this one."""
        following = DecodeBatch(self.packed.copy())
        following.packed[:num_rows, 1] = ON_DEVICE
        following.packed[:num_rows, 2:4] += 1
        return following


def empty_batch(num_rows: int, num_slots: int) -> DecodeBatch:
    """Padding only."""
    batch = DecodeBatch(np.zeros((num_rows, _NUM_COLUMNS), np.int32))
    batch.slots[:] = num_slots
    return batch
