"""Every type of GGUF tensor that is promised: values by the formats' descriptions, and any part of rows and columns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.gguf_source import GGUFSource
from checkpoints.source import CheckpointError, StoredArray
from tests.checkpoints import gguf_writing

ROWS, COLUMNS = 12, 768
NAME = "model.layers.0.mlp.gate_proj.weight"


def _write(path: Path, type_: Type) -> np.ndarray:
    stored, values = gguf_writing.random_rows(type_, ROWS, COLUMNS)
    tensors = {
        "token_embd.weight": np.ones((10, 64), np.float32),
        "blk.0.attn_q.weight": np.ones((64, 64), np.float32),
        "blk.0.attn_k.weight": np.ones((32, 64), np.float32),
    }
    gguf_writing.write(path, "qwen3", gguf_writing.base(), tensors, {"blk.0.ffn_gate.weight": (type_, stored)})
    return values


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[Type, tuple[Path, np.ndarray]]:
    folder = tmp_path_factory.mktemp("types")
    return {type_: (path := folder / f"{type_.name}.gguf", _write(path, type_)) for type_ in gguf_writing.BLOCKS}


@pytest.mark.parametrize("type_", gguf_writing.BLOCKS, ids=lambda type_: type_.name)
def test_a_tensor_reads_as_its_blocks_say(files: dict[Type, tuple[Path, np.ndarray]], type_: Type) -> None:
    path, values = files[type_]
    np.testing.assert_array_equal(GGUFSource(path).read(NAME).astype(np.float32), values)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("type_", gguf_writing.BLOCKS, ids=lambda type_: type_.name)
def test_a_part_of_rows_and_columns_reads_the_blocks_it_touches_alone(
    files: dict[Type, tuple[Path, np.ndarray]], type_: Type, data: st.DataObject
) -> None:
    path, values = files[type_]
    source = GGUFSource(path)
    (top, bottom), (left, right) = (
        (start := data.draw(st.integers(0, size - 1)), data.draw(st.integers(start + 1, size))) for size in (ROWS, COLUMNS)
    )
    read = source.read(NAME, (slice(top, bottom), slice(left, right)))
    np.testing.assert_array_equal(read.astype(np.float32), values[top:bottom, left:right])
    size, num_bytes, *_ = gguf_writing.BLOCKS[type_]
    assert source.bytes_read == (bottom - top) * len({column // size for column in range(left, right)}) * num_bytes


@pytest.mark.parametrize("type_", gguf_writing.BLOCKS, ids=lambda type_: type_.name)
def test_the_blocks_themselves_can_be_read(files: dict[Type, tuple[Path, np.ndarray]], type_: Type) -> None:
    source = GGUFSource(files[type_][0])
    stored, (size, num_bytes, *_) = source.stored(NAME), gguf_writing.BLOCKS[type_]
    assert (stored.format, stored.num_bytes) == (type_.name, ROWS * COLUMNS // size * num_bytes)
    blocks = gguf_writing.random_rows(type_, ROWS, COLUMNS)[0].reshape(ROWS, COLUMNS // size, num_bytes)
    if size > 1:
        assert stored.parts == {"weight": StoredArray((ROWS, COLUMNS // size, num_bytes), np.dtype(np.uint8))}
        read = source.read(NAME, (slice(3, 5), slice(1, 2), slice(0, num_bytes)), "weight")
        np.testing.assert_array_equal(read, blocks[3:5, 1:2])
        assert source.bytes_read == 2 * num_bytes
    else:
        assert stored.parts["weight"].shape == (ROWS, COLUMNS)
    assert source.read(NAME, None, "weight").tobytes() == blocks.tobytes()
    with pytest.raises(CheckpointError, match=f"'{NAME}' is stored as weight: it has no part 'scale'"):
        source.read(NAME, None, "scale")
