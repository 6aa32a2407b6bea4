"""Writing to a page pool, in every program that stores keys and values, or latents."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.float8_pages import narrowed


def write(
    pages: Shaped[Array, "L S P K G H"],
    layer: Int[Array, ""],
    sides: Sequence[Float[Array, "T K H"]],
    page_ids: Int[Array, " T"],
    offsets: Int[Array, " T"],
) -> Shaped[Array, "L S P K G H"]:
    """Stores each token's key and value of a layer, or its latent, in its slot of its page.

    What is not finite is stored as 0. A model that overflows spoils its own request. But its freed pages stay harmless
    to their next owner, whose masked weights multiply old contents. Kernels rely on it (`pool_is_finite`).
    """
    # The first index is an array too, so that XLA sees one scatter of S T rows. A single row would become a slice
    # update. XLA fuses that into each of its readers, and each copies the whole pool to update its own: 1.3 s a step
    # instead of 20 ms.
    of_sides = jnp.arange(len(sides))[:, None]
    return pages.at[layer, of_sides, page_ids, :, offsets].set(narrowed(jnp.stack(sides), pages.dtype), mode="promise_in_bounds")
