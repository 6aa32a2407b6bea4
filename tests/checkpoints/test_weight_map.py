"""The table from parameters to tensors."""

from __future__ import annotations

import pytest

from checkpoints.source import CheckpointError
from checkpoints.weight_map import Weight, WeightMap

MAP = WeightMap(
    {"head.table": Weight(("lm_head.weight",)), "blocks.{layer}.experts.3.up": Weight(("h.{layer}.e3.up",), transpose=True)},
    ignored=("*.scale_shift",),
)


def test_a_layers_number_goes_over_to_the_tensors_name() -> None:
    assert MAP.find("blocks.12.experts.3.up") == Weight(("h.12.e3.up",), transpose=True)
    assert MAP.find("head.table") == Weight(("lm_head.weight",))


@pytest.mark.parametrize("path", ["head.bias", "blocks.0.experts.4.up", "blocks.experts.3.up"])
def test_a_path_that_is_not_in_the_table_is_named(path: str) -> None:
    with pytest.raises(CheckpointError, match=f"parameter '{path}' has no entry"):
        MAP.find(path)


def test_computed_buffers_and_the_models_own_exceptions_are_ignored() -> None:
    assert MAP.is_ignored("model.layers.7.self_attn.rotary_emb.inv_freq")
    assert MAP.is_ignored("blocks.0.scale_shift")
    assert not MAP.is_ignored("model.layers.7.self_attn.q_proj.bias")


WRAPPED = WeightMap({}, ignored=("vision_tower.*",), renamed=(("model.language_model.", "model."), ("language_model.", "")))


def test_names_within_another_model_are_ours_and_others_their_own() -> None:
    theirs = ["language_model.model.norm.weight", "model.language_model.layers.0.w", "language_model.lm_head.weight", "vision_tower.a"]
    ours = ["model.norm.weight", "model.layers.0.w", "lm_head.weight", "vision_tower.a"]
    assert WRAPPED.names_in(theirs) == dict(zip(ours, theirs, strict=True))
    assert WRAPPED.is_ignored("vision_tower.a")


def test_a_missing_tensors_name_goes_by_the_others_of_its_checkpoint() -> None:
    assert WRAPPED.names_of_missing(["model.norm.weight"], ["language_model.model.w"]) == ["language_model.model.norm.weight"]
    assert WRAPPED.names_of_missing(["model.norm.weight", "x"], ["model.language_model.w"]) == ["model.language_model.norm.weight", "x"]
    assert WRAPPED.names_of_missing(["model.norm.weight"], ["model.w"]) == ["model.norm.weight"]


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"'model\.w' and 'language_model\.model\.w' are both 'model\.w' of this model"):
        WRAPPED.names_in(["model.w", "language_model.model.w"])


@pytest.mark.parametrize("axis", [-2, 2])
def test_an_experts_tensors_fill_what_is_left_of_the_axes(axis: int) -> None:
    weights = WeightMap({"b.{layer}.gate_up": Weight(("h.{layer}.{expert}.gate", "h.{layer}.{expert}.up"), transpose=True, axis=axis)})
    found = weights.find("b.3.gate_up")
    assert found.is_of_experts
    assert found.of_expert(12, 4) == Weight(("h.3.12.gate", "h.3.12.up"), transpose=True, axis=1)
    assert not MAP.find("head.table").is_of_experts
