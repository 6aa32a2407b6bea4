"""A GGUF file, or its parts, as a TensorSource: Hugging Face's names, configuration and row order; only the rows that
are read are dequantised."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from checkpoints.gguf_config import ROPE_FACTORS, Metadata, hugging_face_config
from checkpoints.gguf_file import GGUFFile, TensorInfo
from checkpoints.gguf_parts import open_parts
from checkpoints.source import ByteCounter, CheckpointError, Index, Ranges, Stored, StoredArray, bounds, last_word

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_OF = {  # where an architecture has other names for its layers' tensors
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "qwen3moe": {
        "ffn_gate_inp": "mlp.gate",
        **{f"ffn_{part}_exps": f"mlp.experts.{{expert}}.{part}_proj" for part in ("gate", "up", "down")},
    },
}
_INTERLEAVED = "llama"  # the architecture whose query and key rows llama.cpp's converter interleaves, for its own RoPE
_SHIFTED = "gemma3"  # the architecture to whose norms it adds 1, which Gemma's own code adds at run time
_PLAIN = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
_AGAIN = "fetch or convert the file again"


@dataclass(frozen=True, slots=True)
class _GGUFTensor:
    file: GGUFFile
    info: TensorInfo
    expert: int | None = None  # which matrix it is in a stack of all the experts'

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape if self.expert is None else self.info.shape[1:]

    @property
    def blocks(self) -> np.ndarray:
        """Its bytes [..., blocks of a row, bytes of a block], in the memory map."""
        info, (block, block_bytes) = self.info, GGML_QUANT_SIZES[self.info.type]
        stored = self.file.data[info.offset : info.offset + info.num_bytes].reshape(*info.shape[:-1], info.shape[-1] // block, block_bytes)
        return stored if self.expert is None else stored[self.expert]


class GGUFSource:
    """Architectures llama, gemma3, qwen2, qwen3 and qwen3moe, any type that `gguf.quants` can dequantise. `path` may be
    any of a GGUF's parts. `metadata` also holds the tokenizer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = ByteCounter()
        files = open_parts(path)
        self.metadata = files[0].metadata
        metadata = Metadata(path, self.metadata)
        self._architecture = metadata.architecture
        self._tensors: dict[str, _GGUFTensor] = {}
        rope_factors = None
        for file in files:
            _check_types(file)
            for name, info in file.tensors.items():
                if name == ROPE_FACTORS:
                    rope_factors = self._dequantize(_GGUFTensor(file, info), bounds(None, info.shape))
                else:
                    self._tensors |= _named(self._architecture, name, _GGUFTensor(file, info))
        self.config = hugging_face_config(metadata, {name: tensor.shape for name, tensor in self._tensors.items()}, rope_factors)

    @property
    def bytes_read(self) -> int:
        return self._bytes.total

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def stored(self, name: str) -> Stored:
        tensor = self._tensor(name)
        type_ = tensor.info.type
        part = StoredArray(tensor.shape, _PLAIN[type_]) if type_ in _PLAIN else StoredArray(tensor.blocks.shape, np.dtype(np.uint8))
        return Stored(type_.name, {last_word(name): part})

    def read(self, name: str, index: Index | None = None, part: str | None = None) -> np.ndarray:
        tensor = self._tensor(name)
        if part is not None:
            return self._read_part(name, tensor, index, part)
        ranges = bounds(index, tensor.shape)
        if self._architecture == _SHIFTED and name.endswith("norm.weight"):
            return self._dequantize(tensor, ranges).astype(np.float32) - np.float32(1)
        return self._in_order(name, tensor, ranges, partial(self._dequantize, tensor))

    def _in_order(self, name: str, tensor: _GGUFTensor, ranges: Ranges, read: Callable[[Ranges], np.ndarray]) -> np.ndarray:
        """What `read` finds in these ranges, with its rows in Hugging Face's order."""
        heads = self._interleaved_heads(name)
        if not heads:
            return read(ranges)
        # The rows of a head are interleaved in the file: read whole heads, reorder their rows, cut the requested ones.
        (start, stop), size = ranges[0], tensor.shape[0] // heads
        first, last = start // size, -(-stop // size)
        rows = read([(first * size, last * size), *ranges[1:]])
        halves = rows.reshape(last - first, size // 2, 2, *rows.shape[1:]).swapaxes(1, 2)
        return halves.reshape(rows.shape)[start - first * size : stop - first * size]

    def _tensor(self, name: str) -> _GGUFTensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: tensor {name!r} is missing; {_AGAIN}") from None

    def _interleaved_heads(self, name: str) -> int:
        """Heads whose rows are interleaved in this tensor; 0: none."""
        if self._architecture != _INTERLEAVED:
            return 0
        if ".q_proj." in name:
            return int(self.config["num_attention_heads"])
        return int(self.config["num_key_value_heads"]) if ".k_proj." in name else 0

    def _read_part(self, name: str, tensor: _GGUFTensor, index: Index | None, part: str) -> np.ndarray:
        stored = self.stored(name).parts
        if part not in stored:
            raise CheckpointError(f"{self.path}: tensor {name!r} is stored as {', '.join(stored)}: it has no part {part!r}")
        ranges = bounds(index, stored[part].shape)
        if tensor.info.type in _PLAIN:
            return self._in_order(name, tensor, ranges, partial(self._dequantize, tensor))
        return self._in_order(name, tensor, ranges, partial(self._read_blocks, tensor))

    def _read_blocks(self, tensor: _GGUFTensor, ranges: Ranges) -> np.ndarray:
        array = np.array(tensor.blocks[tuple(slice(*r) for r in ranges)])
        self._bytes.add(array.nbytes)
        return array

    def _dequantize(self, tensor: _GGUFTensor, ranges: Ranges) -> np.ndarray:
        type_ = tensor.info.type
        block, _ = GGML_QUANT_SIZES[type_]
        # Along the last dimension whole blocks are read, and cut afterwards.
        start, stop = ranges[-1]
        first = start // block
        part = tensor.blocks[(*(slice(*r) for r in ranges[:-1]), slice(first, -(-stop // block)))]
        self._bytes.add(part.nbytes)
        flat = np.array(part, order="C").reshape(*part.shape[:-2], -1)  # a copy: nothing points into the map
        values = flat.view(_PLAIN[type_]) if type_ in _PLAIN else dequantize(flat, type_)
        return values[..., start - first * block : stop - first * block]


def _named(architecture: str, name: str, tensor: _GGUFTensor) -> Iterator[tuple[str, _GGUFTensor]]:
    """By Hugging Face's name: 'blk.3.attn_q.weight' -> 'model.layers.3.self_attn.q_proj.weight'; a stack of experts by
    each one's. Unknown names are unchanged."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, part, kind = match.groups()
        theirs = _LAYER_OF.get(architecture, {}).get(part) or _LAYER.get(part)
        stem = f"model.layers.{layer}.{theirs}" if theirs else ""
    else:
        outer, _, kind = name.rpartition(".")
        stem = _OUTER.get(outer, "")
    if "{expert}" in stem and len(tensor.info.shape) == 3:
        for expert in range(tensor.info.shape[0]):
            yield f"{stem.replace('{expert}', str(expert))}.{kind}", _GGUFTensor(tensor.file, tensor.info, expert)
    else:
        yield f"{stem}.{kind}" if stem and "{expert}" not in stem else name, tensor


def _check_types(file: GGUFFile) -> None:
    for name, tensor in file.tensors.items():
        if tensor.type in _PLAIN:
            continue
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[tensor.type][1]), np.uint8), tensor.type)
        except NotImplementedError:
            raise CheckpointError(
                f"{file.path}: tensor {name!r} has type {tensor.type.name}, which can't be dequantised: convert the file to F16, Q8_0 or Q4_K"
            ) from None
