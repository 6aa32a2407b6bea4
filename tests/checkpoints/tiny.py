"""Tiny Llama checkpoints written to files, with the values they should read back as."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize, quantize
from safetensors.numpy import save_file

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD, MLP, VOCAB = 64, 2, 4, 2, 16, 96, 40
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "intermediate_size": MLP,
    "vocab_size": VOCAB,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tensors() -> dict[str, np.ndarray]:
    """Random float32 tensors of CONFIG, by Hugging Face's names."""
    random = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        of_layer = {
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
            "mlp.gate_proj": (MLP, HIDDEN),
            "mlp.up_proj": (MLP, HIDDEN),
            "mlp.down_proj": (HIDDEN, MLP),
        }
        shapes |= {f"model.layers.{layer}.{part}.weight": shape for part, shape in of_layer.items()}
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    type_: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q8_0,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Matrices stored as `type_`. Returns what reading must give. `metadata` None values take a key away."""
    values: dict[str, Any] = {
        "llama.block_count": LAYERS,
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": MLP,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": HEAD,
        **VOCABULARY,
        **(metadata or {}),
    }
    writer = gguf.GGUFWriter(path, values.pop("general.architecture", "llama"))
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    expected = {}
    for name, array in tensors().items():
        stored, rows = array, array
        if "q_proj" in name or "k_proj" in name:
            # As llama.cpp's converter does: the two halves of a head's rows, interleaved.
            heads = HEADS if "q_proj" in name else KV_HEADS
            rows = array.reshape(heads, 2, HEAD // 2, HIDDEN).swapaxes(1, 2).reshape(array.shape)
        if array.ndim == 2:
            stored = quantize(rows, type_)
            writer.add_tensor(_gguf_name(name), stored, raw_dtype=type_)
            back = dequantize(stored, type_).astype(np.float32)
            if "q_proj" in name or "k_proj" in name:
                back = back.reshape(heads, HEAD // 2, 2, HIDDEN).swapaxes(1, 2).reshape(array.shape)
            expected[name] = back
        else:
            writer.add_tensor(_gguf_name(name), array)
            expected[name] = array
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def write_safetensors(folder: Path, arrays: dict[str, np.ndarray], num_files: int = 1, config: dict[str, Any] | None = None) -> None:
    """A folder with config.json and the arrays in one file, or in several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    if num_files == 1:
        save_file(arrays, folder / "model.safetensors")
        return
    placed = {name: f"model-{i % num_files + 1:05}-of-{num_files:05}.safetensors" for i, name in enumerate(arrays)}
    for file in set(placed.values()):
        save_file({name: array for name, array in arrays.items() if placed[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))


def _gguf_name(name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, *part, kind = name.split(".")
    return f"blk.{layer}.{GGUF_PARTS['.'.join(part)]}.{kind}"


_LETTERS = [chr(c) for c in range(ord("a"), ord("z") + 1)]
_TOKENS = ["<|end|>", "<|start|>", *_LETTERS, "Ġ", "th", "the", "Ġthe", "an", "and", "1", "2", "é", "Ċ"]
VOCABULARY: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": _TOKENS + [f"<unused{i}>" for i in range(VOCAB - len(_TOKENS))],
    "tokenizer.ggml.token_type": [3, 3] + [1] * (VOCAB - 2),
    "tokenizer.ggml.merges": ["t h", "th e", "Ġ the", "a n", "an d"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 0,
}
