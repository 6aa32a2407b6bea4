"""ArraySource: arrays in memory, by Hugging Face's names, as a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.source import PLAIN, ByteCounter, Index, Stored, StoredArray, last_word

_FORMATS = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
assert set(_FORMATS.values()) == set(PLAIN)


class ArraySource:
    """See `TensorSource`. `tensors`: by name, or nested, the words of a name one a level, as in
    {"model": {"norm": {"weight": array}}}; anything that NumPy makes an array of, with matrices as [out, in]. Raises
    `CheckpointError` for a tensor that isn't floating point, or is given twice."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
        self.path, self.config = Path("arrays in memory"), dict(config)
        self._tensors: dict[str, Any] = {}
        self._add("", tensors)
        self._formats = {name: _format(name, tensor) for name, tensor in self._tensors.items()}
        self._bytes = ByteCounter()

    @property
    def bytes_read(self) -> int:
        return self._bytes.total

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._find(name).shape)

    def stored(self, name: str) -> Stored:
        tensor = self._find(name)
        return Stored(self._formats[name], {last_word(name): StoredArray(tuple(tensor.shape), np.dtype(tensor.dtype))})

    def read(self, name: str, index: Index | None = None, part: str | None = None) -> np.ndarray:
        tensor = self._find(name)
        if part not in (None, last_word(name)):
            raise CheckpointError(f"tensor {name!r} has no part {part!r}: it is one array")
        values = np.array(tensor if index is None else tensor[index])  # its own: the caller's may change
        self._bytes.add(values.nbytes)
        return values

    def _add(self, prefix: str, tensors: Mapping[str, Any]) -> None:
        for key, value in tensors.items():
            name = f"{prefix}{key}"
            if isinstance(value, Mapping):
                self._add(f"{name}.", value)
                continue
            if name in self._tensors:
                raise CheckpointError(f"tensor {name!r} is given twice")
            self._tensors[name] = value if hasattr(value, "dtype") and hasattr(value, "shape") else np.asarray(value)

    def _find(self, name: str) -> Any:
        if name not in self._tensors:
            raise CheckpointError(f"tensor {name!r} is missing")
        return self._tensors[name]


def _format(name: str, tensor: Any) -> str:
    found = _FORMATS.get(str(tensor.dtype))
    if found is None:
        raise CheckpointError(f"tensor {name!r} has type {tensor.dtype}: {', '.join(_FORMATS)} are supported")
    return found
