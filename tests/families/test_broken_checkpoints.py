"""What a checkpoint of experts, or of latent attention, has too little or too much of is named; nothing of it is loaded."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints.source import CheckpointError
from tests import model_on_mesh
from tests.families import checkpoint

IN_EACH = {  # a matrix of each family: of one of its experts; of its latents
    "qwen3_moe": "model.layers.1.mlp.experts.5.up_proj.weight",
    "deepseek_v3": "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
}


@pytest.fixture(params=IN_EACH)
def checkpoint_and_name(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """A family's folder, sound so far, and one of its tensors."""
    family = request.param
    return checkpoint.write(tmp_path, checkpoint.config_of(family), checkpoint.shapes_of(family)), IN_EACH[family]


def refused(folder: Path, tensors: dict[str, np.ndarray], message: str) -> None:
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        model_on_mesh.put(folder, (0,))


def test_a_missing_tensor_is_named(checkpoint_and_name: tuple[Path, str]) -> None:
    folder, name = checkpoint_and_name
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    refused(folder, tensors, f"tensor {re.escape(repr(name))} is missing")


def test_a_surplus_tensor_is_named(checkpoint_and_name: tuple[Path, str]) -> None:
    folder, name = checkpoint_and_name
    tensors = load_file(folder / "model.safetensors")
    surplus = name.replace("experts.5", "experts.8") if "experts" in name else name.replace(".weight", ".bias")
    refused(folder, tensors | {surplus: tensors[name]}, f"tensor {re.escape(repr(surplus))} is in the checkpoint but not in a model")


def test_a_misshapen_tensor_is_named_with_its_shape(checkpoint_and_name: tuple[Path, str]) -> None:
    folder, name = checkpoint_and_name
    tensors = load_file(folder / "model.safetensors")
    wrong = tensors[name][:, :-1].copy()
    refused(folder, tensors | {name: wrong}, rf"tensor {re.escape(repr(name))} has shape \[{wrong.shape[0]}, {wrong.shape[1]}\]")


def test_a_truncated_tensor_is_named(checkpoint_and_name: tuple[Path, str]) -> None:
    folder, name = checkpoint_and_name
    path, tensors = folder / "model.safetensors", load_file(folder / "model.safetensors")
    # The widest values lie first in a file: this one's, of which a byte is left out with all that comes after.
    save_file({other: values if other == name else values.astype(np.float16) for other, values in tensors.items()}, path)
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    path.write_bytes(whole[: start + tensors[name].nbytes - 1])
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: truncated .*tensor {re.escape(repr(name))} ends at byte"):
        model_on_mesh.put(folder, (0,))
