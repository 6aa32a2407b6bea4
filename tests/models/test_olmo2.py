"""OLMo 2's configuration: the default that is not Llama's, under the keys of both generations."""

from __future__ import annotations

from typing import Any

from jaxinfer.models.registry import read_config
from tests.checkpoints.tiny import CONFIG

OLMO2: dict[str, Any] = {**CONFIG, "architectures": ["Olmo2ForCausalLM"]}


def test_the_norms_epsilon_is_its_classs_where_none_is_given() -> None:
    without = {key: value for key, value in OLMO2.items() if key != "rms_norm_eps"}
    assert read_config(without).rms_norm_eps == read_config({**without, "rms_norm_eps": 1e-5}).rms_norm_eps == 1e-5
    assert read_config({**without, "rms_norm_eps": 1e-6}).rms_norm_eps == 1e-6


def test_rotation_is_read_from_old_and_new_keys() -> None:
    without = {key: value for key, value in OLMO2.items() if key != "rope_theta"}
    old = read_config({**without, "rope_theta": 500000, "rope_scaling": None})
    assert old == read_config({**without, "rope_parameters": {"rope_theta": 500000, "rope_type": "default"}})
    assert (old.rope_theta, old.rope_scaling) == (500000.0, None)
