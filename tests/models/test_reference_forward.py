"""The plain forward pass, which everything else is checked against, against one written out in NumPy."""

import numpy as np
import pytest

from tests import model_on_mesh, tiny_model
from tests.tiny_model import CONFIG, HEAD, HEADS, KV_HEADS, LAYERS


def norm(x, scale):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG["rms_norm_eps"]) * scale


def turned(x):
    """Rotary embedding of [T, N, H]."""
    angles = np.arange(len(x))[:, None, None] / CONFIG["rope_theta"] ** (np.arange(0, HEAD, 2) / HEAD)
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)


def plain_numpy(token_ids):
    weights = {name: array.astype(np.float64) for name, array in tiny_model.tensors().items()}
    x = weights["model.embed_tokens.weight"][token_ids]
    past = np.tri(len(token_ids), dtype=bool)
    for layer in range(LAYERS):
        of = {name.removeprefix(f"model.layers.{layer}."): w for name, w in weights.items()}
        h = norm(x, of["input_layernorm.weight"])
        q, k, v = (
            (h @ of[f"self_attn.{name}_proj.weight"].T).reshape(len(x), count, HEAD)
            for name, count in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        )
        q, k = turned(q), turned(k)
        heads = []
        for head in range(HEADS):
            of_head = head // (HEADS // KV_HEADS)
            scores = np.where(past, q[:, head] @ k[:, of_head].T / np.sqrt(HEAD), -np.inf)
            attention = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(attention / attention.sum(-1, keepdims=True) @ v[:, of_head])
        x = x + np.concatenate(heads, -1) @ of["self_attn.o_proj.weight"].T
        h = norm(x, of["post_attention_layernorm.weight"])
        gate, up = h @ of["mlp.gate_proj.weight"].T, h @ of["mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ of["mlp.down_proj.weight"].T
    return norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


@pytest.mark.parametrize("devices", [(0,), (0, 1)])
def test_logits_are_those_of_the_model_written_out(tiny_model_path, devices):
    model = model_on_mesh.put(tiny_model_path, devices)
    for length in (1, 31, 32, 50):
        token_ids = np.random.default_rng(length).integers(0, CONFIG["vocab_size"], length).tolist()
        np.testing.assert_allclose(model.plain_logits(token_ids), plain_numpy(token_ids), atol=2e-4)
