"""Qwen3's configuration: where its windows begin, and which layers have experts."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.architecture.model_config import Routing, UnsupportedModelError
from jaxinfer.models.qwen3 import Qwen3Experts
from jaxinfer.models.registry import read_config
from pallas_kernels.span import FULL_ATTENTION, Span
from tests.families import checkpoint

DENSE, EXPERTS = checkpoint.config_of("qwen3"), checkpoint.config_of("qwen3_moe")
# Of Qwen3-30B-A3B.
PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_a_published_configuration_has_experts_in_every_layer_and_no_window() -> None:
    read = read_config(PUBLISHED)
    assert read.family == Qwen3Experts(Routing(128, 8, "softmax", normalises=True), 768, tuple(range(48)))
    assert read.layer_spans == (FULL_ATTENTION,) * 48
    assert (read.head_size, read.num_kv_heads) == (128, 4)


def test_experts_are_in_each_so_many_layers_but_for_those_that_are_named() -> None:
    assert read_config(EXPERTS).family.layers == (1,)  # of 4, each second, but for the last
    assert read_config({**EXPERTS, "mlp_only_layers": None}).family.layers == (1, 3)
    assert read_config({**EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": [0]}).family.layers == (1, 2, 3)
    assert not read_config({**EXPERTS, "norm_topk_prob": False}).family.routing.normalises


def test_the_number_of_experts_goes_by_two_names() -> None:
    new = {key: value for key, value in EXPERTS.items() if key != "num_experts"} | {"num_local_experts": 8}
    assert read_config(new) == read_config(EXPERTS)


def test_a_window_is_in_the_later_layers_of_a_dense_model_and_in_all_of_one_of_experts() -> None:
    window = Span(window=20)
    assert read_config(DENSE).spans == (FULL_ATTENTION, window, window)
    assert read_config({**DENSE, "max_window_layers": 0}).spans == (window,) * 3
    assert read_config({**DENSE, "max_window_layers": 3}).layer_spans == (FULL_ATTENTION,) * 3
    assert read_config({**DENSE, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}).spans[0] == window
    assert read_config({**DENSE, "use_sliding_window": False}).layer_spans == (FULL_ATTENTION,) * 3
    assert set(read_config({**EXPERTS, "use_sliding_window": True, "sliding_window": 20}).spans) == {window}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**EXPERTS, "num_experts_per_tok": 9}, "num_experts_per_tok is 9: there are 8 experts"),
        ({**EXPERTS, "num_experts": 0}, "num_experts is 0: it must be a positive integer"),
        ({**EXPERTS, "decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({**EXPERTS, "moe_intermediate_size": None}, "moe_intermediate_size is None"),
        ({**EXPERTS, "mlp_only_layers": "all"}, "mlp_only_layers is 'all': it must be a list of layers"),
        ({**DENSE, "sliding_window": -4}, "sliding_window is -4"),
        (
            {**DENSE, "use_sliding_window": False, "layer_types": ["sliding_attention"] * 3},
            "layer_types is .*must be one of full_attention",
        ),
        ({**DENSE, "hidden_act": "gelu"}, "hidden_act is 'gelu': supported are silu"),
    ],
)
def test_what_is_not_supported_is_named_with_its_value(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_config(config)
