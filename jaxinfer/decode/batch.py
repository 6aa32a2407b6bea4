"""DecodeBatch: one decode step as a padded NumPy array: what the host gives the decode program. Imports no JAX."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

# In `tokens`: the slot's last sampled token, which is still on the device.
ON_DEVICE = -1
PAGES = 4  # the first column of `pages`
_TOKENS = 3  # the first column of tokens, each followed by its pages


class DecodeBatch(NamedTuple):
    """B rows of T new tokens each; T is 1 unless drafts are verified. A padding row has the slot past the last, and
    writes to the null page. Page tables stay on the device, one row a slot: a step brings only the pages that its new
    tokens are written to, one for each of the C groups of layers. `tokens` and `pages` are for T = 1; `new_tokens` and
    `new_pages` for any T.

    One array with named columns, on host and device: each array costs the host 25 microseconds a call.
    """

    packed: Int32[Any, "B 3+T*(1+C)"]

    @property
    def slots(self) -> Int32[Any, " B"]:
        return self.packed[:, 0]

    @property
    def tokens(self) -> Int32[Any, " B"]:
        """The row's newest token, or ON_DEVICE."""
        return self.packed[:, _TOKENS]

    @property
    def positions(self) -> Int32[Any, " B"]:
        """Of the row's first new token."""
        return self.packed[:, 1]

    @property
    def num_generated(self) -> Int32[Any, " B"]:
        return self.packed[:, 2]

    @property
    def pages(self) -> Int32[Any, "B C"]:
        """The pages that the token's keys and values are written to, one a group."""
        return self.packed[:, PAGES:]

    def new_tokens(self, num_groups: int) -> Int32[Any, "B T"]:
        """New tokens in order; the first may be ON_DEVICE."""
        return self._of_tokens(num_groups)[:, :, 0]

    def new_pages(self, num_groups: int) -> Int32[Any, "B T C"]:
        """The pages that each new token's keys and values are written to, one a group."""
        return self._of_tokens(num_groups)[:, :, 1:]

    def _of_tokens(self, num_groups: int) -> Int32[Any, "B T 1+C"]:
        return self.packed[:, _TOKENS:].reshape(len(self.packed), -1, 1 + num_groups)


class BatchIncrements(NamedTuple):
    """Increments from a batch's array to the next step's. A single addition makes the next batch: after a device step,
    which evicts NumPy's code from the caches, each NumPy call costs 20 microseconds."""

    first: Int32[Any, "B 4+C"]  # tokens become ON_DEVICE: each row's input is the token sampled by the step before
    later: Int32[Any, "B 4+C"]


def increments_of(batch: DecodeBatch, num_rows: int) -> BatchIncrements:
    """Increments for a batch with T = 1, of which the first `num_rows` rows are in use."""
    later = np.zeros_like(batch.packed)
    later[:num_rows, 1:_TOKENS] = 1
    first = later.copy()
    first[:num_rows, _TOKENS] = ON_DEVICE - batch.tokens[:num_rows]
    return BatchIncrements(first, later)


def empty_batch(num_rows: int, num_slots: int, num_groups: int = 1, num_new: int = 1) -> DecodeBatch:
    """A batch of padding rows, with `num_new` tokens each."""
    batch = DecodeBatch(np.zeros((num_rows, _TOKENS + num_new * (1 + num_groups)), np.int32))
    batch.slots[:] = num_slots
    return batch
