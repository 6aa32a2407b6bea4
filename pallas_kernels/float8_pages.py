"""Page pools of float8_e4m3fn (arXiv:2209.05433): a byte a value, as large as 448, with 3 bits of mantissa.

On a CPU such a pool's type is uint8, for the same bits: XLA's CPU backend copies a whole pool of a narrow float type to
write one row of it (5 s for 500 MB).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

FLOAT8 = jnp.dtype("float8_e4m3fn")
LARGEST = 448.0
CODES = jnp.dtype("uint8")  # its bits
# A code's bits are those of a float16 whose exponent is 8 too small: conversions of codes give the value over this.
CODE_UNIT = 256.0


def pool_dtype(platform: str) -> jnp.dtype:
    """The type of such a pool on 'cpu' or 'gpu'."""
    return CODES if platform == "cpu" else FLOAT8


def is_float8(dtype: jnp.dtype) -> bool:
    """Whether a pool's type is one of the two."""
    return dtype in (CODES, FLOAT8)


def widened(values: Shaped[Array, "*X"]) -> Float[Array, "*X"]:
    """A pool's values, of any type, in float32."""
    if values.dtype != CODES:
        return values.astype(jnp.float32)
    wide = values.astype(jnp.uint16)
    halves = jax.lax.bitcast_convert_type((wide & 0x80) << 8 | (wide & 0x7F) << 7, jnp.float16)
    return halves.astype(jnp.float32) * CODE_UNIT


def narrowed(values: Float[Array, "*X"], dtype: jnp.dtype) -> Shaped[Array, "*X"]:
    """Values in a pool's type, of any kind. What is too large for float8 becomes the largest there is, and what is not
    finite in the pool's type 0."""
    if not is_float8(dtype):
        kept = values.astype(dtype)
        return jnp.where(jnp.isfinite(kept), kept, 0)
    finite = jnp.where(jnp.isfinite(values), values, 0)
    kept = jnp.clip(finite, -LARGEST, LARGEST).astype(FLOAT8)
    return kept if dtype == FLOAT8 else jax.lax.bitcast_convert_type(kept, CODES)
