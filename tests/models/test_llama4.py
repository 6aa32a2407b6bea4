"""How Llama 4's layers are read from a configuration, of transformers 4 or 5."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.architecture.known_models import model_shape
from jaxinfer.architecture.model_config import UnsupportedModelError
from jaxinfer.models.registry import read_config
from pallas_kernels.span import FULL_ATTENTION, Span

TEXT: dict[str, Any] = model_shape("llama-4-scout")["text_config"] | {"architectures": ["Llama4ForCausalLM"], "num_hidden_layers": 6}
CHUNK = Span(chunk=8192)


def test_layers_without_positions_attend_to_everything() -> None:
    config = read_config(TEXT | {"no_rope_layers": [1, 0, 1, 1, 0, 1]})
    assert config.family.is_rotated == (True, False, True, True, False, True)
    assert config.spans == (CHUNK, FULL_ATTENTION, CHUNK, CHUNK, FULL_ATTENTION, CHUNK)


@pytest.mark.parametrize("absent", [[], None])
def test_one_in_so_many_has_no_positions_where_no_list_says_which(absent: list[int] | None) -> None:
    assert read_config(TEXT | {"no_rope_layers": absent}).family.is_rotated == (True, True, True, False, True, True)
    assert read_config(TEXT | {"no_rope_layers": absent, "no_rope_layer_interval": 2}).family.is_rotated == (True, False) * 3


def test_layer_types_say_what_is_attended_to_whatever_rotates() -> None:
    config = read_config(TEXT | {"layer_types": ["full_attention"] * 5 + ["chunked_attention"]})
    assert config.spans == (FULL_ATTENTION,) * 5 + (CHUNK,)
    assert config.family.is_rotated == (True, True, True, False, True, True)


def test_without_a_chunk_size_every_layer_attends_to_everything() -> None:
    assert set(read_config(TEXT | {"attention_chunk_size": None}).spans) == {FULL_ATTENTION}


def test_which_layers_have_experts() -> None:
    assert read_config(TEXT | {"interleave_moe_layer_step": 2}).family.has_experts == (False, True) * 3
    assert read_config(TEXT | {"moe_layers": [0, 5]}).family.has_experts == (True, False, False, False, False, True)
    assert read_config(TEXT | {"moe_layers": []}).family.has_experts == (False,) * 6


def test_what_is_tempered_and_normalised_can_be_left_out() -> None:
    config = read_config(TEXT | {"attn_temperature_tuning": False, "use_qk_norm": False})
    assert (config.family.tempering, config.family.normalises) == (None, False)
    assert read_config(TEXT | {"attn_temperature_tuning": 4}).family.tempering == (8192.0, 0.1)  # as first published


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"no_rope_layers": [1, 0]}, r"no_rope_layers is \[1, 0\]: it must be 0 or 1 for each of 6 layers"),
        ({"no_rope_layers": [1, 1, 1, 1, 1, 2]}, "no_rope_layers is .*: it must be 0 or 1"),
        ({"layer_types": ["sliding_attention"] * 6}, "layer_types is .*: it must be one of full_attention, chunked_attention"),
        ({"attention_chunk_size": 0}, "attention_chunk_size is 0: it must be a positive integer"),
        ({"floor_scale": 0}, "floor_scale is 0: it must be a positive number"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok is 17: num_local_experts is 16"),
        ({"moe_layers": 3}, "moe_layers is 3: it must list layers"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
    ],
)
def test_what_is_not_supported_is_named_with_its_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_config(TEXT | changes)
