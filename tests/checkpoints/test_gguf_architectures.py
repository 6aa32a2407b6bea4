"""GGUF files of Gemma 3, Qwen3 and Qwen3-MoE: Hugging Face's names, values and configuration, as llama.cpp's converter changed them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from checkpoints.gguf_source import GGUFSource
from checkpoints.loader import load
from checkpoints.source import CheckpointError
from checkpoints.weight_map import Weight, WeightMap
from tests.checkpoints import gguf_writing

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD, MLP, VOCAB, EXPERTS, EXPERT_MLP = 64, 2, 4, 2, 16, 96, 40, 4, 32
ATTENTION = {  # theirs, ours and the shape of what every family has
    "attn_norm": ("input_layernorm", (HIDDEN,)),
    "attn_q": ("self_attn.q_proj", (HEADS * HEAD, HIDDEN)),
    "attn_k": ("self_attn.k_proj", (KV_HEADS * HEAD, HIDDEN)),
    "attn_v": ("self_attn.v_proj", (KV_HEADS * HEAD, HIDDEN)),
    "attn_q_norm": ("self_attn.q_norm", (HEAD,)),
    "attn_k_norm": ("self_attn.k_norm", (HEAD,)),
    "attn_output": ("self_attn.o_proj", (HIDDEN, HEADS * HEAD)),
}
DENSE = {
    "ffn_gate": ("mlp.gate_proj", (MLP, HIDDEN)),
    "ffn_up": ("mlp.up_proj", (MLP, HIDDEN)),
    "ffn_down": ("mlp.down_proj", (HIDDEN, MLP)),
}
LAYERS_OF: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
    "qwen3": {**ATTENTION, **DENSE, "ffn_norm": ("post_attention_layernorm", (HIDDEN,))},
    "gemma3": {
        **ATTENTION,
        **DENSE,
        "post_attention_norm": ("post_attention_layernorm", (HIDDEN,)),
        "ffn_norm": ("pre_feedforward_layernorm", (HIDDEN,)),
        "post_ffw_norm": ("post_feedforward_layernorm", (HIDDEN,)),
    },
    "qwen3moe": {
        **ATTENTION,
        "ffn_norm": ("post_attention_layernorm", (HIDDEN,)),
        "ffn_gate_inp": ("mlp.gate", (EXPERTS, HIDDEN)),
        "ffn_gate_exps": ("mlp.experts.{expert}.gate_proj", (EXPERTS, EXPERT_MLP, HIDDEN)),
        "ffn_up_exps": ("mlp.experts.{expert}.up_proj", (EXPERTS, EXPERT_MLP, HIDDEN)),
        "ffn_down_exps": ("mlp.experts.{expert}.down_proj", (EXPERTS, HIDDEN, EXPERT_MLP)),
    },
}
METADATA: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gemma3": {"attention.sliding_window": 32},
    "qwen3moe": {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": EXPERT_MLP},
}


def write(path: Path, architecture: str, extra: dict[str, np.ndarray] | None = None, **metadata: Any) -> dict[str, np.ndarray]:
    """A file of the family. Returns what Hugging Face's model has, by its names."""
    random, expected, stored = np.random.default_rng(0), {}, {}
    outer = {"token_embd": ("model.embed_tokens", (VOCAB, HIDDEN)), "output_norm": ("model.norm", (HIDDEN,))}
    names = {f"{theirs}.weight": (f"{ours}.weight", shape) for theirs, (ours, shape) in outer.items()}
    for layer in range(LAYERS):
        for theirs, (ours, shape) in LAYERS_OF[architecture].items():
            names[f"blk.{layer}.{theirs}.weight"] = (f"model.layers.{layer}.{ours}.weight", shape)
    for theirs, (ours, shape) in names.items():
        # Norms as bfloat16 has them, so that 1 can be added and taken off again without a trace.
        values = random.integers(-128, 128, shape).astype(np.float32) / 128
        stored[theirs] = values + 1 if architecture == "gemma3" and "norm" in theirs else values
        if "{expert}" in ours:
            expected |= {ours.replace("{expert}", str(expert)): values[expert] for expert in range(shape[0])}
        else:
            expected[ours] = values
    values = gguf_writing.base(**{**METADATA[architecture], **{key.replace("__", "."): value for key, value in metadata.items()}})
    gguf_writing.write(path, architecture, values, {**stored, **(extra or {})})
    return expected


