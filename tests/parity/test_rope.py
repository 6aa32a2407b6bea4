"""Rotary embeddings against transformers' own, over many settings."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import Llama4TextConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama4.modeling_llama4 import Llama4TextRotaryEmbedding, apply_rotary_emb

from jaxinfer.architecture.model_config import AnyRopeScaling, LinearScaling, YarnScaling
from jaxinfer.layers.rope import angles, inverse_frequencies, rotate, rotated_amplitude

pytestmark = pytest.mark.parity


def reference(kind: str, head_size: int, theta: float, **parameters: Any) -> tuple[np.ndarray, float]:
    config = LlamaConfig(
        head_dim=head_size, max_position_embeddings=2**20, rope_parameters={"rope_type": kind, "rope_theta": theta, **parameters}
    )
    frequencies, amplitude = ROPE_INIT_FUNCTIONS[kind](config)
    return frequencies.numpy(), amplitude


def agree(head_size: int, theta: float, scaling: AnyRopeScaling, kind: str, **parameters: Any) -> None:
    frequencies, amplitude = reference(kind, head_size, theta, **parameters)
    np.testing.assert_allclose(inverse_frequencies(head_size, theta, scaling), frequencies, rtol=1e-5)  # its ramp is float32
    assert rotated_amplitude(scaling) == pytest.approx(amplitude, rel=1e-6)


@pytest.mark.parametrize("head_size", [16, 64, 128])
@pytest.mark.parametrize("theta", [1e4, 5e4, 1e6])
@pytest.mark.parametrize("context", [128, 4096, 32768])
@pytest.mark.parametrize("truncate", [True, False])
def test_yarn(head_size: int, theta: float, context: int, truncate: bool) -> None:
    own: dict[str, Any] = {"original_max_position_embeddings": context, "truncate": truncate}
    agree(head_size, theta, YarnScaling(40.0, context, truncate=truncate), "yarn", factor=40.0, **own)
    fields: dict[str, Any] = {"mscale": 0.7, "mscale_all_dim": 1.0}
    bounds = YarnScaling(4.0, context, 16.0, 2.0, truncate=truncate, **fields)
    agree(head_size, theta, bounds, "yarn", factor=4.0, beta_fast=16.0, beta_slow=2.0, **fields, **own)
    outright = YarnScaling(4.0, context, attention_factor=0.8, truncate=truncate)
    agree(head_size, theta, outright, "yarn", factor=4.0, attention_factor=0.8, **own)
    half = YarnScaling(4.0, context, mscale=0.7, truncate=truncate)  # one alone counts for nothing
    agree(head_size, theta, half, "yarn", factor=4.0, mscale=0.7, **own)


def test_linear() -> None:
    agree(128, 1e6, LinearScaling(8.0), "linear", factor=8.0)


def test_llama_4_turns_interleaved_pairs() -> None:
    config = Llama4TextConfig(head_dim=32, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    q, k, positions = torch.randn(1, 9, 4, 32), torch.randn(1, 9, 2, 32), torch.tensor([[0, 1, 2, 3, 50, 51, 900, 8000, 8191]])
    turned = apply_rotary_emb(q, k, Llama4TextRotaryEmbedding(config)(q, positions))
    cos_sin = angles(jnp.asarray(positions[0].numpy()), inverse_frequencies(32, 5e5, None))
    for x, expected in zip((q, k), turned, strict=True):
        np.testing.assert_allclose(
            rotate(jnp.asarray(x[0].numpy()), cos_sin, interleaved=True), expected[0], atol=1e-3
        )  # angles of thousands, in float32
