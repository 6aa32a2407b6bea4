"""A GGUF file as a TensorSource: Hugging Face's names, configuration and row order; dequantised by the rows that are read."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from checkpoints.gguf_file import GGUFFile, TensorInfo
from checkpoints.source import ByteCounter, CheckpointError, Index, bounds

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PLAIN = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
_ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's frequency scaling, as a table; see `_rope_scaling`
_AGAIN = "fetch or convert the file again"


class GGUFSource:
    """Architecture llama, any type that `gguf.quants` can dequantise. `metadata` also holds the tokenizer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GGUFFile(path)
        self._bytes = ByteCounter()
        self.metadata = self._file.metadata
        if self.metadata.get("split.count", 1) != 1:
            raise CheckpointError(
                f"{path}: one part of a GGUF in {self.metadata['split.count']} files: merge them (llama-gguf-split --merge)"
            )
        architecture = self.metadata.get("general.architecture")
        if architecture != "llama":
            raise CheckpointError(f"{path}: general.architecture is {architecture!r}: of GGUF files 'llama' is supported")
        self._tensors = {_hugging_face_name(n): t for n, t in self._file.tensors.items() if n != _ROPE_FACTORS}
        for name, tensor in self._tensors.items():
            _check_type(path, name, tensor)
        self.config = self._translate_config()

    @property
    def bytes_read(self) -> int:
        return self._bytes.total

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._info(name).shape

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        info = self._info(name)
        ranges = bounds(index, info.shape)
        heads = self._interleaved_heads(name)
        if not heads:
            return self._dequantize(info, ranges)
        # The rows of a head are interleaved in the file: read whole heads, put their rows in order, cut what was asked for.
        (start, stop), size = ranges[0], info.shape[0] // heads
        first, last = start // size, -(-stop // size)
        rows = self._dequantize(info, [(first * size, last * size), *ranges[1:]])
        halves = rows.reshape(last - first, size // 2, 2, *rows.shape[1:]).swapaxes(1, 2)
        return halves.reshape(rows.shape)[start - first * size : stop - first * size]

    def _info(self, name: str) -> TensorInfo:
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: tensor {name!r} is missing; {_AGAIN}") from None

    def _interleaved_heads(self, name: str) -> int:
        """How many heads' rows llama.cpp's converter has interleaved (for its own RoPE) in this tensor; 0: none."""
        if ".q_proj." in name:
            return int(self.config["num_attention_heads"])
        return int(self.config["num_key_value_heads"]) if ".k_proj." in name else 0

    def _dequantize(self, info: TensorInfo, ranges: list[tuple[int, int]]) -> np.ndarray:
        block, block_bytes = GGML_QUANT_SIZES[info.type]
        stored = self._file.data[info.offset : info.offset + info.num_bytes].reshape(*info.shape[:-1], info.shape[-1] // block, block_bytes)
        # Along the last dimension whole blocks are read, and cut afterwards.
        start, stop = ranges[-1]
        first = start // block
        part = stored[(*(slice(*r) for r in ranges[:-1]), slice(first, -(-stop // block)))]
        self._bytes.add(part.nbytes)
        flat = np.array(part, order="C").reshape(*part.shape[:-2], -1)  # a copy: nothing points into the map
        values = flat.view(_PLAIN[info.type]) if info.type in _PLAIN else dequantize(flat, info.type)
        return values[..., start - first * block : stop - first * block]

    def _translate_config(self) -> dict[str, Any]:
        hidden_size, num_heads = self._integer("embedding_length"), self._integer("attention.head_count")
        head_size = self._integer("attention.key_length", self._integer("rope.dimension_count", hidden_size // num_heads))
        if self._integer("attention.value_length", head_size) != head_size or self._integer("rope.dimension_count", head_size) != head_size:
            raise CheckpointError(f"{self.path}: head sizes of keys, values and RoPE differ in its metadata: not supported")
        num_kv_heads = self._integer("attention.head_count_kv", num_heads)
        is_mixture = "llama.expert_count" in self.metadata
        config: dict[str, Any] = {
            "architectures": ["MixtralForCausalLM" if is_mixture else "LlamaForCausalLM"],
            "model_type": "mixtral" if is_mixture else "llama",
            "hidden_size": hidden_size,
            "num_hidden_layers": self._integer("block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": head_size,
            "intermediate_size": self._integer("feed_forward_length"),
            "vocab_size": self.shape("model.embed_tokens.weight")[0],
            "rope_theta": self._number("rope.freq_base", 10000.0),
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": self._integer("context_length"),
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "hidden_act": "silu",
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self._tensors,
            "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in self._tensors,
            "bos_token_id": self.metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.metadata.get("tokenizer.ggml.eos_token_id"),
        }
        for part, heads in (("q", num_heads), ("k", num_kv_heads)):
            name = f"model.layers.0.self_attn.{part}_proj.weight"
            if (rows := self.shape(name)[0]) != heads * head_size or head_size % 2:
                raise CheckpointError(
                    f"{self.path}: tensor {name!r} has {rows} rows, but its metadata says {heads} heads of {head_size}: {_AGAIN}"
                )
        return {**config, "rope_scaling": self._rope_scaling(config)}

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{self.path}: metadata key 'llama.{key}' is {value!r}: it must be a positive integer; {_AGAIN}")
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise CheckpointError(f"{self.path}: metadata key 'llama.{key}' is {value!r}: it must be a positive number; {_AGAIN}")
        # Stored as float32: back to the decimal it was written from, 1e-05 rather than 9.99999974e-06.
        return float(np.format_float_scientific(np.float32(value), unique=True))

    def _value(self, key: str, default: Any) -> Any:
        value = self.metadata.get(f"llama.{key}", default)
        if value is None:
            raise CheckpointError(f"{self.path}: metadata key 'llama.{key}' is missing; {_AGAIN}")
        if isinstance(value, np.ndarray):
            if len(set(value.tolist())) != 1:
                raise CheckpointError(f"{self.path}: 'llama.{key}' differs from layer to layer: not supported")
            return value[0].item()
        return value

    def _rope_scaling(self, config: dict[str, Any]) -> dict[str, Any] | None:
        kind = self.metadata.get("llama.rope.scaling.type", "none")
        if kind != "none":
            return {"rope_type": kind, "factor": self.metadata.get("llama.rope.scaling.factor", 1.0)}
        if _ROPE_FACTORS not in self._file.tensors:
            return None
        # Llama 3 GGUFs hold what each frequency is divided by instead of the scaling's settings. All its models have had the
        # same low and high factors and first context: take those, and refuse the file if they don't give its table.
        info = self._file.tensors[_ROPE_FACTORS]
        table = self._dequantize(info, bounds(None, info.shape)).astype(np.float64)
        settings = {"rope_type": "llama3", "factor": float(round(table.max(), 3)), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        settings["original_max_position_embeddings"] = first_context = 8192
        wavelength = 2 * math.pi * config["rope_theta"] ** (np.arange(0, config["head_dim"], 2) / config["head_dim"])
        smooth = np.clip((first_context / wavelength - 1.0) / (4.0 - 1.0), 0.0, 1.0)
        expected = 1 / ((1 - smooth) / settings["factor"] + smooth)
        if table.shape != expected.shape or not np.allclose(table, expected, rtol=1e-3):
            raise CheckpointError(
                f"{self.path}: tensor {_ROPE_FACTORS!r} is not Llama 3's RoPE scaling: convert the model to safetensors instead"
            )
        return settings


def _hugging_face_name(name: str) -> str:
    """'blk.3.attn_q.weight' -> 'model.layers.3.self_attn.q_proj.weight'; a name it doesn't know stays as it is."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, part, kind = match.groups()
        return f"model.layers.{layer}.{_LAYER[part]}.{kind}" if part in _LAYER else name
    stem, _, kind = name.rpartition(".")
    return f"{_OUTER[stem]}.{kind}" if stem in _OUTER else name


def _check_type(path: Path, name: str, tensor: TensorInfo) -> None:
    if tensor.type in _PLAIN:
        return
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[tensor.type][1]), np.uint8), tensor.type)
    except NotImplementedError:
        raise CheckpointError(
            f"{path}: tensor {name!r} has type {tensor.type.name}, which can't be dequantised: convert the file to F16, Q8_0 or Q4_K"
        ) from None
