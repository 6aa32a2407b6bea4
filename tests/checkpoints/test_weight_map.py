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
