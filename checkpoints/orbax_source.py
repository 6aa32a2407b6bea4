"""A folder with config.json and an Orbax checkpoint as a TensorSource. Imports no JAX: arrays are read by slices with
TensorStore, Orbax's storage library."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from checkpoints.json_file import read_json
from checkpoints.source import ByteCounter, CheckpointError, Index, Ranges, Stored, StoredArray, bounds, last_word

WEIGHTS = "weights"  # the checkpoint's folder beside config.json
_METADATA = "_METADATA"  # the file that makes a folder an Orbax checkpoint
_ARRAYS = ("np.ndarray", "jax.Array")  # kinds of leaves; others, such as a step's number, are no weights
_FORMATS = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_AGAIN = "save or convert the checkpoint again"


def weights_folder(path: Path) -> Path | None:
    """The folder of a model's Orbax checkpoint: `weights`, or the folder itself. None for one of another format."""
    return next((folder for folder in (path / WEIGHTS, path) if (folder / _METADATA).is_file()), None)


class OrbaxSource:
    """Any tree of arrays that Orbax has saved, from any mesh: {"model": {"norm": {"weight": ...}}} is
    'model.norm.weight', as is {"model.norm.weight": ...}. Reads whole chunks, which `bytes_read` counts. They are the
    saved arrays' own, so devices read no more than their parts where those are whole chunks. All arrays are opened at
    once, so that a missing one is a `CheckpointError` before any is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_json(path / "config.json")
        self._bytes = ByteCounter()
        folder = weights_folder(path)
        if folder is None:
            raise CheckpointError(f"{path}: no Orbax checkpoint (a file {_METADATA}) in it or its folder {WEIGHTS}; {_AGAIN}")
        opened = {name: ts.open(spec) for name, spec in _specs(folder).items()}
        self._arrays: dict[str, ts.TensorStore] = {}
        for name, future in opened.items():
            try:
                self._arrays[name] = future.result()
            except Exception as error:  # the library raises standard exceptions, by what failed
                raise CheckpointError(f"{folder}: tensor {name!r} is missing or damaged ({_short(error)}); {_AGAIN}") from error

    @property
    def bytes_read(self) -> int:
        return self._bytes.total

    def names(self) -> list[str]:
        return list(self._arrays)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._array(name).shape)

    def stored(self, name: str) -> Stored:
        dtype = self._array(name).dtype.numpy_dtype
        return Stored(
            _FORMATS.get(dtype.name, dtype.name.upper().replace("INT", "I")), {last_word(name): StoredArray(self.shape(name), dtype)}
        )

    def read(self, name: str, index: Index | None = None, part: str | None = None) -> np.ndarray:
        array = self._array(name)
        if part not in (None, last_word(name)):
            raise CheckpointError(f"{self.path}: tensor {name!r} is stored as {last_word(name)}: it has no part {part!r}")
        if part is None and array.dtype.name not in _FORMATS:
            raise CheckpointError(f"{self.path}: tensor {name!r} has type {array.dtype.name}: {', '.join(_FORMATS)} are supported")
        ranges = bounds(index, tuple(array.shape))
        try:
            values = np.asarray(array[tuple(slice(*r) for r in ranges)].read().result())
        except Exception as error:
            raise CheckpointError(f"{self.path}: tensor {name!r} can't be read ({_short(error)}); {_AGAIN}") from error
        self._bytes.add(_chunk_bytes(array, ranges))
        return values

    def _array(self, name: str) -> ts.TensorStore:
        try:
            return self._arrays[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: tensor {name!r} is missing; {_AGAIN}") from None


def _specs(folder: Path) -> dict[str, dict[str, Any]]:
    """TensorStore's specification of each array of a checkpoint, by name."""
    metadata = read_json(folder / _METADATA)
    driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
    is_ocdbt = (folder / "manifest.ocdbt").exists()  # all arrays in one key-value store
    specs = {}
    try:
        for leaf in metadata["tree_metadata"].values():
            if leaf["value_metadata"]["value_type"] not in _ARRAYS:
                continue
            name = ".".join(str(part["key"]) for part in leaf["key_metadata"])
            base = {"driver": "file", "path": f"{folder.absolute()}/" + ("" if is_ocdbt else f"{name}/")}
            kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"} if is_ocdbt else base
            # Missing chunks would be read as zeros.
            specs[name] = {"driver": driver, "kvstore": kvstore, "open": True, "fill_missing_data_reads": False}
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / _METADATA}: not the description of an Orbax tree ({error!r}); {_AGAIN}") from error
    if not specs:
        raise CheckpointError(f"{folder}: the Orbax checkpoint holds no array; {_AGAIN}")
    return specs


def _chunk_bytes(array: ts.TensorStore, ranges: Ranges) -> int:
    """Bytes of the chunks that hold these (start, stop) of each dimension, before any compression."""
    chunk = [size or 1 for size in array.chunk_layout.read_chunk.shape or array.shape]
    sizes = [
        min(-(-stop // part) * part, size) - start // part * part if stop > start else 0
        for (start, stop), part, size in zip(ranges, chunk, array.shape, strict=True)
    ]
    return prod(sizes) * array.dtype.numpy_dtype.itemsize


def _short(error: Exception) -> str:
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return text if len(text) <= 200 else text[:200] + "..."
