"""Shapes that ship: each is read, and has as many parameters as its name says."""

from __future__ import annotations

import math

import jax.numpy as jnp
import pytest

from jaxinfer.architecture.known_models import known_shapes, model_shape
from jaxinfer.architecture.model_config import UnsupportedModelError
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.models.registry import read_config
from jaxinfer.weights.formats.plain import Plain
from jaxinfer.weights.formats.weight_format import ModelWeightFormat
from jaxinfer.weights.template import make_template

# Billions of parameters, as published; DeepSeek-V3's without its module for one more token, which no device holds.
PARAMETERS = {
    "smollm2-135m": 0.1345,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.55,
    "llama-3.1-405b": 405.85,
    "llama-4-scout": 107.77,  # 109 with its images' part
    "kimi-k2.5": 1026.4,
    "deepseek-v3": 671.0,
    "qwen3-235b-a22b": 235.1,
    "gemma-3-27b": 27.0,
}
LASTING_BYTES = {"llama-3.1-8b": 131072, "llama-4-scout": 49152, "kimi-k2.5": 70272, "deepseek-v3": 70272, "gemma-3-27b": 81920}


def test_every_shape_is_checked() -> None:
    assert sorted(PARAMETERS) == known_shapes()


@pytest.mark.parametrize("name", PARAMETERS)
def test_it_has_as_many_parameters_as_its_name_says(name: str) -> None:
    template = make_template(read_config(model_shape(name)), ModelWeightFormat(Plain(jnp.dtype("bfloat16"))))
    count = sum(math.prod(leaf.shape) for leaf in template.leaves)
    assert count / 1e9 == pytest.approx(PARAMETERS[name], rel=5e-3)


@pytest.mark.parametrize("name", LASTING_BYTES)
def test_what_a_token_of_a_long_context_costs(name: str) -> None:
    assert PageSpec.of(read_config(model_shape(name)), 16, 2).lasting_token_bytes == LASTING_BYTES[name]


def test_a_name_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(UnsupportedModelError, match=r"no shape of a model 'gpt-2': there are deepseek-v3, .*smollm2-135m"):
        model_shape("gpt-2")
