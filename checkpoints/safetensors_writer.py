"""Writes tensors to a folder of safetensors, in shards with an index. Streamed: the library's own writer needs a whole
file in memory.

Layout: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from checkpoints.converted_tensors import ConvertedTensor
from checkpoints.source import CheckpointError

_TYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def write_safetensors(folder: Path, tensors: Sequence[ConvertedTensor], shard_size: int, advance: Callable[[int], None]) -> int:
    """Writes model.safetensors, or shards of at most `shard_size` bytes (a larger tensor has one to itself) with their
    index; returns their number. `advance` is called with the bytes written. Raises `CheckpointError` and `OSError`."""
    shards = _shards(tensors, shard_size)
    placed: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_file(folder / name, shard, advance)
        placed |= {tensor.name: name for tensor in shard}
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(tensor.num_bytes for tensor in tensors)}, "weight_map": placed}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return len(shards)


def _shards(tensors: Sequence[ConvertedTensor], shard_size: int) -> list[list[ConvertedTensor]]:
    shards: list[list[ConvertedTensor]] = [[]]
    room = shard_size
    for tensor in tensors:
        if tensor.num_bytes > room and shards[-1]:
            shards.append([])
            room = shard_size
        shards[-1].append(tensor)
        room -= tensor.num_bytes
    return shards


def _write_file(file: Path, tensors: Sequence[ConvertedTensor], advance: Callable[[int], None]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers expects it
    tensors, at = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize), 0  # so that each is aligned to its type
    for tensor in tensors:
        header[tensor.name] = {"dtype": _type(tensor), "shape": tensor.shape, "data_offsets": [at, at + tensor.num_bytes]}
        at += tensor.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            for piece in tensor.pieces():
                out.write(piece.reshape(-1).view(np.uint8).data)
                advance(piece.nbytes)


def _type(tensor: ConvertedTensor) -> str:
    if tensor.dtype.name not in _TYPES:
        raise CheckpointError(f"tensor {tensor.name!r} has type {tensor.dtype}, which safetensors doesn't have: give --dtype")
    return _TYPES[tensor.dtype.name]
