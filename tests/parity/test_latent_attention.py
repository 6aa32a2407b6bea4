"""Multi-head latent attention against DeepSeek-V3's class, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import save_file
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from checkpoints.loader import load
from checkpoints.safetensors_source import SafetensorsSource
from checkpoints.weight_map import Weight, WeightMap
from jaxinfer.architecture.model_config import AnyRopeScaling, LatentSizes, YarnScaling
from jaxinfer.layers.latent_attention import LatentAttention, expanded
from jaxinfer.layers.rope import angles, inverse_frequencies, rotated_amplitude
from jaxinfer.weights.formats.plain import Plain
from jaxinfer.weights.formats.weight_format import ModelWeightFormat

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


# As a model's file declares it.
WEIGHT_MAP = WeightMap(
    {
        **{
            f"{ours}.{kind}": Weight(tuple(f"{name}.{kind_theirs}" for name in theirs), transpose=kind == "kernel", axis=-1)
            for ours, theirs in (
                ("down", ("q_a_proj", "kv_a_proj_with_mqa")),
                ("query_up", ("q_b_proj",)),
                ("kv_down", ("kv_a_proj_with_mqa",)),
                ("queries", ("q_proj",)),
                ("out", ("o_proj",)),
            )
            for kind, kind_theirs in (("kernel", "weight"), ("bias", "bias"))
        },
        "query_norm.scale": Weight(("q_a_layernorm.weight",)),
        "norm.scale": Weight(("kv_a_layernorm.weight",)),
        "up": Weight(("kv_b_proj.weight",)),
    }
)


def ours(theirs: DeepseekV3Attention, config: DeepseekV3Config, scaling: AnyRopeScaling, folder: Path) -> LatentAttention:
    """Our layer with their weights, saved and loaded."""
    save_file({name: parameter.detach().numpy() for name, parameter in theirs.named_parameters()}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    sizes = LatentSizes(config.q_lora_rank, config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim)
    options: dict[str, Any] = {"interleaved": bool(config.rope_interleave), "use_bias": config.attention_bias, "scaling": scaling}
    made = LatentAttention(config.hidden_size, 4, sizes, ModelWeightFormat(Plain(jnp.dtype("float32"))), **options)
    graph, state = nnx.split(made)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    targets = {".".join(map(str, path)): jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=here) for path, w in nnx.to_flat_state(state)}
    loaded = load(SafetensorsSource(folder), targets, WEIGHT_MAP)
    return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), loaded.values()))


@pytest.mark.parametrize("case", CASES)
def test_the_layer_gives_what_transformers_gives(case: str, tmp_path: Path) -> None:
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
    found, _ = ours(theirs, config, scaling, tmp_path)(jnp.asarray(x[0].numpy()), cos_sin, None, Dense())
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert expected.abs().max() > 1
