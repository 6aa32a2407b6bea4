"""Writes tensors to an Orbax checkpoint whose arrays can be read by slices: zarr 3, a folder a tensor under Hugging
Face's name.

Each array's files are divided into chunks along every dimension, so that a device's rows, columns or experts can be
read separately, and each chunk has a checksum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import tensorstore as ts

from checkpoints.converted_tensors import ConvertedTensor

_CHUNK_BYTES = 2**20  # at most
_SMALL_CHUNK_BYTES = 2**15  # not divided further, even if there are fewer pieces than devices may need
_NUM_PIECES = 16  # along each dimension, where chunks don't become small
_FILE_BYTES = 2**28  # at most, unless a row of chunks is larger: it is written at once


def write_orbax(folder: Path, tensors: Sequence[ConvertedTensor], advance: Callable[[int], None]) -> None:
    """Saves {name: array} in a new `folder`, for Orbax's own API or `OrbaxSource` to read. `advance` is called with the
    bytes written. Raises `CheckpointError` and `OSError`."""
    registry = ocp.type_handlers.create_type_handler_registry((ConvertedTensor, _Writer(advance)))
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True, type_handler_registry=registry)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave({tensor.name: tensor for tensor in tensors}))


class _Writer(ocp.type_handlers.NumpyHandler):
    """Accepts tensors that are not in memory yet; Orbax restores them as NumPy arrays."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        super().__init__()
        self._advance = advance

    async def serialize(self, values: Sequence[Any], infos: Sequence[ocp.type_handlers.ParamInfo], args: Any = None) -> list[Any]:
        for tensor, info in zip(values, infos, strict=True):
            await info.await_path_creation()
            files = file_shape(tensor.shape, tensor.dtype.itemsize)
            array = await ts.open(_spec(tensor, info.path.as_posix(), files), create=True, context=info.ts_context)
            step = files[0] if files else 1
            for start in range(0, tensor.num_rows, step):
                stop = min(start + step, tensor.num_rows)
                rows = tensor.rows(start, stop)
                await (array[start:stop] if tensor.shape else array).write(rows)
                self._advance(rows.nbytes)
        return []


def _spec(tensor: ConvertedTensor, path: str, files: tuple[int, ...]) -> dict[str, Any]:
    to_bytes = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    chunks = {"chunk_shape": chunk_shape(tensor.shape, tensor.dtype.itemsize), "codecs": to_bytes, "index_codecs": to_bytes}
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": path},
        "metadata": {
            "shape": tensor.shape,
            "data_type": tensor.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": files}},
            "codecs": [{"name": "sharding_indexed", "configuration": chunks}],
        },
        "store_data_equal_to_fill_value": True,  # otherwise a chunk of zeros would look like a missing one
    }


def chunk_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The unit of reading: halved along one dimension after another, while it is large or has few pieces."""
    pieces = [1] * len(shape)

    def chunk() -> tuple[int, ...]:
        return tuple(max(-(-size // count), 1) for size, count in zip(shape, pieces, strict=True))

    while True:
        num_bytes = prod(chunk()) * itemsize
        fewest = min((count, i) for i, count in enumerate(pieces) if chunk()[i] > 1) if prod(chunk()) > 1 else None
        if fewest is None or num_bytes <= _SMALL_CHUNK_BYTES or (num_bytes <= _CHUNK_BYTES and fewest[0] >= _NUM_PIECES):
            return chunk()
        pieces[fewest[1]] *= 2


def file_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Whole chunks: as many along the first dimension as fit in a file, and all along the others."""
    chunk = chunk_shape(shape, itemsize)
    whole = tuple(max(-(-size // part), 1) * part for size, part in zip(shape, chunk, strict=True))
    if not whole:
        return whole
    layer_bytes = chunk[0] * prod(whole[1:]) * itemsize
    return (min(whole[0], max(_FILE_BYTES // layer_bytes, 1) * chunk[0]), *whole[1:])
