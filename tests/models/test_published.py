"""The largest models as they are read: what their layers are, and what their contexts cost."""

from __future__ import annotations

import math

import numpy as np

from jaxinfer.architecture.known_models import model_shape
from jaxinfer.architecture.model_config import LatentSizes, Routing, YarnScaling
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.layers.rope import inverse_frequencies
from jaxinfer.models.registry import read_config
from jaxinfer.planner.kv_memory import max_context_tokens
from pallas_kernels.span import FULL_ATTENTION, Span

CHUNK_SIZE = 2048


def page_spec(name: str) -> PageSpec:
    """Of pages of 16 tokens in bfloat16."""
    return PageSpec.of(read_config(model_shape(name)), 16, 2)


def test_deepseek_v3() -> None:
    config = read_config(model_shape("deepseek-v3"))
    assert config.latent == LatentSizes(1536, 512, 128, 64, 128)
    assert config.rope_scaling == YarnScaling(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)
    assert config.family.routing == Routing(256, 8, "sigmoid", True, 8, 4, True, 2.5)
    assert (config.family.num_dense_layers, config.family.shared_size, config.family.num_mtp) == (3, 2048, 1)


def test_kimi_k25() -> None:
    config = read_config(model_shape("kimi-k2.5"))
    assert (config.architecture, config.num_heads, config.vocab_size) == ("KimiK25ForConditionalGeneration", 64, 163840)
    assert config.family.routing == Routing(384, 8, "sigmoid", True, 1, 1, True, 2.827)
    assert (config.family.num_dense_layers, config.family.num_mtp) == (1, 0)


def test_llama_4_scout() -> None:
    config = read_config(model_shape("llama-4-scout"))
    chunk = Span(chunk=8192)
    assert config.spans == (chunk, chunk, chunk, FULL_ATTENTION) * 12
    assert config.family.is_rotated == (True, True, True, False) * 12
    assert config.family.has_experts == (True,) * 48
    assert (config.family.tempering, config.family.normalises) == ((8192.0, 0.1), True)
    # Low and high bounds are one: wavelengths over 8192 tokens are stretched, the others are not.
    plain = 500000.0 ** -(np.arange(0, 128, 2) / 128)
    stretched = np.where(2 * math.pi / plain > 8192, plain / 16, plain)
    np.testing.assert_allclose(inverse_frequencies(128, config.rope_theta, config.rope_scaling), stretched, rtol=1e-6)


def test_bytes_a_token_of_kimi_k25() -> None:
    """A latent of 512 and a rotated part of 64, in 61 layers."""
    spec = page_spec("kimi-k2.5")
    assert spec.token_bytes == spec.lasting_token_bytes == 61 * (512 + 64) * 2 == 70272


def test_bytes_a_token_of_llama_4_scout() -> None:
    """8 KV heads of 128 in 48 layers, of which 12 attend to everything: what is past a chunk costs a fourth."""
    spec = page_spec("llama-4-scout")
    assert spec.token_bytes == 48 * 2 * 8 * 128 * 2 == 196608
    assert spec.lasting_token_bytes == 12 * 2 * 8 * 128 * 2 == 49152


def test_a_context_of_a_million_tokens_of_llama_4_scout() -> None:
    """Costs what its global layers keep, and in others of two chunks at most."""
    spec, million = page_spec("llama-4-scout"), 1_000_000
    held = spec.max_pages(million, CHUNK_SIZE) * spec.page_bytes
    assert million * 49152 < held < million * 49152 + 2 * 8192 * 196608
    assert held / (million * 196608) < 0.27
    # As many pages hold it, and one fewer do not.
    pages = spec.max_pages(million, CHUNK_SIZE)
    assert max_context_tokens(spec, pages + 1, CHUNK_SIZE, million) >= million
    assert max_context_tokens(spec, pages - spec.num_groups, CHUNK_SIZE, million) < million
