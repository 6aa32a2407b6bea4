"""Lossless bfloat16 in tiles: every pattern of bits comes back, and what doesn't fit is counted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul import lossless
from pallas_kernels.grouped_matmul.formats import dequantise

unpack = jax.jit(dequantise)


def there_and_back(bits: np.ndarray) -> tuple[np.ndarray, int]:
    packed = jax.jit(lossless.lossless_from_bfloat16)(jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.bfloat16))
    assert packed.tiles.nbytes * 8 / bits.size == 12.0625
    return np.asarray(jax.lax.bitcast_convert_type(unpack(packed), jnp.uint16)).swapaxes(1, 2), int(lossless.num_misfits(packed))


def test_all_65536_patterns_survive_as_codes_or_as_escapes(monkeypatch):
    """NaN with any payload, infinities, zeros of both signs and denormals too. A tile has patterns of 15 exponents, and 22 others anywhere. Its
    base is given: a search in so many tiles takes a minute on a CPU."""
    random = np.random.default_rng(0)
    patterns = np.arange(2**16, dtype=np.uint16)
    exponents = (patterns >> 7) & 255
    bases = np.arange(0, 128, 15)
    coded = [patterns[(exponents > base) & (exponents <= base + 15)] for base in bases]
    others = np.setdiff1d(patterns, np.concatenate(coded))
    others = np.resize(others, -(-len(others) // lossless.ESCAPES) * lossless.ESCAPES).reshape(-1, lossless.ESCAPES)
    filled = np.stack([np.resize(random.permutation(coded[i % len(coded)]), 128 * 128) for i in range(len(others))])
    filled[:, :2] = 0x0000, 0x8000  # zeros are codes of any tile
    for tile, escapes in zip(filled, others, strict=True):
        tile[2 + random.permutation(len(tile) - 2)[: len(escapes)]] = escapes
    bits = filled.reshape(-1, 128, 128).transpose(1, 0, 2).reshape(1, 128, -1)
    monkeypatch.setattr(lossless, "_best_base", lambda exponent: jnp.asarray(np.resize(bases, (1, 1, len(filled)))))
    assert np.bincount(bits.ravel(), minlength=2**16).all()
    found, num_misfits = there_and_back(bits)
    assert num_misfits == 0
    np.testing.assert_array_equal(found, bits)


def test_the_base_is_the_one_with_the_fewest_escapes():
    """Weights of 18 exponents, fewest of the largest: those are the escapes, whatever else is 0."""
    exponents = np.repeat(np.arange(100, 118), [900] * 15 + [1, 2, 3])
    bits = np.zeros((1, 128, 128), np.uint16)
    bits.reshape(-1)[: len(exponents)] = np.random.default_rng(1).permutation(exponents) << 7
    packed = jax.jit(lossless.lossless_from_bfloat16)(jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.bfloat16))
    found = lossless.escapes(lossless.headers(packed.tiles))
    assert sorted(np.asarray(found.bits)[np.asarray(found.output) >= 0] >> 7) == [115, 116, 116, 117, 117, 117]
    np.testing.assert_array_equal(there_and_back(bits)[0], bits)


def test_a_tile_of_more_escapes_than_it_can_list_says_how_many():
    bits = np.full((1, 256, 128), 0x3F80, np.uint16)
    bits[0, 128:, 0] = 0x0100  # 128 of the lower tile
    assert there_and_back(bits)[1] == 128 - lossless.ESCAPES
