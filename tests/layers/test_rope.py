"""Rotary embeddings: frequencies against transformers' own numbers, written here; rotations against multiplication of complex numbers."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.architecture.model_config import AnyRopeScaling, LinearScaling, RopeScaling, YarnScaling
from jaxinfer.layers.rope import angles, inverse_frequencies, rotate, rotated_amplitude, score_factor

YARN = YarnScaling(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)  # DeepSeek-V3's

# What transformers 5 computes for heads of 16, by base and scaling.
FREQUENCIES: dict[tuple[float, AnyRopeScaling], list[float]] = {
    (1e4, YARN): [1.0, 0.31622776, 0.1, 0.023914725, 0.0051249997, 0.00084986218, 2.4999999e-05, 7.9056945e-06],
    (1.5e5, YarnScaling(32.0, 4096, truncate=False)): [
        *(1.0, 0.225418, 0.050813273, 0.0067949593, 0.00045648392, 1.8188337e-05, 4.0999785e-06, 9.2420896e-07)
    ],
    (1e6, LinearScaling(8.0)): [
        0.125,
        0.022228492,
        0.0039528473,
        0.00070292666,
        0.00012500001,
        2.2228493e-05,
        3.9528468e-06,
        7.0292668e-07,
    ],
    (5e5, RopeScaling(8.0, 1.0, 4.0, 8192)): [
        *(1.0, 0.19392276, 0.037606031, 0.0072926651, 0.00052484602, 3.4281024e-05, 6.6478697e-06, 1.2891732e-06)
    ],
    (1e4, None): [10 ** (-i / 2) for i in range(8)],
}


@pytest.mark.parametrize(("theta", "scaling"), FREQUENCIES)
def test_frequencies_are_transformers_own(theta: float, scaling: AnyRopeScaling) -> None:
    found = inverse_frequencies(16, theta, scaling)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, FREQUENCIES[theta, scaling], rtol=5e-7)


def test_yarn_keeps_what_turns_often_and_divides_what_turns_seldom() -> None:
    """By turns over the original context, as the paper has it; between the two bounds, each falls in proportion to its place."""
    scaling = YarnScaling(8.0, 2048, fast_turns=20.0, slow_turns=2.0, truncate=False)
    plain, found = inverse_frequencies(128, 1e4, None), inverse_frequencies(128, 1e4, scaling)
    turns = 2048 * plain / (2 * math.pi)
    assert 0 < np.sum(turns > 20.0) < np.sum(turns > 2.0) < 64
    np.testing.assert_allclose(found[turns > 20.0], plain[turns > 20.0], rtol=1e-6)
    np.testing.assert_allclose(found[turns < 2.0], plain[turns < 2.0] / 8, rtol=1e-6)
    between = (turns < 20.0) & (turns > 2.0)
    kept = (found / plain - 1 / 8)[between] / (1 - 1 / 8)
    np.testing.assert_allclose(kept, np.log(turns[between] / 2) / math.log(10), rtol=1e-3)


def test_bounds_that_meet_are_one_step() -> None:
    scaling = YarnScaling(4.0, 8, fast_turns=1.27, slow_turns=1.27, truncate=False)  # under the first pair's turns
    plain, found = inverse_frequencies(8, 1e4, None), inverse_frequencies(8, 1e4, scaling)
    np.testing.assert_allclose(found / plain, [1.0, 0.25, 0.25, 0.25], rtol=1e-6)


def test_what_grows_with_the_context() -> None:
    grown = 0.1 * math.log(40) + 1
    assert (rotated_amplitude(YARN), score_factor(YARN)) == (1.0, pytest.approx(grown**2))  # DeepSeek-V3: all of the score, 1.8740
    assert score_factor(YARN) == pytest.approx(1.8738, abs=1e-3)
    plain = YarnScaling(40.0, 4096)
    assert (rotated_amplitude(plain), score_factor(plain)) == (pytest.approx(grown), 1.0)
    both = YarnScaling(40.0, 4096, mscale=0.707, mscale_all_dim=0.5)
    assert rotated_amplitude(both) == pytest.approx(1.064468903941252)
    assert score_factor(both) == pytest.approx((0.05 * math.log(40) + 1) ** 2)
    assert rotated_amplitude(YarnScaling(40.0, 4096, attention_factor=0.5)) == 0.5
    assert (rotated_amplitude(YarnScaling(0.5, 4096)), score_factor(YarnScaling(1.0, 4096, mscale_all_dim=1.0))) == (1.0, 1.0)
    for other in (None, LinearScaling(8.0), RopeScaling(8.0, 1.0, 4.0, 8192)):
        assert (rotated_amplitude(other), score_factor(other)) == (1.0, 1.0)


@pytest.mark.parametrize("interleaved", [False, True])
def test_pairs_are_complex_numbers_turned_by_their_angle(interleaved: bool) -> None:
    random = np.random.default_rng(0)
    x, positions = random.standard_normal((5, 3, 16)), np.array([0, 1, 7, 300, 2])
    frequencies = inverse_frequencies(16, 1e4, None)
    pairs = x.reshape(5, 3, 8, 2) if interleaved else np.swapaxes(x.reshape(5, 3, 2, 8), 2, 3)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * 1.5 * np.exp(1j * positions[:, None, None] * frequencies.astype(np.float64))
    expected = np.stack([turned.real, turned.imag], axis=3 if interleaved else 2).reshape(x.shape)
    found = rotate(jnp.asarray(x, jnp.float32), angles(jnp.asarray(positions), frequencies, 1.5), interleaved=interleaved)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    narrow = rotate(jnp.asarray(x, jnp.bfloat16), angles(jnp.asarray(positions), frequencies), interleaved=interleaved)
    assert narrow.dtype == jnp.bfloat16
