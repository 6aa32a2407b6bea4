"""Gemma 3's configuration, as published and as transformers 5 writes it, and what its module does with it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

from jaxinfer.architecture.model_config import LinearScaling, UnsupportedModelError
from jaxinfer.models.gemma3 import Gemma3
from jaxinfer.models.registry import read_config
from jaxinfer.weights.formats.plain import Plain
from jaxinfer.weights.formats.weight_format import ModelWeightFormat
from pallas_kernels.span import FULL_ATTENTION, Span
from tests.families import checkpoint

# Of gemma-3-4b-it, all that says anything of its text model.
PUBLISHED: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}
LOCAL, WHOLE = "sliding_attention", "full_attention"


def test_what_a_published_configuration_leaves_out_is_known() -> None:
    read = read_config(PUBLISHED)
    assert (read.num_heads, read.num_kv_heads, read.head_size, read.vocab_size) == (8, 4, 256, 262_208)
    assert (read.max_position_embeddings, read.rms_norm_eps, read.tie_word_embeddings) == (131_072, 1e-6, True)
    assert (read.rope_theta, read.rope_scaling, read.family.local_rope) == (1e6, LinearScaling(8.0), (10_000.0, None))
    assert [layer for layer, span in enumerate(read.spans) if span == FULL_ATTENTION] == [5, 11, 17, 23, 29]
    assert set(read.spans) == {FULL_ATTENTION, Span(window=1024)}
    assert (read.family.query_scalar, read.soft_cap, read.family.final_soft_cap) == (256.0, None, None)


def test_old_and_new_keys_give_the_same() -> None:
    old = checkpoint.config_of("gemma_3")
    gone = ("rope_theta", "rope_local_base_freq", "rope_scaling", "sliding_window_pattern")
    new = {key: value for key, value in old.items() if key not in gone} | {
        "layer_types": [LOCAL, LOCAL, WHOLE] * 2,
        "rope_parameters": {
            WHOLE: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
            LOCAL: {"rope_type": "default", "rope_theta": 10_000.0},
        },
    }
    assert read_config(new) == read_config(old)
    changed = {**new["rope_parameters"], LOCAL: {"rope_theta": 5.0}}
    assert read_config({**new, "rope_parameters": changed}).family.local_rope == (5.0, None)


def test_a_head_of_its_own_is_had_where_the_whole_model_says_so() -> None:
    assert not read_config({**PUBLISHED, "tie_word_embeddings": False}).tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu': supported are gelu_pytorch_tanh"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True: supported is False"),
        ({"sliding_window": 0}, "sliding_window is 0: it must be a positive integer"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ({"layer_types": [LOCAL, "chunked_attention"] * 3}, "layer_types is .*'chunked_attention'.*: it must be one of full_attention"),
        ({"layer_types": [LOCAL]}, "layer_types is .* for each of 6 layers"),
        ({"query_pre_attn_scalar": -1}, "query_pre_attn_scalar is -1"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping is 0: it must be a positive number"),
        ({"attn_logit_softcapping": "high"}, "attn_logit_softcapping is 'high'"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters is .*: it must have full_attention and sliding_attention"),
        ({"rope_scaling": {"rope_type": "longrope"}}, r"rope_scaling\.rope_type is 'longrope'"),
    ],
)
def test_what_is_not_supported_is_named_with_its_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_config({**checkpoint.config_of("gemma_3"), **changes})


@pytest.mark.parametrize(("dtype", "scale"), [("float32", 2560**0.5), ("bfloat16", 50.5)])
def test_embeddings_are_scaled_by_a_root_that_is_rounded_as_the_weights_are(dtype: str, scale: float) -> None:
    config, weight_format = read_config(PUBLISHED), ModelWeightFormat(Plain(jnp.dtype(dtype)))
    model = nnx.eval_shape(lambda: Gemma3(config, weight_format, jnp.dtype("float32")))
    assert model.embedding_scale == pytest.approx(scale, rel=1e-7)
