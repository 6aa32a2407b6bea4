"""safetensors folders: one file or shards, only the slices asked for; and every broken one refused with its name and a way out."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from checkpoints.safetensors_source import SafetensorsSource
from checkpoints.source import CheckpointError
from tests.checkpoints import tiny

ARRAYS = tiny.tensors()
NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    tiny.write_safetensors(folder, ARRAYS, num_files=3)
    return folder


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_every_tensor_reads_back(tmp_path: Path, num_files: int, dtype: type) -> None:
    arrays = {name: array.astype(dtype) for name, array in ARRAYS.items()}
    tiny.write_safetensors(tmp_path, arrays, num_files)
    source = SafetensorsSource(tmp_path)
    assert set(source.names()) == set(arrays)
    assert source.config["hidden_size"] == tiny.HIDDEN
    for name, values in arrays.items():
        assert source.read(name).dtype == dtype
        np.testing.assert_array_equal(source.read(name), values, err_msg=name)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_slice_is_that_part_of_the_whole_and_its_bytes_alone_are_read(sharded: Path, data: st.DataObject) -> None:
    source = SafetensorsSource(sharded)
    name = data.draw(st.sampled_from(sorted(ARRAYS)))
    index = []
    for size in ARRAYS[name].shape:
        start = data.draw(st.integers(0, size - 1))
        index.append(slice(start, data.draw(st.integers(start + 1, size))))
    part = ARRAYS[name][tuple(index)]
    np.testing.assert_array_equal(source.read(name, tuple(index)), part)
    assert source.bytes_read == part.nbytes


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    tiny.write_safetensors(tmp_path, ARRAYS)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for length in [0, 7, 8, 100, len(whole) // 2, len(whole) - 1]:
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated or corrupt safetensors file \(.*fetch it again"):
            SafetensorsSource(tmp_path)


def test_flipped_bytes_in_the_header_never_raise_anything_else(tmp_path: Path) -> None:
    tiny.write_safetensors(tmp_path, {name: ARRAYS[name] for name in (NAME, "model.norm.weight")})
    file, chance, refused = tmp_path / "model.safetensors", random.Random(0), 0
    whole = file.read_bytes()
    for _ in range(300):
        data = bytearray(whole)
        data[chance.randrange(200)] = chance.randrange(256)
        file.write_bytes(data)
        try:
            source = SafetensorsSource(tmp_path)
            for name in source.names():
                source.read(name)
        except CheckpointError:
            refused += 1
    assert refused > 100


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    tiny.write_safetensors(tmp_path, ARRAYS, num_files=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors: missing, though the index names it"):
        SafetensorsSource(tmp_path)


def test_a_tensor_missing_from_its_shard_is_named(tmp_path: Path) -> None:
    tiny.write_safetensors(tmp_path, ARRAYS, num_files=2)
    index = tmp_path / "model.safetensors.index.json"
    placed = json.loads(index.read_text())
    placed["weight_map"]["model.extra.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(placed))
    with pytest.raises(CheckpointError, match=r"'model\.extra\.weight' is not in model-00001-of-00002\.safetensors"):
        SafetensorsSource(tmp_path)


def _with_index(folder: Path, change: Callable[[dict[str, object]], object]) -> None:
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    change(listed["weight_map"])
    index.write_text(json.dumps(listed))


def test_a_tensor_that_lies_in_another_shard_than_the_index_says_is_refused(tmp_path: Path) -> None:
    tiny.write_safetensors(tmp_path, ARRAYS, num_files=2)
    file = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"][NAME]
    other = {1: "model-00002-of-00002.safetensors", 2: "model-00001-of-00002.safetensors"}[int(file[6:11])]
    _with_index(tmp_path, lambda listed: listed.update({NAME: other}))
    with pytest.raises(CheckpointError, match=re.escape(f"'{NAME}' is not in {other}, where it should be")):
        SafetensorsSource(tmp_path)


def test_a_shard_of_another_model_is_refused_by_what_it_lacks(tmp_path: Path) -> None:
    tiny.write_safetensors(tmp_path, ARRAYS, num_files=2)
    save_file({"some.other.weight": np.ones(3, np.float32)}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor '.*' is not in model-00002-of-00002\.safetensors, where it should be"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("length", [0, 5, 300, -1])
def test_a_truncated_shard_is_named(tmp_path: Path, length: int) -> None:
    tiny.write_safetensors(tmp_path, ARRAYS, num_files=3)
    shard = tmp_path / "model-00003-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:length])
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003\.safetensors: truncated or corrupt"):
        SafetensorsSource(tmp_path)


def test_a_tensor_that_the_index_lists_twice_is_named(tmp_path: Path) -> None:
    tiny.write_safetensors(tmp_path, ARRAYS, num_files=2)
    index = tmp_path / "model.safetensors.index.json"
    twice = f'{{"weight_map": {{"{NAME}": "model-00001-of-00002.safetensors", '
    index.write_text(index.read_text().replace('{"weight_map": {', twice))
    with pytest.raises(CheckpointError, match=re.escape(f"index.json: can't be read as JSON ('{NAME}' is listed twice)")):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "", 3, None])
def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path, file: object) -> None:
    tiny.write_safetensors(tmp_path, ARRAYS, num_files=2)
    _with_index(tmp_path, lambda listed: listed.update({NAME: file}))
    with pytest.raises(CheckpointError, match=re.escape(f"tensor '{NAME}' is said to be in {file!r}, which is no file beside it")):
        SafetensorsSource(tmp_path)


def test_the_same_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    tiny.write_safetensors(tmp_path, ARRAYS, num_files=2)
    save_file(
        {**{n: a for i, (n, a) in enumerate(ARRAYS.items()) if i % 2 == 1}, NAME: ARRAYS[NAME]},
        tmp_path / "model-00002-of-00002.safetensors",
    )
    save_file(
        {**{n: a for i, (n, a) in enumerate(ARRAYS.items()) if i % 2 == 0}, NAME: ARRAYS[NAME]},
        tmp_path / "model-00001-of-00002.safetensors",
    )
    with pytest.raises(CheckpointError, match=r"is in model-00001-of-00002\.safetensors too"):
        SafetensorsSource(tmp_path)


def test_a_type_that_holds_no_plain_weights_is_refused_by_tensor(tmp_path: Path) -> None:
    tiny.write_safetensors(tmp_path, {NAME: ARRAYS[NAME].astype(np.int8)})
    with pytest.raises(CheckpointError, match=f"tensor '{NAME}' has type I8: F64, F32, F16, BF16 are supported"):
        SafetensorsSource(tmp_path).read(NAME)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"config\.json: missing; give a folder"),
        (lambda folder: (folder / "config.json").write_text("{"), r"config\.json: can't be read as JSON"),
        (lambda folder: (folder / "config.json").write_text("[1]"), r"config\.json: holds list, not a JSON object"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"no model\.safetensors and no model\.safetensors\.index\.json"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), r"index\.json: has no 'weight_map'"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "a.safetensors"), None),
    ],
)
def test_a_folder_with_a_part_missing_or_broken_says_which(tmp_path: Path, prepare, message: str | None) -> None:
    tiny.write_safetensors(tmp_path, ARRAYS)
    prepare(tmp_path)
    if message is None:
        assert SafetensorsSource(tmp_path).names()  # one file under another name is still clear
        return
    with pytest.raises(CheckpointError, match=message):
        SafetensorsSource(tmp_path)


def test_several_files_without_an_index_are_refused(tmp_path: Path) -> None:
    tiny.write_safetensors(tmp_path, ARRAYS, num_files=2)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"2 safetensors files but no model\.safetensors\.index\.json"):
        SafetensorsSource(tmp_path)


def test_a_quantised_checkpoint_is_refused_by_its_method(tmp_path: Path) -> None:
    tiny.write_safetensors(tmp_path, ARRAYS, config={"quantization_config": {"quant_method": "aqlm"}})
    with pytest.raises(CheckpointError, match=r"quantization_config\.quant_method is 'aqlm': .*can be read; give the model"):
        SafetensorsSource(tmp_path)
