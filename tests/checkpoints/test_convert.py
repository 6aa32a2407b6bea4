"""Conversions: the same bits in another format, in bounded memory; one that fails leaves nothing, and what was there stays."""

from __future__ import annotations

import json
import os
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from checkpoints.convert import convert
from checkpoints.converted_tensors import DTYPES, converted_tensors
from checkpoints.hub import open_source
from checkpoints.orbax_source import OrbaxSource
from checkpoints.source import CheckpointError
from jaxinfer.tokenizer import Tokenizer
from tests.checkpoints import tiny
from tests.checkpoints.test_quantised_safetensors import FP8, FP8_TENSORS, INT4, INT4_TENSORS, VALUES, X

ARRAYS = tiny.tensors()
MIXED = {  # of every type that is kept, and some that are no weights
    **{
        name: array.astype(ml_dtypes.bfloat16 if "mlp" in name else np.float16 if "attn" in name else np.float32)
        for name, array in ARRAYS.items()
    },
    "odd": np.arange(7, dtype=np.float16),
    "double": np.linspace(0, 1, 5),
    "position_ids": np.arange(12).reshape(1, 12),
    "mask": np.array([True, False, True]),
    "none": np.zeros((0, 4), np.float32),
    "one": np.array(1.5, np.float32),
}
BESIDE = {
    "tokenizer.json": "{}",
    "tokenizer_config.json": '{"eos_token": "x"}',
    "generation_config.json": '{"eos_token_id": [1, 2]}',
    "chat_template.jinja": "{{ messages }}",
    "LICENSE": "Apache-2.0",
    "modules.json": "[]",
    "1_Pooling/config.json": '{"word_embedding_dimension": 8}',
    "additional_chat_templates/tools.jinja": "{{ tools }}",
}


def write_folder(folder: Path, arrays: dict[str, np.ndarray] = MIXED, num_files: int = 3) -> Path:
    tiny.write_safetensors(folder, arrays, num_files)
    for name, text in BESIDE.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def converted(path: Path, to: Path, format: str, dtype: str | None = None, **options: Any) -> Path:
    source = open_source(path)
    tensors = converted_tensors(source, None if dtype is None else DTYPES[dtype])
    save = Tokenizer.from_source(source).save if path.suffix == ".gguf" else refuse
    convert(source, tensors, to, format, **({"shard_size": 5 * 10**9, "save_tokenizer": save} | options))
    return to


def refuse(file: Path) -> None:
    raise AssertionError("a folder's tokenizer is copied")


def contents(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    source = open_source(path)
    found = {}
    for name in source.names():
        (part,) = source.stored(name).parts
        values = source.read(name, None, part)
        found[name] = (values.dtype.name, source.shape(name), values.tobytes())
    return found


def test_safetensors_to_orbax_and_back_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    first = write_folder(tmp_path / "first")
    orbax = converted(first, tmp_path / "orbax", "orbax")
    last = converted(orbax, tmp_path / "last", "safetensors")
    assert isinstance(open_source(orbax), OrbaxSource)
    expected = {name: (array.dtype.name, array.shape, array.tobytes()) for name, array in MIXED.items()}
    for folder in (orbax, last):
        assert contents(folder) == expected
        assert json.loads((folder / "config.json").read_text()) == json.loads((first / "config.json").read_text())
        assert {name: (folder / name).read_text() for name in BESIDE} == BESIDE
    assert not (last / "weights").exists()
    assert load_file(last / "model.safetensors").keys() == MIXED.keys()  # the library's own reader
    with safe_open(last / "model.safetensors", framework="numpy") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert sorted(os.listdir(tmp_path)) == ["first", "last", "orbax"]


@pytest.mark.parametrize("type_", [gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0])
def test_gguf_to_safetensors_to_orbax_keeps_what_the_file_says(tmp_path: Path, type_: gguf.GGMLQuantizationType) -> None:
    expected = tiny.write_gguf(tmp_path / "tiny.gguf", type_)
    source = open_source(tmp_path / "tiny.gguf")
    folder = converted(tmp_path / "tiny.gguf", tmp_path / "folder", "safetensors")
    orbax = converted(folder, tmp_path / "orbax", "orbax")
    for name, values in expected.items():
        dtype = np.float16 if type_ == gguf.GGMLQuantizationType.F16 and values.ndim == 2 else np.float32
        assert contents(folder)[name] == (np.dtype(dtype).name, values.shape, values.astype(dtype).tobytes()), name
    assert contents(orbax) == contents(folder)
    config = json.loads((orbax / "config.json").read_text())
    assert config == {**source.config, "torch_dtype": "float16" if type_ == gguf.GGMLQuantizationType.F16 else "float32"}


def test_a_gguf_files_tokenizer_is_the_same_from_a_folder(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ bos_token }}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    metadata = {
        "tokenizer.chat_template": template,
        "tokenizer.ggml.token_type": [3, 3, *[1] * (tiny.VOCAB - 3), 3],
        "tokenizer.ggml.eot_token_id": tiny.VOCAB - 1,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }
    tiny.write_gguf(tmp_path / "tiny.gguf", metadata=metadata)
    before = Tokenizer.from_source(open_source(tmp_path / "tiny.gguf"))
    after = Tokenizer.from_source(open_source(converted(tmp_path / "tiny.gguf", tmp_path / "folder", "safetensors")))
    text = "the and<|end|> than é12"
    assert after.encode(text) == before.encode(text) != before.encode(text, add_special_tokens=False)
    assert (after.bos_token_id, set(after.eos_token_ids)) == (before.bos_token_id, set(before.eos_token_ids)) == (1, {0, tiny.VOCAB - 1})
    assert after.special_ids == before.special_ids
    chat = [{"role": "user", "content": "hi"}]
    assert after.render_chat(chat) == before.render_chat(chat) == "<|start|>hi<|end|>"