@pytest.mark.parametrize("architecture", LAYERS_OF)
def test_every_tensor_has_hugging_faces_name_and_values(tmp_path: Path, architecture: str) -> None:
    expected = write(tmp_path / "tiny.gguf", architecture)
    source = GGUFSource(tmp_path / "tiny.gguf")
    assert set(source.names()) == set(expected)
    for name, values in expected.items():
        assert source.shape(name) == values.shape
        np.testing.assert_array_equal(source.read(name), values, err_msg=name)
        np.testing.assert_array_equal(source.read(name, tuple(slice(1, 3) for _ in values.shape)), values[(slice(1, 3),) * values.ndim])
        part = source.read(name, None, "weight")
        added = 1 if architecture == "gemma3" and "norm" in name else 0
        np.testing.assert_array_equal(part, values + added, err_msg=name)


COMMON = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "intermediate_size": MLP,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "rope_scaling": None,
}
CONFIGS = {
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu"},
    "qwen3moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": EXPERT_MLP,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 32,
        "layer_types": ["sliding_attention"] * 2,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": HEAD,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
}


@pytest.mark.parametrize("architecture", LAYERS_OF)
def test_the_configuration_is_hugging_faces(tmp_path: Path, architecture: str) -> None:
    write(tmp_path / "tiny.gguf", architecture)
    config = GGUFSource(tmp_path / "tiny.gguf").config
    wanted = {**COMMON, **CONFIGS[architecture]}
    assert {key: config.get(key, "none") for key in wanted} == wanted
    assert ("hidden_act" in config) == (architecture != "gemma3")


def config_of(tmp_path: Path, architecture: str, **metadata: Any) -> dict[str, Any]:
    write(tmp_path / "tiny.gguf", architecture, **metadata)
    return GGUFSource(tmp_path / "tiny.gguf").config


def test_gemmas_layers_slide_but_for_every_sixth(tmp_path: Path) -> None:
    types = config_of(tmp_path, "gemma3", block_count=13)["layer_types"]
    assert [layer for layer, type_ in enumerate(types) if type_ == "full_attention"] == [5, 11]
    assert (len(types), set(types)) == (13, {"full_attention", "sliding_attention"})
    types = config_of(tmp_path, "gemma3", attention__sliding_window_pattern=2)["layer_types"]
    assert types == ["sliding_attention", "full_attention"]
    types = config_of(tmp_path, "gemma3", attention__sliding_window_pattern=[False, True])["layer_types"]
    assert types == ["full_attention", "sliding_attention"]


@pytest.mark.parametrize("window", [None, 0])
def test_gemma_without_a_window_attends_to_all(tmp_path: Path, window: int | None) -> None:
    config = config_of(tmp_path, "gemma3", attention__sliding_window=window)
    assert (config["sliding_window"], config["layer_types"]) == (None, ["full_attention"] * 2)


def test_gemmas_further_settings(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        "gemma3",
        rope__freq_base_swa=5000.0,
        rope__scaling__type="linear",
        rope__scaling__factor=8.0,
        final_logit_softcapping=30.0,
        attn_logit_softcapping=50.0,
    )
    assert config["rope_local_base_freq"] == 5000.0
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert (config["final_logit_softcapping"], config["attn_logit_softcapping"]) == (30.0, 50.0)
    # The largest model's queries are scaled by its hidden size over its heads, which only its number of layers tells.
    heads = {"attention__head_count": 2, "attention__head_count_kv": 1, "attention__key_length": 32, "attention__value_length": 32}
    assert config_of(tmp_path, "gemma3", block_count=62, embedding_length=128, **heads)["query_pre_attn_scalar"] == 128 // 2
    assert config_of(tmp_path, "gemma3", block_count=61, embedding_length=128, **heads)["query_pre_attn_scalar"] == 32


