"""A folder with config.json and safetensors (one file, or shards with an index; plain or compressed) as a
TensorSource; reads only the requested slices."""

from __future__ import annotations

from pathlib import Path, PurePath

import numpy as np

from checkpoints.compressed_file import open_file
from checkpoints.int4_tensors import Int4Matrix
from checkpoints.json_file import read_json
from checkpoints.quantisation import declared_quantisation
from checkpoints.safetensors_file import FileTensor
from checkpoints.source import BLOCKS, ByteCounter, CheckpointError, Index, Ranges, Stored, bounds
from checkpoints.stored_tensors import StoredTensor, model_tensors, stored

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_AGAIN = "fetch the checkpoint again"


class SafetensorsSource:
    """Opens and checks every file at once: a missing, truncated or inconsistent one is a `CheckpointError` before any
    tensor is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = ByteCounter()
        self.config = read_json(path / "config.json")
        quantisation = declared_quantisation(self.config, path / "config.json")
        tensors: dict[str, FileTensor] = {}
        placed = self._placed()
        for file_name in sorted(set(placed.values())) or [self._only_file()]:
            for name, tensor in open_file(path / file_name).tensors.items():
                if name in tensors:
                    raise CheckpointError(f"{tensor.file.path}: tensor {name!r} is in {tensors[name].file.path.name} too; {_AGAIN}")
                tensors[name] = tensor
        for name, file_name in placed.items():
            if name not in tensors or tensors[name].file.path.name != file_name:
                raise CheckpointError(f"{path / _INDEX}: tensor {name!r} is not in {file_name}, where it should be; {_AGAIN}")
        self._tensors = model_tensors(tensors, quantisation)

    @property
    def bytes_read(self) -> int:
        return self._bytes.total

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def stored(self, name: str) -> Stored:
        return stored(self._tensor(name))

    def read(self, name: str, index: Index | None = None, part: str | None = None) -> np.ndarray:
        tensor = self._tensor(name)
        if part is None:
            return tensor.values(name, self._read, bounds(index, tensor.shape))
        if part == BLOCKS and isinstance(tensor, Int4Matrix) and tensor.blocks is not None:
            return tensor.block_values(self._read, bounds(index, tensor.blocks[1].shape))
        if part not in tensor.parts:
            raise CheckpointError(f"{self.path}: tensor {name!r} is stored as {', '.join(tensor.parts)}: it has no part {part!r}")
        return self._read(tensor.parts[part], bounds(index, tensor.parts[part].shape))

    def _read(self, tensor: FileTensor, ranges: Ranges) -> np.ndarray:
        array = tensor.read(ranges)
        self._bytes.add(array.nbytes)
        return array

    def _tensor(self, name: str) -> StoredTensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: tensor {name!r} is missing; {_AGAIN}") from None

    def _placed(self) -> dict[str, str]:
        """Each tensor's file according to the index; empty where there is none."""
        index = self.path / _INDEX
        if not index.exists():
            return {}
        placed = read_json(index, is_once=True).get("weight_map")
        if not isinstance(placed, dict) or not placed:
            raise CheckpointError(f"{index}: has no 'weight_map'; {_AGAIN}")
        for name, file_name in placed.items():
            if not isinstance(file_name, str) or not file_name or PurePath(file_name).name != file_name:
                raise CheckpointError(f"{index}: tensor {name!r} is said to be in {file_name!r}, which is no file beside it; {_AGAIN}")
        return placed

    def _only_file(self) -> str:
        files = sorted(file.name for file in self.path.glob("*.safetensors"))
        if not files:
            raise CheckpointError(
                f"{self.path}: no {_SINGLE} and no {_INDEX}: give a folder that holds the weights, or fetch the checkpoint again"
            )
        if len(files) > 1 and _SINGLE not in files:
            raise CheckpointError(f"{self.path}: {len(files)} safetensors files but no {_INDEX}; {_AGAIN}")
        return _SINGLE if _SINGLE in files else files[0]
