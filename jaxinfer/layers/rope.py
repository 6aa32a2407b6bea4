"""Rotary position embedding (arXiv:2104.09864), in the half-rotated form that Hugging Face checkpoints are stored for."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxinfer.models.config import RopeScaling


def inverse_frequencies(head_size: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """Radians a token for each pair of a head's dimensions, float32 [H/2]; scaled as Llama 3.1 does where asked."""
    frequencies = 1.0 / theta ** (np.arange(0, head_size, 2, dtype=np.float64) / head_size)
    if scaling is not None:
        turns = scaling.original_context * frequencies / (2 * math.pi)  # of each pair over the original context
        smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)  # 0: long wavelength, divided; 1: short, kept
        frequencies = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    return frequencies.astype(np.float32)


CosSin = tuple[Float[Array, "T 1 2 H/2"], Float[Array, "T 1 2 H/2"]]


def angles(positions: Int[Array, " T"], frequencies: np.ndarray) -> CosSin:
    """Cosine and signed sine of every pair's angle, float32, to be computed once a step and shared by all layers."""
    turned = positions[:, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(turned), jnp.sin(turned)
    return jnp.stack([cos, cos], axis=1)[:, None], jnp.stack([-sin, sin], axis=1)[:, None]


def rotate(x: Float[Array, "T N H"], cos_sin: CosSin) -> Float[Array, "T N H"]:
    """Each head's pairs (i, i + H/2) turned by their angle."""
    cos, sin = cos_sin
    halves = x.astype(jnp.float32).reshape(*x.shape[:2], 2, -1)
    # Halves swapped by a reversal, which XLA vectorises on a CPU; joining them by a concatenation took eight times as long.
    return (halves * cos + jnp.flip(halves, axis=2) * sin).reshape(x.shape).astype(x.dtype)
