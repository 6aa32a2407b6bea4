"""The router: every family's rule against a plain loop, and where rounding or equal scores could choose wrongly."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.architecture.model_config import Routing
from jaxinfer.layers.router import Router
from tests.layers.on_mesh import on_mesh
from tests.layers.plain_experts import route

SIZE = 24
LLAMA4 = Routing(16, 1, "sigmoid", scales_input=True)
DEEPSEEK = Routing(32, 4, "sigmoid", has_bias=True, num_groups=8, top_groups=3, normalises=True, scale=2.5)
KIMI = Routing(48, 4, "sigmoid", has_bias=True, normalises=True, scale=2.827)
QWEN3 = Routing(32, 4, "softmax", normalises=True)
UNNORMALISED = Routing(32, 4, "softmax")
GROUPS_WITHOUT_BIAS = Routing(32, 4, "sigmoid", num_groups=4, top_groups=2)
RULES = {
    "llama4": LLAMA4,
    "deepseek": DEEPSEEK,
    "kimi": KIMI,
    "qwen3": QWEN3,
    "unnormalised": UNNORMALISED,
    "groups_without_bias": GROUPS_WITHOUT_BIAS,
}


@pytest.mark.parametrize("name", RULES)
def test_each_rule_chooses_and_weighs_as_a_plain_loop_does(name: str) -> None:
    routing, random = RULES[name], np.random.default_rng(0)
    values = {"kernel": random.standard_normal((SIZE, routing.num_experts), np.float32)}
    if routing.has_bias:
        values["bias"] = random.standard_normal(routing.num_experts).astype(np.float32)  # as large as scores: it changes most choices
    x = random.standard_normal((57, SIZE), np.float32) / 4
    experts, weights = on_mesh(Router(SIZE, routing), values)(x)
    assert experts.dtype == np.int32 and weights.dtype == np.float32
    expected = route(routing, np.float64(x) @ values["kernel"], values.get("bias"))
    for found_experts, found_weights, of_token in zip(experts, weights, expected, strict=True):
        assert dict(zip(found_experts.tolist(), found_weights, strict=True)) == pytest.approx(of_token, rel=1e-5)


def test_scores_that_round_alike_still_go_by_their_logits() -> None:
    logits = np.array([[30.0, 31.0, 32.0, 29.0]], np.float32)  # sigmoids that are all 1 in float32
    experts, weights = on_mesh(Router(4, Routing(4, 2, "sigmoid")), {"kernel": np.eye(4)})(logits)
    assert experts.tolist() == [[2, 1]] and weights.tolist() == [[1.0, 1.0]]


def test_of_experts_that_score_alike_the_first_ones_are_taken() -> None:
    for routing in (Routing(8, 3, "softmax"), Routing(8, 3, "sigmoid", has_bias=True, num_groups=4, top_groups=2)):
        values = {"kernel": np.zeros((4, 8))} | ({"bias": np.zeros(8)} if routing.has_bias else {})
        experts, _ = on_mesh(Router(4, routing), values)(np.ones((2, 4), np.float32))
        assert experts.tolist() == [[0, 1, 2]] * 2


def test_bfloat16_activations_are_scored_in_float32() -> None:
    """Two experts whose logits differ by less than bfloat16 tells apart."""
    kernel = np.array([[1.0, 1.0 + 2**-12], [0.0, 0.0]], np.float32)
    x = np.array([[3.0, 1.0]], np.float32).astype("bfloat16")
    experts, _ = on_mesh(Router(2, Routing(2, 1, "softmax")), {"kernel": kernel})(x)
    assert experts.tolist() == [[1]]


def test_a_row_that_is_no_number_leaves_the_others_experts_as_they_are() -> None:
    random = np.random.default_rng(1)
    values = {"kernel": random.standard_normal((SIZE, 32), np.float32), "bias": random.standard_normal(32).astype(np.float32)}
    router, x = on_mesh(Router(SIZE, DEEPSEEK), values), random.standard_normal((5, SIZE), np.float32)
    experts, weights = router(x)
    x[3] = np.nan
    with_nan, weights_with_nan = router(x)
    others = [0, 1, 2, 4]
    np.testing.assert_array_equal(with_nan[others], experts[others])
    np.testing.assert_array_equal(weights_with_nan[others], weights[others])
    assert ((with_nan >= 0) & (with_nan < 32)).all()
