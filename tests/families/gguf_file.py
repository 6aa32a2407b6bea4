"""A family's small checkpoint as the GGUF file that llama.cpp's converter would write: its names by the gguf package's own table."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize

from tests import tiny_model

_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(\w+)$")


def write(
    path: Path,
    architecture: gguf.MODEL_ARCH,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    types: Mapping[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """`config` and `tensors` as Hugging Face has them. `types`: of tensors, by a part of their names; others are as given."""
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if config.get("rope_scaling"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(config["rope_scaling"]["rope_type"]))
        writer.add_rope_scaling_factor(config["rope_scaling"]["factor"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("sliding_window_pattern"):
        writer.add_sliding_window_pattern(config["sliding_window_pattern"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config.get("num_experts"):
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    _add_tokenizer(writer)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, values in _stacked(tensors).items():
        stem, _, kind = name.rpartition(".")
        is_shifted = architecture is gguf.MODEL_ARCH.GEMMA3 and stem.endswith("norm")
        type_ = next((of_name for part, of_name in (types or {}).items() if part in name), None)
        if type_ is None or values.ndim != 2:
            writer.add_tensor(f"{names.get_name(stem)}.{kind}", values + 1 if is_shifted else values)
        else:
            writer.add_tensor(f"{names.get_name(stem)}.{kind}", quantize(values, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _stacked(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """With all experts' matrices of a kind in one tensor."""
    found: dict[str, Any] = {}
    for name, values in tensors.items():
        stem, _, kind = name.rpartition(".")
        if match := _EXPERT.match(stem):
            found.setdefault(f"{match[1]}.{match[3]}.{kind}", {})[int(match[2])] = values
        else:
            found[name] = values
    return {name: np.stack([of[i] for i in range(len(of))]) if isinstance(of, dict) else of for name, of in found.items()}


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """tests/tiny_model.py's."""
    backend = tiny_model.tokenizer()
    vocab = backend.get_vocab(with_added_tokens=True)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
    writer.add_token_merges([" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]])
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if i >= tiny_model.END else normal for i in range(len(vocab))])
    writer.add_eos_token_id(tiny_model.END)
