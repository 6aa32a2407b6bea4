"""Converts a GGUF's metadata to Hugging Face's config.json, for each supported architecture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.source import CheckpointError

_MODELS = {  # by general.architecture: Hugging Face's class and model_type
    "llama": ("LlamaForCausalLM", "llama"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
}
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's frequency scaling, as a table; see `_rope_scaling`
_GEMMA_PATTERN = 6  # the last of this many layers attends to everything; hard-coded in llama.cpp too
_GEMMA_27B = 62  # layers: the one size whose query scale differs from the head size's
_YARN = {
    "original_context_length": "original_max_position_embeddings",
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_AGAIN = "fetch or convert the file again"


class Metadata:
    """A file's metadata by the keys of its architecture. Raises `CheckpointError` for an invalid value."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path, self.values = path, values
        self.architecture = str(values.get("general.architecture"))
        if self.architecture not in _MODELS:
            raise CheckpointError(
                f"{path}: general.architecture is {self.architecture!r}: of GGUF files {', '.join(map(repr, _MODELS))} are supported: "
                "use the model's folder with safetensors"
            )

    def get(self, key: str) -> Any:
        return self.values.get(f"{self.architecture}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or value < 1:
            raise self._error(key, f"is {value!r}: it must be a positive integer; {_AGAIN}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self._error(key, f"is {value!r}: it must be a positive number; {_AGAIN}")
        # Stored as float32: converted back to the decimal it was written from, 1e-05 rather than 9.99999974e-06.
        return float(np.format_float_scientific(np.float32(value), unique=True))

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise self._error(key, f"is missing; {_AGAIN}")
        if isinstance(value, np.ndarray):
            if len(set(value.tolist())) != 1:
                raise self._error(key, "differs from layer to layer: not supported")
            return value[0].item()
        return value

    def _error(self, key: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: metadata key '{self.architecture}.{key}' {what}")


def hugging_face_config(metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], rope_factors: np.ndarray | None) -> dict[str, Any]:
    """The keys of config.json. `shapes`: of the tensors by Hugging Face's names; `rope_factors`: the tensor
    ROPE_FACTORS, if there is one."""
    path, integer = metadata.path, metadata.integer
    hidden_size, num_heads = integer("embedding_length"), integer("attention.head_count")
    head_size = integer("attention.key_length", integer("rope.dimension_count", hidden_size // num_heads))
    if integer("attention.value_length", head_size) != head_size or integer("rope.dimension_count", head_size) != head_size:
        raise CheckpointError(f"{path}: head sizes of keys, values and RoPE differ in its metadata: not supported")
    num_kv_heads = integer("attention.head_count_kv", num_heads)
    for part, heads in (("q", num_heads), ("k", num_kv_heads)):
        (rows, *_) = _shape(metadata, shapes, name := f"model.layers.0.self_attn.{part}_proj.weight")
        if rows != heads * head_size or head_size % 2:
            raise CheckpointError(f"{path}: tensor {name!r} has {rows} rows, but its metadata says {heads} heads of {head_size}: {_AGAIN}")
    is_mixtral = metadata.architecture == "llama" and metadata.get("expert_count") is not None
    class_name, model_type = ("MixtralForCausalLM", "mixtral") if is_mixtral else _MODELS[metadata.architecture]
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_size": hidden_size,
        "num_hidden_layers": integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_size,
        "intermediate_size": integer("feed_forward_length"),
        "vocab_size": _shape(metadata, shapes, "model.embed_tokens.weight")[0],
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": integer("context_length"),
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in shapes,
        "bos_token_id": metadata.values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.values.get("tokenizer.ggml.eos_token_id"),
    }
    if metadata.architecture == "gemma3":
        config |= _gemma3(metadata, config)
    else:
        config |= {"hidden_act": "silu", "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in shapes}
    if metadata.architecture == "qwen3moe":
        config |= _qwen3_moe(metadata)
    return {**config, "rope_scaling": _rope_scaling(metadata, config, rope_factors)}


def _gemma3(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    num_layers, pattern = config["num_hidden_layers"], metadata.get("attention.sliding_window_pattern")
    has_window = str(metadata.get("attention.sliding_window")) not in ("None", "0")
    window = metadata.integer("attention.sliding_window") if has_window else None
    if isinstance(pattern, np.ndarray) and len(pattern) == num_layers:
        slides = [bool(of_layer) for of_layer in pattern]
    else:
        every = metadata.integer("attention.sliding_window_pattern", _GEMMA_PATTERN)
        slides = [window is not None and (layer + 1) % every != 0 for layer in range(num_layers)]
    is_27b = num_layers == _GEMMA_27B  # missing in the metadata: llama.cpp goes by the number of layers
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": window,
        "layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides],
        "rope_theta": metadata.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"],
        **{
            key: metadata.number(key) if metadata.get(key) is not None else None
            for key in ("attn_logit_softcapping", "final_logit_softcapping")
        },
    }


def _qwen3_moe(metadata: Metadata) -> dict[str, Any]:
    norm = metadata.get("expert_weights_norm")
    return {
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "norm_topk_prob": True if norm is None else bool(norm),  # always in llama.cpp
        "decoder_sparse_step": 1,  # every layer has experts
        "mlp_only_layers": [],
    }


def _rope_scaling(metadata: Metadata, config: Mapping[str, Any], factors: np.ndarray | None) -> dict[str, Any] | None:
    kind = str(metadata.get("rope.scaling.type"))
    if kind not in ("None", "none"):
        of_yarn = {ours: metadata.get(f"rope.scaling.{theirs}") for theirs, ours in _YARN.items()} if kind == "yarn" else {}
        settings = {"rope_type": kind, "factor": metadata.number("rope.scaling.factor", 1.0), **of_yarn}
        return {key: value for key, value in settings.items() if value is not None}
    if factors is None:
        return None
    # Llama 3 GGUFs store the divisor of each frequency instead of the scaling's settings. All its models have had the
    # same low and high factors and first context: assume those, and refuse the file if they don't give its table.
    table = factors.astype(np.float64)
    settings = {"rope_type": "llama3", "factor": float(round(table.max(), 3)), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    settings["original_max_position_embeddings"] = first_context = 8192
    wavelength = 2 * math.pi * config["rope_theta"] ** (np.arange(0, config["head_dim"], 2) / config["head_dim"])
    smooth = np.clip((first_context / wavelength - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / settings["factor"] + smooth)
    if table.shape != expected.shape or not np.allclose(table, expected, rtol=1e-3):
        raise CheckpointError(
            f"{metadata.path}: tensor {ROPE_FACTORS!r} is not Llama 3's RoPE scaling: convert the model to safetensors instead"
        )
    return settings


def _shape(metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], name: str) -> tuple[int, ...]:
    if name not in shapes:
        raise CheckpointError(f"{metadata.path}: tensor {name!r} is missing; {_AGAIN}")
    return shapes[name]