def test_named_chat_templates_of_a_gguf_file_keep_their_names(tmp_path: Path) -> None:
    tiny.write_gguf(
        tmp_path / "tiny.gguf", metadata={"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "{{ tools }}"}
    )
    folder = converted(tmp_path / "tiny.gguf", tmp_path / "folder", "safetensors")
    tokenizer = Tokenizer.from_source(open_source(folder))
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "plain"
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"][1] == {"name": "tool_use", "template": "{{ tools }}"}


@pytest.mark.parametrize("format", ["safetensors", "orbax"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_change_their_type_and_integers_do_not(tmp_path: Path, format: str, dtype: str) -> None:
    folder = write_folder(tmp_path / "first")
    (folder / "config.json").write_text(json.dumps({**tiny.CONFIG, "dtype": "float32", "text_config": {"torch_dtype": "float32", "x": 1}}))
    found = contents(converted(folder, tmp_path / "to", format, dtype))
    for name, array in MIXED.items():
        values = array if array.dtype.kind in "ib" else array.astype(DTYPES[dtype])
        assert found[name] == (values.dtype.name, array.shape, values.tobytes()), name
    config = json.loads((tmp_path / "to" / "config.json").read_text())
    assert config == {**tiny.CONFIG, "dtype": dtype, "text_config": {"torch_dtype": dtype, "x": 1}}


def test_a_value_that_float16_has_not_is_refused_by_its_tensor(tmp_path: Path) -> None:
    tiny.write_safetensors(tmp_path / "first", {"fine": np.array([np.inf, 1], np.float32), "large": np.array([1.0, -70000.0], np.float32)})
    with pytest.raises(CheckpointError, match=r"tensor 'large' has a value of 70000, which is beyond float16's 65504"):
        converted(tmp_path / "first", tmp_path / "to", "safetensors", "float16")
    assert os.listdir(tmp_path) == ["first"]


@pytest.mark.parametrize(("kind", "tensors", "declared"), [("fp8", FP8_TENSORS, FP8), ("int4", INT4_TENSORS, INT4)])
def test_quantised_weights_become_plain_and_the_configuration_says_so(
    tmp_path: Path, kind: str, tensors: dict[str, np.ndarray], declared: dict[str, Any]
) -> None:
    tiny.write_safetensors(tmp_path / "first", tensors, config={"quantization_config": declared})
    folder = converted(tmp_path / "first", tmp_path / "to", "safetensors")
    values = VALUES[kind]
    assert contents(folder)[X + "weight"] == (values.dtype.name, values.shape, values.tobytes())
    config = json.loads((folder / "config.json").read_text())
    assert config == {**tiny.CONFIG, "torch_dtype": values.dtype.name}


def test_shards_are_of_the_size_asked_for_and_the_index_says_where_each_tensor_is(tmp_path: Path) -> None:
    size = 20_000  # more than any tensor but the MLP's
    folder = converted(write_folder(tmp_path / "first", ARRAYS), tmp_path / "to", "safetensors", shard_size=size)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 3
    assert [file.name for file in files] == [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in ARRAYS.values())
    held = {}
    for file in files:
        arrays = load_file(file)
        held |= dict.fromkeys(arrays, file.name)
        assert sum(array.nbytes for array in arrays.values()) <= size or len(arrays) == 1
    assert index["weight_map"] == held
    assert contents(folder) == contents(tmp_path / "first")


@pytest.mark.parametrize("format", ["safetensors", "orbax"])
def test_no_more_than_a_piece_of_a_tensor_is_read_at_a_time(tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkpoints.converted_tensors._PIECE_BYTES", 5000)
    monkeypatch.setattr("checkpoints.orbax_writer._FILE_BYTES", 5000)
    monkeypatch.setattr("checkpoints.orbax_writer._SMALL_CHUNK_BYTES", 1000)
    source = open_source(write_folder(tmp_path / "first", ARRAYS))
    sizes, advanced = [], []
    read = source.read
    monkeypatch.setattr(source, "read", lambda *asked: (values := read(*asked), sizes.append(values.nbytes))[0])
    convert(
        source, converted_tensors(source, None), tmp_path / "to", format, shard_size=10**9, save_tokenizer=refuse, advance=advanced.append
    )
    assert max(sizes) <= 5000 < max(array.nbytes for array in ARRAYS.values())
    assert sum(advanced) == sum(array.nbytes for array in ARRAYS.values())
    assert contents(tmp_path / "to") == contents(tmp_path / "first")


def test_a_folder_that_is_not_empty_is_left_alone_unless_forced(tmp_path: Path) -> None:
    first = write_folder(tmp_path / "first", ARRAYS)
    there = tmp_path / "there"
    there.mkdir()
    converted(first, there, "safetensors")  # empty: taken
    (there / "mine.txt").write_text("keep")
    with pytest.raises(CheckpointError, match=r"there: exists and is not empty: give another folder, or --force"):
        converted(first, there, "orbax")
    assert (there / "mine.txt").read_text() == "keep"
    converted(first, there, "orbax", is_forced=True)
    assert not (there / "mine.txt").exists()
    assert contents(there) == contents(first)
    assert sorted(os.listdir(tmp_path)) == ["first", "there"]


@pytest.mark.parametrize("format", ["safetensors", "orbax"])
@pytest.mark.parametrize("was_there", [True, False])
def test_a_conversion_that_fails_half_way_leaves_what_was_there(tmp_path: Path, format: str, was_there: bool) -> None:
    first = write_folder(tmp_path / "first", ARRAYS)
    if was_there:
        converted(first, tmp_path / "to", "safetensors")
    source = open_source(first)
    tensors, read = converted_tensors(source, None), source.read

    def failing(name: str, index: Any = None, part: str | None = None) -> np.ndarray:
        if name == "model.layers.1.mlp.down_proj.weight":
            raise CheckpointError("the disk is gone")
        return read(name, index, part)

    source.read = failing  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match=r"^the disk is gone$"):
        convert(source, tensors, tmp_path / "to", format, shard_size=10**9, save_tokenizer=refuse, is_forced=True)
    assert sorted(os.listdir(tmp_path)) == ["first", "to"] if was_there else ["first"]
    if was_there:
        assert contents(tmp_path / "to") == contents(first)


def _over_the_source(folder: Path) -> Path:
    return folder / "first"


def _around_the_source(folder: Path) -> Path:
    return folder


def _a_file(folder: Path) -> Path:
    (folder / "file").write_text("")
    return folder / "file"


@pytest.mark.parametrize(
    ("to", "message"),
    [
        (_over_the_source, r"is where the checkpoint to convert lies"),
        (_around_the_source, r"is where the checkpoint to convert lies"),
        (_a_file, r"file: is a file: give a folder"),
    ],
)
def test_the_source_and_files_are_never_written_over(tmp_path: Path, to: Callable[[Path], Path], message: str) -> None:
    first = write_folder(tmp_path / "first", ARRAYS)
    with pytest.raises(CheckpointError, match=message):
        converted(first, to(tmp_path), "safetensors", is_forced=True)
    assert len(contents(first)) == len(ARRAYS)


def test_a_disk_without_the_room_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = write_folder(tmp_path / "first", ARRAYS)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1000))
    with pytest.raises(CheckpointError, match=r"0\.0 GB left: free some"):
        converted(first, tmp_path / "to", "safetensors")
    assert os.listdir(tmp_path) == ["first"]
