"""Products with packed weights that stay in the order of their codes. Rows have their inputs permuted to that order
instead, once for all experts.

The codes at one position of all words form a matrix. A shift and a mask word by word unpack it, sixteen words at a time
on a CPU.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from pallas_kernels.grouped_matmul.formats import GROUP, INPUTS, INT4_ZERO, OUTPUTS, WORDS, Fp8, Int4

_THREADS = WORDS // 4  # threads that share a row of words; each has WORDS / 4 words
_FP8_UNIT = 2.0**8  # float16's exponent bias is 8 less than float8's


def to_code_order(x: Shaped[Array, "T D"], weights: Int4 | Fp8) -> Shaped[Array, "T C D/C"]:
    """Rows permuted to the order of the C codes of a word."""
    pairs = _codes_per_word(weights) // 2
    cut = x.reshape(len(x), -1, 4 // pairs, 4, pairs, _THREADS, 2)  # tile, part, word, pair, thread, half of a register
    return jnp.transpose(cut, (0, 6, 4, 1, 2, 5, 3)).reshape(len(x), 2 * pairs, -1)


def code_matrices(expert: Int4 | Fp8) -> list[Float[Array, "F D/C"]]:
    """The matrices of one expert: one for each code of a word, in the type that holds its weights. `expert` has no
    expert axis."""
    num_codes = _codes_per_word(expert)
    bits = 32 // num_codes
    output_tiles, input_tiles = expert.words.shape[:2]
    parts = expert.words.shape[2] // OUTPUTS
    # Whole rows of words are moved.
    cut = expert.words.reshape(output_tiles, input_tiles, parts, OUTPUTS, WORDS)
    words = jnp.transpose(cut, (0, 3, 1, 2, 4)).reshape(output_tiles * OUTPUTS, -1)
    codes = [(words >> (bits * i)) & (2**bits - 1) for i in range(num_codes)]
    if isinstance(expert, Int4):
        # a thread's words belong to one group each
        of_groups = expert.scale.reshape(output_tiles, input_tiles, OUTPUTS, 1, INPUTS // GROUP)
        spread = jnp.broadcast_to(jnp.moveaxis(of_groups, 2, 1), (output_tiles, OUTPUTS, input_tiles, _THREADS, INPUTS // GROUP))
        scale = spread.astype(jnp.float32).reshape(words.shape)
        products = [(code - INT4_ZERO).astype(jnp.float32) * scale for code in codes]
        return [lax.reduce_precision(product, exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16) for product in products]
    of_tiles = expert.scale[:, None, :, :1] * _FP8_UNIT
    scale = jnp.broadcast_to(of_tiles, (output_tiles, OUTPUTS, input_tiles, parts * WORDS)).reshape(words.shape)
    return [_as_float16(code).astype(jnp.float32) * scale for code in codes]


def _codes_per_word(weights: Int4 | Fp8) -> int:
    """Codes in a word."""
    return 8 if isinstance(weights, Int4) else 4


def _as_float16(code: Array) -> Array:
    """The number that a code of float8_e4m3fn represents, over 2**8: both have the same bits for it."""
    bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16)
