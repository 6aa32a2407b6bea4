"""config.json to ArchitectureConfig: both generations of transformers' keys, and what is not supported by name."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.architecture.model_config import ArchitectureConfig, RopeScaling, UnsupportedModelError
from jaxinfer.models.registry import read_config
from pallas_kernels.span import Span
from tests.checkpoints.tiny import CONFIG

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def test_every_size_is_taken_over() -> None:
    config = read_config(CONFIG)
    assert config == ArchitectureConfig(
        architecture="LlamaForCausalLM",
        num_layers=2,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_size=16,
        mlp_size=96,
        vocab_size=40,
        rope_theta=10000.0,
        rope_scaling=None,
        rms_norm_eps=1e-5,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
    )


def test_old_and_new_rope_keys_give_the_same() -> None:
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    without = {key: value for key, value in CONFIG.items() if key != "rope_theta"}
    old = read_config({**without, "rope_theta": 500000.0, "rope_scaling": LLAMA3})
    older = read_config({**without, "rope_theta": 500000, "rope_scaling": {**LLAMA3, "type": "llama3"}})
    new = read_config({**without, "rope_parameters": {**LLAMA3, "rope_theta": 500000.0}})
    assert old == older == new
    assert (new.rope_theta, new.rope_scaling) == (500000.0, scaling)


def test_left_out_keys_take_transformers_own_defaults() -> None:
    config = read_config({k: v for k, v in CONFIG.items() if k not in ("num_key_value_heads", "head_dim", "tie_word_embeddings")})
    assert (config.num_kv_heads, config.head_size, config.tie_word_embeddings) == (4, 16, False)
    assert read_config({**CONFIG, "head_dim": None}).head_size == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            r"architectures is \['MambaForCausalLM'\]: supported are DeepseekV3ForCausalLM, .*LlamaForCausalLM, .*MistralForCausalLM",
        ),
        ({"architectures": None}, "architectures is None: supported are"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu': supported are silu"),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
            r"rope_scaling\.rope_type is 'longrope': supported are default, linear",
        ),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor is None"),
        ({"rope_scaling": {"type": "yarn", "factor": "big"}}, r"rope_scaling\.factor is 'big'"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
            r"rope_parameters\.low_freq_factor is None: it must be a positive number",
        ),
        ({"rope_scaling": 3}, "rope_scaling is 3: it must be an object or null"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None: it must be a positive integer"),
        ({"hidden_size": "big"}, "hidden_size is 'big': it must be a positive integer"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0: it must be a positive number"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads is 3: it must divide num_attention_heads \(4\)"),
        ({"head_dim": 15}, "head_dim is 15: it must be even"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window is 0: it must be a positive integer"),
    ],
)
def test_what_is_not_supported_is_named_with_its_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_config({**CONFIG, **changes})


def test_a_window_as_long_as_the_context_is_no_window() -> None:
    mistral = {**CONFIG, "architectures": ["MistralForCausalLM"]}
    assert read_config({**mistral, "sliding_window": 4096}).spans == read_config({**mistral, "sliding_window": None}).spans == ()
    assert read_config({**mistral, "sliding_window": 64}).spans == (Span(window=64),) * CONFIG["num_hidden_layers"]
