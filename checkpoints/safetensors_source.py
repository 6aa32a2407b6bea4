"""A folder with config.json and safetensors (one file, or shards with an index) as a TensorSource; reads only the slices asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from checkpoints.source import ByteCounter, CheckpointError, Index, bounds

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_TYPES = ("F64", "F32", "F16", "BF16")  # stored types that hold weights as they are


class SafetensorsSource:
    """Opens and checks every file at once: a missing, truncated or inconsistent one is a `CheckpointError` before any tensor is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = ByteCounter()
        self.config = read_json(path / "config.json")
        if quantization := self.config.get("quantization_config"):
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            raise CheckpointError(
                f"{path / 'config.json'}: quantization_config.quant_method is {method!r}: give an unquantised checkpoint or a GGUF file"
            )
        self._slices: dict[str, Any] = {}
        index_path = path / _INDEX
        if index_path.exists():
            placed = read_json(index_path).get("weight_map")
            if not isinstance(placed, dict) or not placed:
                raise CheckpointError(f"{index_path}: has no 'weight_map'; fetch the checkpoint again")
            for file_name in sorted(set(placed.values())):
                self._open(path / file_name)
            for name, file_name in placed.items():
                if name not in self._slices:
                    raise CheckpointError(
                        f"{index_path}: tensor {name!r} is not in {file_name}, where it should be; fetch the checkpoint again"
                    )
        else:
            files = sorted(path.glob("*.safetensors"))
            if not files:
                raise CheckpointError(
                    f"{path}: no {_SINGLE} and no {_INDEX}: give a folder that holds the weights, or fetch the checkpoint again"
                )
            if len(files) > 1 and path / _SINGLE not in files:
                raise CheckpointError(f"{path}: {len(files)} safetensors files but no {_INDEX}; fetch the checkpoint again")
            self._open(path / _SINGLE if path / _SINGLE in files else files[0])

    @property
    def bytes_read(self) -> int:
        return self._bytes.total

    def names(self) -> list[str]:
        return list(self._slices)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        part = self._slice(name)
        if part.get_dtype() not in _TYPES:
            raise CheckpointError(f"{self.path}: tensor {name!r} has type {part.get_dtype()}: {', '.join(_TYPES)} are supported")
        array = np.asarray(part[tuple(slice(*r) for r in bounds(index, self.shape(name)))])
        self._bytes.add(array.nbytes)
        return array

    def _slice(self, name: str) -> Any:
        try:
            return self._slices[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: tensor {name!r} is missing; fetch the checkpoint again") from None

    def _open(self, file: Path) -> None:
        try:
            opened = safe_open(file, framework="numpy")
        except FileNotFoundError:
            raise CheckpointError(f"{file}: missing, though the index names it; fetch the checkpoint again") from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: truncated or corrupt safetensors file ({error}); fetch it again") from error
        for name in opened.keys():  # noqa: SIM118 - not a mapping
            if name in self._slices:
                raise CheckpointError(f"{file}: tensor {name!r} is in another file of this checkpoint too; fetch the checkpoint again")
            self._slices[name] = opened.get_slice(name)


def read_json(file: Path) -> dict[str, Any]:
    """The object a JSON file holds; `CheckpointError` names the file where there is none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file}: missing; give a folder with config.json, tokenizer.json and safetensors, or a .gguf file") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: can't be read as JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: holds {type(value).__name__}, not a JSON object; fetch it again")
    return value
