"""`jaxinfer compress` and `decompress`: byte for byte, at the entropy's floor, and never wrong weights."""

from __future__ import annotations

import filecmp
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints import compressed_file
from checkpoints.compression import MANIFEST, compress, decompress, plain_bytes
from checkpoints.errors import CheckpointError
from checkpoints.exponent_coding import ExponentCoder
from checkpoints.hub import open_source
from jaxinfer import LLM, SamplingParams
from server.cli.parser import parse
from tests.conftest import TINY, MakeLLM

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small tensors have several."""
    monkeypatch.setattr(compressed_file, "CHUNK_BYTES", 1 << 12)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """Two shards with tensors of every type, an index, and files beside them."""
    random, folder = np.random.default_rng(0), tmp_path / "plain"
    (folder / "nested").mkdir(parents=True)
    weights = random.standard_normal((70, 96), np.float32)
    shards = {
        "model-00001-of-00002.safetensors": {
            "bf16": weights.astype(BFLOAT16),
            "patterns": np.arange(1 << 16, dtype=np.uint16).view(BFLOAT16),  # every bit pattern that there is
            "f16": weights.astype(np.float16),
            "zeros": np.zeros((33, 65), BFLOAT16),
            "scalar": np.array(3.5, np.float32),
            "empty": np.zeros((0, 4), np.float32),
        },
        "model-00002-of-00002.safetensors": {
            "f32": weights,
            "f64": weights.astype(np.float64),
            "fp8": weights.astype(ml_dtypes.float8_e4m3fn),
            "i64": np.arange(999),
            "noise": random.integers(0, 256, 5001).astype(np.uint8),
            "flags": np.array([True, False, True]),
        },
    }
    for name, tensors in shards.items():
        save_file(tensors, folder / name, metadata={"format": "pt"})
    index = {"weight_map": {tensor: name for name, tensors in shards.items() for tensor in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (folder / "nested" / "notes.md").write_text("kept")
    return folder


def assert_same(first: Path, second: Path) -> None:
    names = sorted(str(file.relative_to(first)) for file in first.rglob("*") if file.is_file())
    assert names == sorted(str(file.relative_to(second)) for file in second.rglob("*") if file.is_file())
    assert filecmp.cmpfiles(first, second, names, shallow=False) == (names, [], [])


def test_a_folder_comes_back_byte_for_byte(plain: Path, tmp_path: Path) -> None:
    done: list[int] = []
    sizes = compress(plain, tmp_path / "coded", advance=done.append)
    assert_same(plain, _decompressed(tmp_path))
    assert sizes.plain == plain_bytes(plain) == plain_bytes(tmp_path / "coded")
    assert sum(tensor.plain for tensor in sizes.tensors) == sum(done) < sizes.plain  # all but the headers
    coded = {tensor.name: tensor.coded / max(tensor.plain, 1) for tensor in sizes.tensors}
    assert coded["zeros"] < 0.6 and coded["noise"] == 1.0
    assert coded["bf16"] < 0.7 and coded["f32"] < 0.85 and coded["fp8"] < 0.9 and coded["f16"] < 0.9


def _decompressed(folder: Path) -> Path:
    decompress(folder / "coded", folder / "back")
    return folder / "back"


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float32)], ids=str)
def test_values_take_what_their_entropy_says(dtype: np.dtype) -> None:
    values = np.random.default_rng(0).standard_normal(1 << 20, np.float32).astype(dtype)
    exponents = values.astype(np.float32).view(np.uint32) >> 23 & 255
    share = np.bincount(exponents) / len(exponents)
    floor = 8 * dtype.itemsize - 8 - np.sum(share * np.log2(share, where=share > 0, out=np.zeros_like(share)))
    planes, frame = ExponentCoder(dtype.itemsize).encode(values.view(np.uint8))
    assert 8 * (len(planes) + len(frame)) / len(values) < 1.005 * floor


def test_slices_are_those_of_the_plain_folder(plain: Path, tmp_path: Path) -> None:
    compress(plain, tmp_path / "coded")
    ours, theirs = open_source(tmp_path / "coded"), open_source(plain)
    assert ours.names() == theirs.names()
    for name in ("bf16", "f32", "f64", "scalar", "empty"):
        assert ours.stored(name) == theirs.stored(name)
        np.testing.assert_array_equal(ours.read(name), theirs.read(name))
    for index in ((slice(0, 1), slice(0, 96)), (slice(20, 53), slice(7, 9)), (slice(69, 70), slice(95, 96)), (slice(5, 5), slice(0, 3))):
        for name in ("bf16", "f32"):
            np.testing.assert_array_equal(ours.read(name, index), theirs.read(name, index))


def test_a_compressed_folder_is_served(llms: MakeLLM, tiny_model_path: Path, tmp_path: Path) -> None:
    compress(tiny_model_path, tmp_path / "coded")
    greedy = SamplingParams(max_tokens=8, temperature=0.0)
    prompts = ["The capital of France is", "One, two"]
    ours = LLM(str(tmp_path / "coded"), **TINY)
    assert [o.outputs[0].token_ids for o in ours.generate(prompts, greedy)] == [
        o.outputs[0].token_ids for o in llms().generate(prompts, greedy)
    ]


def test_an_interrupted_command_goes_on(plain: Path, tmp_path: Path) -> None:
    def interrupt_after(num_bytes: int) -> Callable[[int], None]:
        done = 0

        def advance(number: int) -> None:
            nonlocal done
            done += number
            if done > num_bytes:
                raise KeyboardInterrupt

        return advance

    first = (plain / "model-00001-of-00002.safetensors").stat().st_size
    for command, source, destination in ((compress, plain, "coded"), (decompress, tmp_path / "coded", "back")):
        with pytest.raises(KeyboardInterrupt):
            command(source, tmp_path / destination, advance=interrupt_after(first))
        assert not (tmp_path / destination).exists()
        part = tmp_path / f".{destination}.part"
        (finished,) = part.glob("model*.safetensors")
        written = finished.stat().st_ino, finished.stat().st_mtime_ns
        command(source, tmp_path / destination)
        finished = tmp_path / destination / finished.name
        assert (finished.stat().st_ino, finished.stat().st_mtime_ns) == written
        assert not part.exists()
    assert_same(plain, tmp_path / "back")


def test_what_is_left_of_another_source_is_not_taken(plain: Path, tmp_path: Path) -> None:
    part = tmp_path / ".coded.part"
    part.mkdir()
    (part / "model-00001-of-00002.safetensors").write_bytes(b"of something else")
    compress(plain, tmp_path / "coded")
    assert_same(plain, _decompressed(tmp_path))


def test_no_damaged_byte_gives_wrong_weights(plain: Path, tmp_path: Path) -> None:
    """Each of some hundred bytes all over a file: the error names the file, or nothing has changed."""
    compress(plain, tmp_path / "coded")
    random = np.random.default_rng(1)
    file = tmp_path / "coded" / "model-00001-of-00002.safetensors"
    sound = file.read_bytes()
    header = 8 + int.from_bytes(sound[:8], "little")
    wanted = {name: open_source(plain).read(name) for name in ("bf16", "zeros", "scalar")}
    failed = 0
    for place in [*random.integers(0, header, 40), *random.integers(header, len(sound), 80)]:
        damaged = bytearray(sound)
        damaged[place] ^= 1 << random.integers(8)
        file.write_bytes(damaged)
        try:
            source = open_source(tmp_path / "coded")
            assert all((source.read(name).tobytes() == values.tobytes()) for name, values in wanted.items())
            decompress(tmp_path / "coded", tmp_path / "back")
            assert_same(plain, tmp_path / "back")
            shutil.rmtree(tmp_path / "back")
        except CheckpointError as error:
            failed += 1
            assert "model" in str(error)
            assert not (tmp_path / "back").exists()
    assert failed > 80  # the rest are spaces, and bits of tensors' names that both folders have not


@pytest.mark.parametrize("length", [0, 7, 100, 0.5, -1])
def test_a_truncated_file_is_told(plain: Path, tmp_path: Path, length: float) -> None:
    compress(plain, tmp_path / "coded")
    file = tmp_path / "coded" / "model-00002-of-00002.safetensors"
    sound = file.read_bytes()
    file.write_bytes(sound[: int(length * len(sound)) if isinstance(length, float) else length])
    for attempt in (lambda: decompress(tmp_path / "coded", tmp_path / "back"), lambda: open_source(tmp_path / "coded")):
        with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors"):
            attempt()
    assert not (tmp_path / "back").exists()


def test_a_damaged_chunk_names_its_tensor(plain: Path, tmp_path: Path) -> None:
    compress(plain, tmp_path / "coded")
    file = tmp_path / "coded" / "model-00002-of-00002.safetensors"
    opened = compressed_file.open_file(file)
    at = opened.tensors["f32"].offset + 9000
    damaged = bytearray(file.read_bytes())
    damaged[at] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(CheckpointError, match="tensor 'f32' is damaged"):
        decompress(tmp_path / "coded", tmp_path / "back")
    assert not list(tmp_path.glob(".back*"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m | {"version": "2"}, "jaxinfer lossless 1 can be read"),
        (lambda m: m | {"files": {}}, "no list of files"),
        (lambda m: m | {"files": {"../x.safetensors": next(iter(m["files"].values()))}}, "no list of files"),
        (lambda m: {**m, "files": {n: a | {"sha256": "0" * 64} for n, a in m["files"].items()}}, "is not the file"),
        (lambda m: {**m, "files": m["files"] | {"model.safetensors": next(iter(m["files"].values()))}}, "missing"),
    ],
)
def test_a_manifest_of_other_files_is_refused(plain: Path, tmp_path: Path, change: Callable[[dict], dict], words: str) -> None:
    compress(plain, tmp_path / "coded")
    file = tmp_path / "coded" / MANIFEST
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(CheckpointError, match=words):
        decompress(tmp_path / "coded", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_what_can_not_be_done_is_refused(plain: Path, tmp_path: Path) -> None:
    compress(plain, tmp_path / "coded")
    with pytest.raises(CheckpointError, match="compressed already"):
        compress(tmp_path / "coded", tmp_path / "twice")
    with pytest.raises(CheckpointError, match="not empty"):
        compress(plain, tmp_path / "coded")
    compress(plain, tmp_path / "coded", is_forced=True)
    with pytest.raises(CheckpointError, match="is not compressed"):
        decompress(plain, tmp_path / "back")
    with pytest.raises(CheckpointError, match="has no safetensors files"):
        compress(tmp_path, tmp_path / "none")
    with pytest.raises(CheckpointError, match="where the source lies"):
        compress(plain, plain, is_forced=True)
    save_file({".chunks": np.zeros(3)}, tmp_path / "plain" / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="for themselves"):
        compress(plain, tmp_path / "named")


def test_the_commands_say_what_became_of_it(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in (
        ["compress", "--per-tensor", str(plain), str(tmp_path / "coded")],
        ["decompress", str(tmp_path / "coded"), str(tmp_path / "back")],
    ):
        run, arguments = parse(line)
        assert run(arguments) == 0
    out, err = capsys.readouterr()
    assert "100.0% of      0.01 MB U8      noise" in out
    assert "% saved) in" in err and "every checksum right" in err
    assert_same(plain, tmp_path / "back")
