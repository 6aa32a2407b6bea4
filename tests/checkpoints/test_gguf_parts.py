"""A GGUF in parts opens from any of them or their folder; a part that is missing or another model's is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from checkpoints.digest import weights_digest
from checkpoints.gguf_source import GGUFSource
from checkpoints.hub import open_source
from checkpoints.source import CheckpointError
from tests.checkpoints import gguf_writing

TENSORS = {
    "token_embd.weight": np.full((10, 64), 2, np.float32),
    "blk.0.attn_q.weight": np.full((64, 64), 3, np.float32),
    "blk.0.attn_k.weight": np.full((32, 64), 4, np.float32),
    "output_norm.weight": np.full(64, 5, np.float32),
}
PLACED = [["blk.0.attn_q.weight"], ["token_embd.weight", "output_norm.weight"], ["blk.0.attn_k.weight"]]
MIDDLE = "tiny-00002-of-00003.gguf"


def part(folder: Path, number: int, names: list[str], *, count: int = 3, called: int | None = None, total: int = 4) -> Path:
    path = folder / f"tiny-{(called or number + 1):05}-of-00003.gguf"
    metadata = gguf_writing.base() if number == 0 else {}  # llama-gguf-split writes it into the first alone
    gguf_writing.write(path, "qwen3", metadata, {name: TENSORS[name] for name in names}, split=(number, count, total))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, names in enumerate(PLACED):
        part(tmp_path, number, names)
    return tmp_path


@pytest.mark.parametrize("given", ["tiny-00001-of-00003.gguf", MIDDLE, None])
def test_any_part_or_the_folder_opens_all(folder: Path, given: str | None) -> None:
    source = GGUFSource(folder / given) if given else open_source(folder)
    assert isinstance(source, GGUFSource)
    assert set(source.names()) == {
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.norm.weight",
    }
    for name, value in (("embed_tokens", 2), ("layers.0.self_attn.q_proj", 3), ("layers.0.self_attn.k_proj", 4), ("norm", 5)):
        assert set(source.read(f"model.{name}.weight").ravel().tolist()) == {value}
    assert source.bytes_read == sum(array.nbytes for array in TENSORS.values())
    assert source.config["num_hidden_layers"] == 2


def test_missing_parts_are_named(folder: Path) -> None:
    (folder / MIDDLE).unlink()
    with pytest.raises(CheckpointError, match=rf"of its 3 parts {MIDDLE} is missing: fetch them"):
        open_source(folder)
    (folder / "tiny-00003-of-00003.gguf").unlink()
    with pytest.raises(CheckpointError, match=rf"of its 3 parts {MIDDLE}, tiny-00003-of-00003\.gguf are missing"):
        GGUFSource(folder / "tiny-00001-of-00003.gguf")


def test_a_first_part_that_is_missing_is_named(folder: Path) -> None:
    (folder / "tiny-00001-of-00003.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"tiny-00001-of-00003\.gguf"):
        open_source(folder)
    with pytest.raises(CheckpointError, match=r"of its 3 parts tiny-00001-of-00003\.gguf is missing"):
        GGUFSource(folder / MIDDLE)


def test_a_truncated_part_is_named(folder: Path) -> None:
    whole = (folder / MIDDLE).read_bytes()
    (folder / MIDDLE).write_bytes(whole[:-64])
    with pytest.raises(CheckpointError, match=rf"{MIDDLE}: truncated: tensor 'output_norm\.weight' ends at byte"):
        open_source(folder)


def test_parts_that_do_not_belong_together_are_refused(folder: Path) -> None:
    part(folder, 2, PLACED[1], called=2)
    with pytest.raises(CheckpointError, match=rf"{MIDDLE}: split\.no is 2 and split\.count 3 where split\.no is 1"):
        open_source(folder)
    part(folder, 1, [*PLACED[1], *PLACED[0]])
    with pytest.raises(CheckpointError, match=rf"{MIDDLE}: tensor 'blk\.0\.attn_q\.weight' is in tiny-00001-of-00003\.gguf too"):
        open_source(folder)
    part(folder, 1, PLACED[1][:1])
    with pytest.raises(CheckpointError, match=r"its parts hold 3 tensors, not the 4 of split\.tensors\.count"):
        open_source(folder)


def test_a_part_under_another_name_is_told_what_it_must_be_called(folder: Path) -> None:
    (folder / "tiny-00001-of-00003.gguf").rename(folder / "model.gguf")
    with pytest.raises(
        CheckpointError, match=r"model\.gguf: one of 3 parts by its metadata: each must be called NAME-00001-of-00003\.gguf"
    ):
        GGUFSource(folder / "model.gguf")


def test_a_folder_of_two_models_asks_for_one(folder: Path) -> None:
    gguf_writing.write(folder / "mmproj.gguf", "clip", {}, {})
    with pytest.raises(CheckpointError, match=r"2 GGUF models \(mmproj\.gguf, tiny-00001-of-00003\.gguf\): give the file of one"):
        open_source(folder)


def test_the_digest_is_of_all_parts(folder: Path) -> None:
    before = weights_digest(folder / "tiny-00001-of-00003.gguf")
    assert before == weights_digest(folder)
    data = bytearray((folder / MIDDLE).read_bytes())
    data[-1] ^= 1
    (folder / MIDDLE).write_bytes(data)
    assert weights_digest(folder / "tiny-00001-of-00003.gguf") != before
