"""Checkpoints of DeepSeek-V3's kind in any size, with the modules that its class leaves out, their experts quantised as published ones are."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from tests import tiny_model
from tests.families.checkpoint import Shapes
from tests.kernels.grouped_experts import compressed_tensors_words

FP8: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
        }
    },
}
_LARGEST = {"fp8": 448.0, "int4": 7.0}
_BLOCK, _GROUP = 128, 32

Tensors = dict[str, np.ndarray]


def shapes_of(config: Mapping[str, Any]) -> Shapes:
    """Of the tensors of a text model, its modules for further tokens included: they have copies of embedding and head."""
    size, vocab, heads = config["hidden_size"], config["vocab_size"], config["num_attention_heads"]
    rank, nope, rope, value = (config[key] for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    num_layers, expert_size = config["num_hidden_layers"], config["moe_intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (vocab, size), "model.norm": (size,), "lm_head": (vocab, size)}
    for number in range(num_layers + config["num_nextn_predict_layers"]):
        layer = f"model.layers.{number}"
        shapes |= {
            f"{layer}.input_layernorm": (size,),
            f"{layer}.post_attention_layernorm": (size,),
            f"{layer}.self_attn.q_a_proj": (config["q_lora_rank"], size),
            f"{layer}.self_attn.q_a_layernorm": (config["q_lora_rank"],),
            f"{layer}.self_attn.q_b_proj": (heads * (nope + rope), config["q_lora_rank"]),
            f"{layer}.self_attn.kv_a_proj_with_mqa": (rank + rope, size),
            f"{layer}.self_attn.kv_a_layernorm": (rank,),
            f"{layer}.self_attn.kv_b_proj": (heads * (nope + value), rank),
            f"{layer}.self_attn.o_proj": (size, heads * value),
        }
        if number < config["first_k_dense_replace"]:
            shapes |= _gated(f"{layer}.mlp", size, config["intermediate_size"])
        else:
            shapes |= {
                f"{layer}.mlp.gate": (config["n_routed_experts"], size),
                f"{layer}.mlp.gate.e_score_correction_bias": (config["n_routed_experts"],),
            }
            shapes |= _gated(f"{layer}.mlp.shared_experts", size, config["n_shared_experts"] * expert_size)
            for expert in range(config["n_routed_experts"]):
                shapes |= _gated(f"{layer}.mlp.experts.{expert}", size, expert_size)
        if number >= num_layers:
            shapes |= {f"{layer}.{norm}": (size,) for norm in ("enorm", "hnorm", "shared_head.norm")}
            shapes |= {f"{layer}.{table}": (vocab, size) for table in ("embed_tokens", "shared_head.head")}
            shapes |= {f"{layer}.eh_proj": (size, 2 * size)}
    return {name if name.endswith("_bias") else f"{name}.weight": shape for name, shape in shapes.items()}


def _gated(mlp: str, size: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {f"{mlp}.gate_proj": (inner, size), f"{mlp}.up_proj": (inner, size), f"{mlp}.down_proj": (size, inner)}


def is_quantised(name: str, kind: str) -> bool:
    """Whether a tensor is in a published checkpoint of this kind: DeepSeek's matrices but for the router, embeddings and heads; Kimi's experts."""
    if kind == "int4":
        return ".experts." in name
    return re.search(r"_proj(_with_mqa)?\.weight$", name) is not None and "eh_proj" not in name


def stored(name: str, values: np.ndarray, kind: str) -> tuple[Tensors, np.ndarray]:
    """A matrix as such a checkpoint has it, and the values that it has there, float32."""
    outputs, inputs = values.shape
    if kind == "int4":
        cut = values.reshape(outputs, inputs // _GROUP, _GROUP)
        scale = (np.abs(cut).max(-1) / _LARGEST[kind]).astype(ml_dtypes.bfloat16)
        integers = np.clip(np.rint(cut / scale.astype(np.float32)[..., None]), -8, 7)
        numbers = (integers * scale.astype(np.float32)[..., None]).astype(ml_dtypes.bfloat16).astype(np.float32)
        words = compressed_tensors_words(integers.astype(np.int64).reshape(values.shape))
        parts = {"packed": words, "scale": scale, "shape": np.array(values.shape, np.int32)}
        return {f"{name}_{part}": array for part, array in parts.items()}, numbers.reshape(values.shape)
    rows, columns = (-(-size // _BLOCK) for size in values.shape)
    padded = np.zeros((rows * _BLOCK, columns * _BLOCK), np.float32)
    padded[:outputs, :inputs] = values
    scale = (np.abs(padded).reshape(rows, _BLOCK, columns, _BLOCK).max((1, 3)) / _LARGEST[kind]).astype(np.float32)
    wide = scale.repeat(_BLOCK, 0).repeat(_BLOCK, 1)[:outputs, :inputs]
    codes = (values / wide).astype(ml_dtypes.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": scale}, codes.astype(np.float32) * wide


def quantised(tensors: Tensors, kind: str) -> tuple[Tensors, Tensors]:
    """A checkpoint's tensors so stored, and what they stand for."""
    there, values = {}, {}
    for name, tensor in tensors.items():
        if is_quantised(name, kind):
            parts, values[name] = stored(name, tensor, kind)
            there |= parts
        else:
            there[name] = values[name] = tensor
    return there, values


def write(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    """A checkpoint's folder, with tests/tiny_model.py's tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_model.write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
