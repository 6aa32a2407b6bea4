"""Orbax checkpoints: whatever Orbax has saved is read, by slices; each device reads its own bytes; what is damaged is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from checkpoints.converted_tensors import ConvertedTensor
from checkpoints.hub import open_source
from checkpoints.loader import load
from checkpoints.orbax_source import OrbaxSource
from checkpoints.orbax_writer import chunk_shape, file_shape, write_orbax
from checkpoints.safetensors_source import SafetensorsSource
from checkpoints.source import CheckpointError
from checkpoints.weight_map import Weight, WeightMap
from tests.checkpoints import tiny

ROWS, COLUMNS = 1024, 1024
ARRAYS: dict[str, np.ndarray] = {
    **tiny.tensors(),
    "wide": np.random.default_rng(1).standard_normal((ROWS, COLUMNS)).astype(np.float32),
    "half": np.random.default_rng(2).standard_normal((ROWS, COLUMNS)).astype(np.float16),
    "experts": np.random.default_rng(3).standard_normal((4, 512, 1024)).astype(ml_dtypes.bfloat16),
    "zeros": np.zeros((300, 200), np.float32),
    "one": np.array(2.5, np.float32),
}


def write(folder: Path, arrays: dict[str, np.ndarray]) -> Path:
    """A folder of Orbax, by way of one of safetensors."""
    tiny.write_safetensors(folder / "from", arrays)
    source = SafetensorsSource(folder / "from")
    (folder / "config.json").write_text(json.dumps(tiny.CONFIG))
    write_orbax(folder / "weights", [ConvertedTensor(name, a.shape, a.dtype, source) for name, a in arrays.items()], lambda num_bytes: None)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("orbax"), ARRAYS)


def disk_bytes() -> int:
    """That TensorStore has read from files so far."""
    return sum(m["values"][0]["value"] for m in ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read"))


def test_every_tensor_reads_back_bit_for_bit(folder: Path) -> None:
    source = open_source(folder)
    assert isinstance(source, OrbaxSource)
    assert set(source.names()) == set(ARRAYS)
    assert source.config == tiny.CONFIG
    for name, values in ARRAYS.items():
        read = source.read(name)
        assert (source.shape(name), read.dtype) == (values.shape, values.dtype)
        assert read.tobytes() == values.tobytes(), name
    assert source.stored("half").format == "F16"
    assert source.stored("experts").parts["experts"].num_bytes == ARRAYS["experts"].nbytes


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_slice_is_that_part_of_the_whole_and_the_chunks_that_hold_it_are_read(folder: Path, data: st.DataObject) -> None:
    source = OrbaxSource(folder)
    name = data.draw(st.sampled_from(sorted(ARRAYS)))
    shape, dtype = ARRAYS[name].shape, ARRAYS[name].dtype
    index, sizes = [], []
    for size, part in zip(shape, chunk_shape(shape, dtype.itemsize), strict=True):
        start = data.draw(st.integers(0, size - 1))
        stop = data.draw(st.integers(start + 1, size))
        index.append(slice(start, stop))
        sizes.append(min(-(-stop // part) * part, size) - start // part * part)
    np.testing.assert_array_equal(source.read(name, tuple(index)), ARRAYS[name][tuple(index)])
    assert source.bytes_read == np.prod(sizes, dtype=int) * dtype.itemsize


WEIGHTS = WeightMap(
    {"rows": Weight(("wide",)), "columns": Weight(("half",), transpose=True), "experts": Weight(("experts",))}, ignored=("*",)
)
SPLIT = {"rows": P("tensor"), "columns": P("tensor"), "experts": P("experts", "tensor")}


@pytest.mark.parametrize(("num_experts", "num_tensor"), [(1, 8), (2, 4), (4, 2), (1, 1)])
def test_devices_that_share_tensors_out_read_them_once_between_them(
    folder: Path, num_experts: int, num_tensor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = Mesh(np.array(jax.devices())[: num_experts * num_tensor].reshape(num_experts, num_tensor), ("experts", "tensor"))
    arrays = {"rows": ARRAYS["wide"], "columns": ARRAYS["half"].T, "experts": ARRAYS["experts"]}
    targets = {
        path: jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=NamedSharding(mesh, SPLIT[path])) for path, values in arrays.items()
    }
    source, sizes = OrbaxSource(folder), []
    read = source.read
    monkeypatch.setattr(source, "read", lambda *asked: (values := read(*asked), sizes.append((asked[0], values.nbytes)))[0])
    before = disk_bytes()
    loaded = load(source, targets, WEIGHTS)
    for path, values in arrays.items():
        np.testing.assert_array_equal(np.asarray(loaded[path]).astype(np.float32), values.astype(np.float32), err_msg=path)
    assert sorted(size for name, size in sizes if name == "wide") == [ARRAYS["wide"].nbytes // num_tensor] * num_tensor
    num_bytes = sum(values.nbytes for values in arrays.values())
    assert source.bytes_read == num_bytes
    assert num_bytes <= disk_bytes() - before < 1.01 * num_bytes  # beside them, an index and checksums of the chunks


def test_orbax_itself_restores_it_into_the_shards_of_any_mesh_each_reading_its_part(folder: Path) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    specs = {"wide": P("a", "b"), "half": P(None, "b")}
    targets = {
        name: jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=NamedSharding(mesh, specs.get(name, P())))
        for name, values in ARRAYS.items()
    }
    before = disk_bytes()
    restored = ocp.StandardCheckpointer().restore((folder / "weights").absolute(), targets)
    for name, values in ARRAYS.items():
        assert restored[name].sharding == targets[name].sharding
        assert np.asarray(restored[name]).tobytes() == values.tobytes(), name
    assert disk_bytes() - before < 1.01 * sum(values.nbytes for values in ARRAYS.values())  # though the mesh has eight devices


@pytest.mark.parametrize("is_nested", [True, False])
@pytest.mark.parametrize(("use_ocdbt", "use_zarr3"), [(True, False), (True, True), (False, False), (False, True)])
def test_what_others_save_with_orbax_is_read_from_the_mesh_that_they_had(
    tmp_path: Path, use_ocdbt: bool, use_zarr3: bool, is_nested: bool
) -> None:
    four = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("x",)), P("x"))
    arrays = {
        "model.layers.0.kernel": np.arange(96, dtype=np.float32).reshape(8, 12),
        "model.scale": np.arange(5, dtype=np.float16),
        "head": np.arange(16, dtype=np.float32).astype(ml_dtypes.bfloat16),
    }
    tree: dict[str, Any] = {"step": 3}
    for name, values in arrays.items():
        *folders, last = name.split(".") if is_nested else [name]
        place = tree
        for part in folders:
            place = place.setdefault(part, {})
        place[last] = values if name == "model.scale" else jax.device_put(values, four)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt, use_zarr3=use_zarr3)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "model", args=ocp.args.PyTreeSave(tree))
    (tmp_path / "model" / "config.json").write_text("{}")  # beside what Orbax wrote: a folder `weights` is not needed
    source = open_source(tmp_path / "model")
    assert isinstance(source, OrbaxSource)
    assert set(source.names()) == set(arrays)
    for name, values in arrays.items():
        assert source.read(name).tobytes() == values.tobytes()
    np.testing.assert_array_equal(
        source.read("model.layers.0.kernel", (slice(3, 7), slice(2, 5))), arrays["model.layers.0.kernel"][3:7, 2:5]
    )
    eight = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
    weights = WeightMap({"k": Weight(("model.layers.0.kernel",))}, ignored=("*",))
    loaded = load(source, {"k": jax.ShapeDtypeStruct((8, 12), jnp.float32, sharding=eight)}, weights)
    assert loaded["k"].addressable_shards[0].data.shape == (1, 12)
    np.testing.assert_array_equal(loaded["k"], arrays["model.layers.0.kernel"])


@pytest.mark.parametrize(
    ("shape", "itemsize", "chunk", "files"),
    [
        ((14336, 4096), 2, (896, 256), (14336, 4096)),
        ((1024, 4096), 2, (64, 256), (1024, 4096)),  # keys of 8 heads: 16 pieces of each axis
        ((16, 5120, 16384), 2, (1, 320, 1024), (1, 5120, 16384)),  # an expert a file
        ((128256, 4096), 2, (4008, 128), (32064, 4096)),
        ((576,), 4, (576,), (576,)),
        ((), 4, (), ()),
        ((0, 3), 4, (1, 3), (1, 3)),
    ],
)
def test_chunks_are_of_every_axis_and_files_of_a_bounded_size(
    shape: tuple[int, ...], itemsize: int, chunk: tuple[int, ...], files: tuple[int, ...]
) -> None:
    assert chunk_shape(shape, itemsize) == chunk
    assert file_shape(shape, itemsize) == files


def test_tensors_of_several_files_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkpoints.orbax_writer._FILE_BYTES", 100_000)
    source = OrbaxSource(write(tmp_path, {"wide": np.ascontiguousarray(ARRAYS["wide"][:500, :300]), "experts": ARRAYS["experts"]}))
    assert len([file for file in (tmp_path / "weights/wide/c").rglob("*") if file.is_file()]) > 3
    np.testing.assert_array_equal(source.read("wide"), ARRAYS["wide"][:500, :300])
    np.testing.assert_array_equal(source.read("wide", (slice(200, 333), slice(7, 9))), ARRAYS["wide"][200:333, 7:9])
    np.testing.assert_array_equal(source.read("experts"), ARRAYS["experts"])


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[1000] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.unlink(), r"tensor 'wide' can't be read"),
        (_flip, r"tensor 'wide' can't be read"),
        (lambda file: file.write_bytes(file.read_bytes()[:5000]), r"tensor 'wide' can't be read"),
    ],
)
def test_a_tensor_whose_values_are_missing_or_damaged_is_named(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    write(tmp_path, {"wide": ARRAYS["wide"], "one": ARRAYS["one"]})
    (file,) = (file for file in (tmp_path / "weights/wide/c").rglob("*") if file.is_file())
    damage(file)
    source = OrbaxSource(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        source.read("wide")
    assert source.read("one") == 2.5


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda f: (f / "weights/wide/zarr.json").unlink(),
            r"tensor 'wide' is missing or damaged \(.*save or convert the checkpoint again",
        ),
        (lambda f: (f / "weights/wide/zarr.json").write_text("{}"), r"tensor 'wide' is missing or damaged"),
        (lambda f: (f / "weights/_METADATA").write_text("{"), r"_METADATA: can't be read as JSON"),
        (lambda f: (f / "weights/_METADATA").write_text("{}"), r"_METADATA: not the description of an Orbax tree"),
        (lambda f: (f / "weights/_METADATA").write_text('{"tree_metadata": {}}'), r"the Orbax checkpoint holds no array"),
        (lambda f: (f / "config.json").unlink(), r"config\.json: missing"),
    ],
)
def test_a_broken_folder_is_refused_before_anything_is_read(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    write(tmp_path, {"wide": ARRAYS["wide"]})
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        OrbaxSource(tmp_path)


def test_what_is_not_there_is_an_error_with_its_name(folder: Path) -> None:
    source = OrbaxSource(folder)
    with pytest.raises(CheckpointError, match=r"tensor 'model\.nothing' is missing"):
        source.read("model.nothing")
    with pytest.raises(CheckpointError, match=r"tensor 'wide' is stored as wide: it has no part 'weight_packed'"):
        source.read("wide", None, "weight_packed")
    with pytest.raises(CheckpointError, match=r"no Orbax checkpoint"):
        (folder / "empty").mkdir()
        (folder / "empty" / "config.json").write_text("{}")
        OrbaxSource(folder / "empty")
