"""Stages of a pipeline hold a model between them, and none much more than another."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from jaxinfer.layers.matrices import MatrixFormat
from jaxinfer.models.registry import read_config
from jaxinfer.models.shapes import model_shape
from jaxinfer.runtime.cut import cut, head_bytes, layer_bytes
from jaxinfer.runtime.template import ModelTemplate, make_template

FORM = MatrixFormat(jnp.dtype("bfloat16"))


def paths(template: ModelTemplate) -> list[str]:
    return [path for leaf in template.leaves for path in leaf.paths]


@pytest.mark.parametrize("name", ["smollm2-135m", "llama-3.1-8b"])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_stages_hold_every_parameter_once_but_a_tied_table(name: str, num_stages: int) -> None:
    whole = make_template(read_config(model_shape(name)), FORM)
    stages = cut(whole, num_stages)
    assert [stage.is_first for stage in stages] == [True] + [False] * (num_stages - 1)
    assert [stage.is_last for stage in stages] == [False] * (num_stages - 1) + [True]
    assert [layer for stage in stages for layer in stage.layers] == list(whole.layers)
    held = [path for stage in stages for path in paths(stage)]
    is_tied = not any(path.startswith("head.") for path in held)
    assert is_tied == (name == "smollm2-135m")
    assert sorted(held) == sorted(paths(whole) + ["embedding.table"] * is_tied)
    for stage in stages:
        assert {int(path.split(".")[1]) for path in paths(stage) if path.startswith("blocks.")} == set(stage.layers)


def test_stages_cost_alike_the_head_among_them() -> None:
    whole = make_template(read_config(model_shape("llama-3.1-8b")), FORM)
    layers = layer_bytes(whole)
    costs = [sum(layers[layer] for layer in stage.layers) + head_bytes(whole) * stage.is_last for stage in cut(whole, 4)]
    assert max(costs) - min(costs) <= 2 * max(layers)
    assert cut(whole, 1) == (whole,)
    with pytest.raises(ValueError, match="33 stages of 32 layers: each stage needs a layer; use a pp of 1 to 32"):
        cut(whole, 33)