def test_qwens_yarn_is_given_back(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 32768, "yarn_beta_fast": 32.0}
    config = config_of(tmp_path, "qwen3", **{f"rope__scaling__{key}": value for key, value in scaling.items()})
    wanted = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "beta_fast": 32.0}
    assert config["rope_scaling"] == wanted


def test_an_experts_rows_are_read_alone_from_the_stack(tmp_path: Path) -> None:
    expected = write(tmp_path / "tiny.gguf", "qwen3moe")
    source = GGUFSource(tmp_path / "tiny.gguf")
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    np.testing.assert_array_equal(source.read(name, (slice(3, 8), slice(0, 16))), expected[name][3:8, :16])
    assert source.bytes_read == 5 * 16 * 4
    assert source.stored(name).num_bytes == HIDDEN * EXPERT_MLP * 4


def test_quantised_experts_load_into_one_parameter_each_device_its_own(tmp_path: Path) -> None:
    rows, values = gguf_writing.random_rows(Type.Q8_0, EXPERTS * EXPERT_MLP, HIDDEN)
    stacked = rows.reshape(EXPERTS, EXPERT_MLP, -1)
    tensors = {
        "token_embd.weight": np.ones((VOCAB, HIDDEN), np.float32),
        "blk.0.attn_q.weight": np.ones((HEADS * HEAD, HIDDEN), np.float32),
        "blk.0.attn_k.weight": np.ones((KV_HEADS * HEAD, HIDDEN), np.float32),
    }
    raw = {"blk.0.ffn_gate_exps.weight": (Type.Q8_0, stacked), "blk.0.ffn_up_exps.weight": (Type.Q8_0, stacked[::-1].copy())}
    gguf_writing.write(tmp_path / "tiny.gguf", "qwen3moe", gguf_writing.base(**METADATA["qwen3moe"]), tensors, raw)
    source = GGUFSource(tmp_path / "tiny.gguf")
    each = "model.layers.{layer}.mlp.experts.{expert}."
    weights = WeightMap(
        {"blocks.{layer}.gate_up": Weight((each + "gate_proj.weight", each + "up_proj.weight"), transpose=True, axis=-2)},
        ignored=("model.embed_tokens.*", "*.self_attn.*"),
    )
    on = NamedSharding(Mesh(np.array(jax.devices())[:2], ("x",)), P("x"))
    target = jax.ShapeDtypeStruct((EXPERTS, HIDDEN, 2, EXPERT_MLP), jnp.float32, sharding=on)
    loaded = load(source, {"blocks.0.gate_up": target}, weights)["blocks.0.gate_up"]
    gate = values.reshape(EXPERTS, EXPERT_MLP, HIDDEN)
    np.testing.assert_array_equal(loaded, np.stack([gate, gate[::-1]], 1).transpose(0, 3, 1, 2))
    assert source.bytes_read == 2 * stacked.nbytes


def test_what_it_has_no_name_for_keeps_the_files(tmp_path: Path) -> None:
    extra = {"blk.0.ffn_gate_up_exps.weight": np.ones((2, 3, 64), np.float32), "blk.1.post_ffw_norm.weight": np.ones(64, np.float32)}
    write(tmp_path / "tiny.gguf", "qwen3", extra)
    assert set(extra) <= set(GGUFSource(tmp_path / "tiny.gguf").names())


@pytest.mark.parametrize(
    ("architecture", "metadata", "message"),
    [
        ("qwen3moe", {"expert_used_count": None}, "'qwen3moe.expert_used_count' is missing"),
        ("gemma3", {"attention__sliding_window": -1.0}, "'gemma3.attention.sliding_window' is -1.0: it must be a positive integer"),
        ("gemma3", {"final_logit_softcapping": "x"}, "'gemma3.final_logit_softcapping' is 'x': it must be a positive number"),
        ("qwen3", {"attention__key_length": 32}, "head sizes of keys, values and RoPE differ"),
    ],
)
def test_metadata_that_can_not_be_served_is_refused_by_key(
    tmp_path: Path, architecture: str, metadata: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        config_of(tmp_path, architecture, **metadata)
