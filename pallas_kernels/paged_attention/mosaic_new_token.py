"""The new token of each request, which paged_attention's kernel for GPUs writes and begins its softmax with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.mosaic.in_place import load_row
from pallas_kernels.mosaic.warpgroup import Warpgroup


@dataclass(frozen=True)
class NewTokens:
    """The new tokens of all requests."""

    keys: Float[Array, "B K H"]
    values: Float[Array, "B K H"]
    page_ids: Int[Array, " B"]
    offsets: Int[Array, " B"]

    @property
    def page_slots(self) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
        return self.page_ids, self.offsets

    def after(self, queries: Float[Array, "B K R H"]) -> Float[Array, "B K R+2 H"]:
        """Each KV head's queries, then its new key and value, often in rows that would be padding. XLA rotates them all
        in the one launch that makes this array. Three arrays would need three launches, and save nothing: rotating the
        queries, and XLA's own write with rotated keys, are two."""
        new = (side[:, :, None].astype(queries.dtype) for side in (self.keys, self.values))
        return jnp.concatenate([queries, *new], axis=2)


@dataclass(frozen=True)
class NewToken:
    """The new token of one request and KV head, in global memory."""

    rows: Any  # [2, H]: key and value
    key_slot: Any  # [H]
    value_slot: Any
    is_attended: Array  # whether this block attends to it
    is_written: Array  # whether this block writes it

    def write(self, warpgroup: Warpgroup) -> tuple[Float[Array, " H"], Float[Array, " H"]]:
        """Writes its key and value. Returns them as they are stored, which is what queries attend to."""
        key, value = (_finite(load_row(warpgroup, self.rows.at[side]).astype(jnp.float32)) for side in range(2))

        @pl.when(self.is_written)
        def _write() -> None:
            self.key_slot[...] = key.astype(self.key_slot.dtype)
            self.value_slot[...] = value.astype(self.value_slot.dtype)

        return key, value


def _finite(numbers: Array) -> Array:
    """The values that `page_write.write` stores; NaN is not below infinity either."""
    return jnp.where(jnp.abs(numbers) < jnp.inf, numbers, 0.0)
