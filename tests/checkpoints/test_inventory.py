"""What a checkpoint holds: alike tensors under one name, each in its part; and files that no model can be opened from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints.inventory import TensorEntry, groups, take_inventory
from checkpoints.source import CheckpointError
from tests.checkpoints import tiny
from tests.checkpoints.test_quantised_safetensors import FP8, FP8_TENSORS, INT4, INT4_TENSORS, NORM, X

ARRAYS = tiny.tensors()


def named(*names: str, shape: tuple[int, ...] = (2, 3), type: str = "float32") -> list[TensorEntry]:
    return [TensorEntry(name, shape, type, 24) for name in names]


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [
        ([4], "4"),
        ([0, 1], "{0..1}"),
        ([2, 0, 1], "{0..2}"),
        ([9, 10, 11, 2], "{2,9..11}"),
        ([1, 3, 5, 7], "{1,3..7}"),
        ([0, 2], "{0,2}"),
        ([0, 1, 4, 6, 7, 8, 10, 13], "{0..1,4,6..8,..,13}"),
    ],
)
def test_names_that_differ_in_a_number_are_one(numbers: list[int], shown: str) -> None:
    (group,) = groups(named(*(f"model.layers.{number}.mlp.weight" for number in numbers)))
    assert group.name == f"model.layers.{shown}.mlp.weight"
    assert [tensor.name for tensor in group.tensors] == [f"model.layers.{number}.mlp.weight" for number in sorted(numbers)]


def test_names_with_two_numbers_show_both_and_digits_within_words_are_none() -> None:
    (group,) = groups(named(*(f"layers.{i}.experts.{j}.w1.weight" for i in (3, 4, 5) for j in range(8))))
    assert (group.name, len(group.tensors)) == ("layers.{3..5}.experts.{0..7}.w1.weight", 24)


def test_other_shapes_and_types_are_apart_and_in_the_order_of_their_layers() -> None:
    small, large = named("a.0.w", "a.2.w"), named("a.1.w", shape=(4, 3))
    assert [group.name for group in groups([*large, *small, *named("a.10.w", type="Q6_K"), *named("norm")])] == [
        "norm",
        "a.{0,2}.w",
        "a.1.w",
        "a.10.w",
    ]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("token_embd.weight", "embedding"),
        ("lm_head.weight", "output head"),
        ("output.weight", "output head"),
        ("output_norm.weight", "norms"),
        ("model.layers.3.self_attn.q_norm.weight", "norms"),
        ("model.layers.3.self_attn.kv_a_proj_with_mqa.weight", "attention"),
        ("blk.3.attn_output.weight", "attention"),
        ("encoder.layer.0.attention.output.dense.weight", "attention"),
        ("encoder.layer.0.output.dense.weight", "MLP"),
        ("model.layers.3.mlp.gate_proj.weight", "MLP"),
        ("model.layers.3.mlp.gate.weight", "experts"),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", "experts"),
        ("model.layers.3.block_sparse_moe.gate.weight", "experts"),
        ("language_model.model.layers.3.feed_forward.router.weight", "experts"),
        ("blk.3.ffn_gate_exps.weight", "experts"),
        ("blk.3.ffn_gate.weight", "MLP"),
        ("vision_tower.encoder.blocks.0.mlp.fc1.weight", "vision"),
        ("something.weight", "other"),
    ],
)
def test_each_tensor_is_of_the_part_its_name_tells(name: str, part: str) -> None:
    (tensor,) = named(name)
    assert tensor.part == part


def test_a_folder_is_told_of_with_what_lies_beside_the_weights(tmp_path: Path) -> None:
    tiny.write_safetensors(tmp_path, {**ARRAYS, "position_ids": np.arange(9)}, num_files=3)
    held = take_inventory(tmp_path)
    assert (held.format, len(held.files), held.architecture, held.context) == ("safetensors", 3, "LlamaForCausalLM", 128)
    assert (held.tokenizer, held.has_chat_template, held.unsupported_reason) == (None, False, None)
    assert held.num_parameters == sum(array.size for array in ARRAYS.values())
    assert held.num_bytes == sum(array.nbytes for array in ARRAYS.values()) + 9 * 8
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": ""}')
    assert (take_inventory(tmp_path).tokenizer, take_inventory(tmp_path).has_chat_template) == ("tokenizer.json", False)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    assert take_inventory(tmp_path).has_chat_template


def test_a_gguf_file_is_told_of_by_hugging_faces_names_and_its_own_types(tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q4_0, metadata={"tokenizer.chat_template": "x"})
    held = take_inventory(tmp_path / "tiny.gguf")
    assert (held.format, held.architecture, held.context, held.has_chat_template) == ("GGUF", "LlamaForCausalLM", 128, True)
    assert held.tokenizer == "in the file's metadata (gpt2)"
    found = {tensor.name: tensor for tensor in held.tensors}
    assert found["model.layers.1.mlp.up_proj.weight"] == TensorEntry(
        "model.layers.1.mlp.up_proj.weight", (tiny.MLP, tiny.HIDDEN), "Q4_0", tiny.MLP * tiny.HIDDEN // 32 * 18
    )
    assert found["model.norm.weight"].type == "float32"


@pytest.mark.parametrize(
    ("arrays", "declared", "type_"), [(FP8_TENSORS, FP8, "FP8 128x128"), (INT4_TENSORS, INT4, "INT4 32")], ids=["fp8", "int4"]
)
def test_quantised_tensors_are_told_of_as_the_matrices_that_they_stand_for(
    tmp_path: Path, arrays: dict[str, np.ndarray], declared: dict[str, Any], type_: str
) -> None:
    tiny.write_safetensors(tmp_path, arrays, config={"quantization_config": declared})
    held = take_inventory(tmp_path)
    found = {tensor.name: tensor for tensor in held.tensors}
    packed = sum(array.nbytes for name, array in arrays.items() if name.startswith(X))
    assert (found[X + "weight"].type, found[X + "weight"].shape, found[X + "weight"].num_bytes) == (type_, (300, 448), packed)
    assert found[NORM].type == "float32"


def test_an_unknown_quantisation_is_told_of_by_what_the_files_hold(tmp_path: Path) -> None:
    arrays = {"model.layers.0.mlp.up_proj.qweight": np.ones((8, 4), np.int32), "model.norm.weight": np.ones(4, np.float16)}
    tiny.write_safetensors(tmp_path, arrays, config={"quantization_config": {"quant_method": "aqlm"}})
    held = take_inventory(tmp_path)
    assert held.source is None
    assert held.unsupported_reason is not None
    assert "quant_method is 'aqlm'" in held.unsupported_reason
    assert {(tensor.name, tensor.shape, tensor.type, tensor.num_bytes) for tensor in held.tensors} == {
        ("model.layers.0.mlp.up_proj.qweight", (8, 4), "I32", 128),
        ("model.norm.weight", (4,), "float16", 8),
    }


def test_a_gguf_of_an_unknown_architecture_is_told_of_by_its_own_names(tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "tiny.gguf", metadata={"general.architecture": "mamba", "mamba.context_length": 77})
    held = take_inventory(tmp_path / "tiny.gguf")
    assert (held.source, held.architecture, held.context) == (None, "mamba", 77)
    assert held.unsupported_reason is not None
    assert "'mamba'" in held.unsupported_reason
    assert {tensor.name for tensor in held.tensors} >= {"token_embd.weight", "blk.1.ffn_down.weight"}


def test_what_is_broken_or_empty_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: missing"):
        take_inventory(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny.CONFIG))
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        take_inventory(tmp_path)
    save_file({"a": np.ones(100, np.float32)}, tmp_path / "model.safetensors")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"truncated or corrupt"):
        take_inventory(tmp_path)
    (tmp_path / "x.gguf").write_text("no model")
    with pytest.raises(CheckpointError, match=r"not a GGUF file"):
        take_inventory(tmp_path / "x.gguf")
