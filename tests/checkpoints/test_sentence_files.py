"""sentence-transformers' files beside a checkpoint: read where they are, missed by no one, named where damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from checkpoints.sentence_files import SentenceFiles, read_sentence_files
from checkpoints.source import CheckpointError
from tests import tiny_encoder

POOLING = {
    "word_embedding_dimension": 32,
    "pooling_mode_cls_token": True,
    "pooling_mode_mean_tokens": False,
    "pooling_mode_max_tokens": False,
}


def test_a_folder_without_them_has_none(tmp_path: Path) -> None:
    assert read_sentence_files(tmp_path) == SentenceFiles()


def test_each_is_read(tmp_path: Path) -> None:
    tiny_encoder.write(tmp_path, pooling="cls", normalizes=False)
    (tmp_path / "config_sentence_transformers.json").write_text('{"prompts": {}}')
    settings = {"max_seq_length": 70, "do_lower_case": False}
    assert read_sentence_files(tmp_path) == SentenceFiles(["Transformer", "Pooling"], settings, POOLING, {"prompts": {}})


def test_newer_versions_write_other_module_paths(tmp_path: Path) -> None:
    tiny_encoder.write(tmp_path, pooling="cls")
    kinds = ("base.modules.transformer.Transformer", "sentence_transformer.modules.pooling.Pooling")
    modules = [{"type": f"sentence_transformers.{kind}", "path": path} for kind, path in zip(kinds, ("", "1_Pooling"), strict=True)]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    files = read_sentence_files(tmp_path)
    assert (files.modules, files.pooling) == (["Transformer", "Pooling"], POOLING)


@pytest.mark.parametrize("name", ["modules.json", "1_Pooling/config.json", "sentence_bert_config.json"])
@pytest.mark.parametrize("content", ["{", "3", '[{"type": "x"}]'])
def test_a_damaged_one_is_named(tmp_path: Path, name: str, content: str) -> None:
    tiny_encoder.write(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=f"{name}.*fetch it again"):
        read_sentence_files(tmp_path)


def test_a_missing_pooling_is_named(tmp_path: Path) -> None:
    tiny_encoder.write(tmp_path)
    (tmp_path / "1_Pooling/config.json").unlink()
    with pytest.raises(CheckpointError, match=r"1_Pooling/config\.json: missing"):
        read_sentence_files(tmp_path)
