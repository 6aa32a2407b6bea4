"""Multi-head latent attention against DeepSeek-V3's class, with random weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from jaxinfer.layers.latent_attention import LatentAttention, expanded
from jaxinfer.layers.matrices import MatrixFormat
from jaxinfer.layers.rope import angles, inverse_frequencies, rotated_amplitude
from jaxinfer.models.config import AnyRopeScaling, LatentSizes, YarnScaling

pytestmark = pytest.mark.parity

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "q_lora_rank": 20,
    "max_position_embeddings": 4096,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}

# Changes of the configuration, and the scaling as ours.
CASES: dict[str, tuple[dict[str, Any], AnyRopeScaling]] = {
    "queries_from_a_latent": ({}, None),
    "queries_from_the_hidden_state": ({"q_lora_rank": None}, None),
    "biases": ({"attention_bias": True}, None),
    "halves": ({"rope_interleave": False}, None),
    "yarn": ({"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}, YarnScaling(40.0, 64, mscale=1.0, mscale_all_dim=1.0)),
    "yarn_of_two_minds": (
        {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}, "q_lora_rank": None},
        YarnScaling(40.0, 64, mscale=0.7, mscale_all_dim=1.3),
    ),
    "yarn_of_rotated_columns_only": ({"rope_parameters": YARN}, YarnScaling(40.0, 64)),
}


class Dense:
    """Every query over all tokens up to its own."""

    def latents(self, q: jax.Array, latents: jax.Array, up: jax.Array, pages: Any, scale: float) -> tuple[jax.Array, Any]:
        k, v = expanded(latents, up, q.shape[2])
        scores = jnp.where(jnp.tri(len(q), dtype=bool), jnp.einsum("tnh,snh->nts", q, k) * scale, -jnp.inf)
        return jnp.einsum("nts,snv->tnv", jax.nn.softmax(scores, axis=-1), v), pages


def ours(theirs: DeepseekV3Attention, config: DeepseekV3Config, scaling: AnyRopeScaling) -> LatentAttention:
    """Our layer with their weights, joined and reversed as the loader does it by a weight map."""
    weights = {name: parameter.detach().numpy() for name, parameter in theirs.named_parameters()}
    sizes = LatentSizes(config.q_lora_rank, config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim)
    form = MatrixFormat(jnp.dtype("float32"))
    interleaved, use_bias = bool(config.rope_interleave), config.attention_bias
    made = LatentAttention(config.hidden_size, 4, sizes, form, scaling=scaling, interleaved=interleaved, use_bias=use_bias)
    down = ("kv_a_proj_with_mqa",) if sizes.query_rank is None else ("q_a_proj", "kv_a_proj_with_mqa")
    values = {
        "down.kernel": np.concatenate([weights[f"{name}.weight"] for name in down]).T,
        "queries.kernel": weights["q_proj.weight" if sizes.query_rank is None else "q_b_proj.weight"].T,
        "norm.scale": weights["kv_a_layernorm.weight"],
        "up": weights["kv_b_proj.weight"],
        "out.kernel": weights["o_proj.weight"].T,
    }
    if sizes.query_rank is not None:
        values["query_norm.scale"] = weights["q_a_layernorm.weight"]
    if use_bias:
        values |= {"down.bias": np.concatenate([weights[f"{name}.bias"] for name in down]), "out.bias": weights["o_proj.bias"]}
    graph, state = nnx.split(made)
    filled = {path: values.pop(".".join(map(str, path))).reshape(w.shape) for path, w in nnx.to_flat_state(state)}
    assert not values
    leaves = [jnp.asarray(filled[path]) for path, _ in nnx.to_flat_state(state)]
    return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), leaves))


@pytest.mark.parametrize("case", CASES)
def test_the_layer_gives_what_transformers_gives(case: str) -> None:
    changes, scaling = CASES[case]
    config = DeepseekV3Config(**{**SIZES, **changes}, attn_implementation="eager")
    torch.manual_seed(0)
    theirs = DeepseekV3Attention(config, 0).eval()
    for parameter in theirs.parameters():  # biases and norms too
        torch.nn.init.normal_(parameter, std=0.2 if parameter.ndim == 2 else 1.0)
    num_tokens, first = 50, 900  # of a context that the original is long past
    x, positions = torch.randn(1, num_tokens, 48), torch.arange(first, first + num_tokens)[None]
    mask = torch.full((num_tokens, num_tokens), -torch.inf).triu(1)[None, None]
    with torch.inference_mode():
        expected = theirs(x, DeepseekV3RotaryEmbedding(config)(x, positions), mask)[0][0]
    theta = config.rope_parameters["rope_theta"]
    cos_sin = angles(jnp.asarray(positions[0].numpy()), inverse_frequencies(8, theta, scaling), rotated_amplitude(scaling))
    found, _ = ours(theirs, config, scaling)(jnp.asarray(x[0].numpy()), cos_sin, None, Dense())
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.abs(expected).max() > 1
