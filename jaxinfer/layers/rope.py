"""Rotary position embedding (arXiv:2104.09864), for half-split pairs as in Hugging Face checkpoints, or interleaved
pairs."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxinfer.architecture.model_config import AnyRopeScaling, LinearScaling, YarnScaling


def inverse_frequencies(head_size: int, theta: float, scaling: AnyRopeScaling) -> np.ndarray:
    """Radians a token for each pair of a head's dimensions, float32 [H/2]; with Llama 3.1's, YaRN's or linear
    scaling."""
    frequencies = 1.0 / theta ** (np.arange(0, head_size, 2, dtype=np.float64) / head_size)
    if scaling is None:
        kept = np.ones_like(frequencies)  # 1: stays (short wavelength); 0: divided by the factor (long)
    elif isinstance(scaling, LinearScaling):
        kept = np.zeros_like(frequencies)
    elif isinstance(scaling, YarnScaling):
        kept = _kept_by_yarn(head_size, theta, scaling)
    else:
        turns = scaling.original_context * frequencies / (2 * math.pi)  # of each pair over the original context
        # Llama 4 Scout has one bound for both: nothing in between.
        between = (scaling.high_freq_factor - scaling.low_freq_factor) or 1e-9
        kept = np.clip((turns - scaling.low_freq_factor) / between, 0.0, 1.0)
    factor = 1.0 if scaling is None else scaling.factor
    return ((1 - kept) * frequencies / factor + kept * frequencies).astype(np.float32)


def _kept_by_yarn(head_size: int, theta: float, scaling: YarnScaling) -> np.ndarray:
    """The share of each pair's frequency that stays: falls linearly from 1 to 0 over pairs (Llama 3's: over
    frequencies)."""

    def pair_of(turns: float) -> float:
        """The pair that makes this many turns over the original context."""
        return head_size * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_of(scaling.fast_turns), pair_of(scaling.slow_turns)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_size - 1)
    # Where both bounds meet, a small width ends the ramp at once: the same number as in transformers.
    return 1 - np.clip((np.arange(head_size // 2) - first) / ((last - first) or 0.001), 0.0, 1.0)


def rotated_amplitude(scaling: AnyRopeScaling) -> float:
    """Factor of rotated queries and keys, for `angles`: 1 except for YaRN, which sharpens scores of long contexts."""
    if not isinstance(scaling, YarnScaling):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _growth(scaling.factor, scaling.mscale) / _growth(scaling.factor, scaling.mscale_all_dim)
    return _growth(scaling.factor, 1.0)


def score_factor(scaling: AnyRopeScaling) -> float:
    """Factor of attention scores besides head size ** -0.5, where models apply it to all dimensions (DeepSeek)."""
    if not isinstance(scaling, YarnScaling) or not scaling.mscale_all_dim:
        return 1.0
    return _growth(scaling.factor, scaling.mscale_all_dim) ** 2


def _growth(factor: float, strength: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * strength * math.log(factor) + 1.0


CosSin = tuple[Float[Array, "T 1 2 H/2"], Float[Array, "T 1 2 H/2"]]


def angles(positions: Int[Array, " T"], frequencies: np.ndarray, amplitude: float = 1.0) -> CosSin:
    """Cosine and signed sine of each pair's angle, float32, times an amplitude; computed once a step for all layers."""
    turned = positions[:, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(turned) * amplitude, jnp.sin(turned) * amplitude
    return jnp.stack([cos, cos], axis=1)[:, None], jnp.stack([-sin, sin], axis=1)[:, None]


def rotate(x: Float[Array, "T N H"], cos_sin: CosSin, *, interleaved: bool = False) -> Float[Array, "T N H"]:
    """Each head's pairs rotated by their angles: (i, i + H/2), or (2i, 2i + 1) if interleaved."""
    cos, sin = cos_sin
    if interleaved:
        cos, sin = jnp.swapaxes(cos, 2, 3), jnp.swapaxes(sin, 2, 3)
    pairs = x.astype(jnp.float32).reshape(*x.shape[:2], *((-1, 2) if interleaved else (2, -1)))
    # A reversal swaps the sides: XLA vectorises it on a CPU, where a concatenation takes eight times as long.
    swapped = jnp.flip(pairs, axis=3 if interleaved else 2)
    return (pairs * cos + swapped * sin).reshape(x.shape).astype(x.dtype)
