"""The new token of each request, as paged_attention's kernel for GPUs writes it and begins with it."""

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
    """Of all requests."""

    keys: Float[Array, "B K H"]
    values: Float[Array, "B K H"]
    page_ids: Int[Array, " B"]
    offsets: Int[Array, " B"]

    @property
    def places(self) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
        return self.page_ids, self.offsets

    def after(self, queries: Float[Array, "B K R H"]) -> Float[Array, "B K R+2 H"]:
        """Each KV head's queries, then its key and value, often in the rows that queries are padded with. XLA rotates them all in the one launch that
        makes this array. As three arrays they would take three, and nothing be saved: XLA's own write, which rotates the keys, and the queries
        are two."""
        new = (side[:, :, None].astype(queries.dtype) for side in (self.keys, self.values))
        return jnp.concatenate([queries, *new], axis=2)


@dataclass(frozen=True)
class NewToken:
    """One request's, as a KV head has it, in global memory."""

    rows: Any  # [2, H]: key and value
    key_place: Any  # [H]
    value_place: Any
    is_here: Array  # whether this block attends to it
    is_written: Array  # whether this block writes it

    def write(self, warpgroup: Warpgroup) -> tuple[Float[Array, " H"], Float[Array, " H"]]:
        """Its key and value as they are stored, which is what queries attend to."""
        key, value = (_finite(load_row(warpgroup, self.rows.at[side]).astype(jnp.float32)) for side in range(2))

        @pl.when(self.is_written)
        def _write() -> None:
            self.key_place[...] = key.astype(self.key_place.dtype)
            self.value_place[...] = value.astype(self.value_place.dtype)

        return key, value


def _finite(numbers: Array) -> Array:
    """As `page_write.write` stores them; NaN is not below infinity either."""
    return jnp.where(jnp.abs(numbers) < jnp.inf, numbers, 0.0)
