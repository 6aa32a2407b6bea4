"""DecodeBatch: one decode step as padded NumPy arrays, where the host half and the device half meet. Imports no JAX."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

# In `tokens`: take the slot's last sampled token, which is still on the device.
ON_DEVICE = -1


class DecodeBatch(NamedTuple):
    """B rows of one token each. A padded row has the slot past the last, and writes to the null page."""

    slots: Int32[Any, " B"]
    tokens: Int32[Any, " B"]  # the row's newest token, or ON_DEVICE
    positions: Int32[Any, " B"]  # of that token
    num_generated: Int32[Any, " B"]
    page_table: Int32[Any, "B W"]


def empty_batch(num_rows: int, num_slots: int, table_width: int) -> DecodeBatch:
    """Padding only."""
    return DecodeBatch(
        slots=np.full(num_rows, num_slots, np.int32),
        tokens=np.zeros(num_rows, np.int32),
        positions=np.zeros(num_rows, np.int32),
        num_generated=np.zeros(num_rows, np.int32),
        page_table=np.zeros((num_rows, table_width), np.int32),
    )
