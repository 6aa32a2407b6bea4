"""Weights on a mesh whose devices don't divide the model's KV heads: which values lie where, and the same scores in every form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from checkpoints.hub import open_source
from jaxinfer.models.registry import config_of
from jaxinfer.weights.load import random_weights
from sharding.rules import TENSOR_PARALLEL
from tests import model_on_mesh, tiny_model

HEADS, KV_HEADS = 9, 3
GROUP = HEADS // KV_HEADS
TOKENS = list(range(3, 40))
# How far scores, which vary by 4, may be off on average, by what matrices are kept as: sums are in another order, which narrow types round otherwise.
TOLERANCES = {"float32": 1e-5, "bfloat16": 0.03, "int8": 1e-3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's heads, and biases."""
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "attention_bias": True}
    return tiny_model.write(tmp_path_factory.mktemp("models") / "three", **heads)


@pytest.mark.parametrize("num_devices", [2, 8])
def test_each_head_has_the_checkpoints_values_and_the_others_zeros(folder: Path, num_devices: int) -> None:
    made = model_on_mesh.put(folder, tuple(range(num_devices)), is_packed=False)
    heads = made.template.config.heads
    assert heads is not None
    weights = {leaf.name: np.asarray(array) for leaf, array in zip(made.template.leaves, made.weights, strict=True)}
    theirs = tiny_model.tensors(
        {**tiny_model.CONFIG, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "attention_bias": True}
    )
    for layer in range(tiny_model.LAYERS):
        of_layer = {name.split(".", 4)[4]: values for name, values in theirs.items() if f"layers.{layer}.self_attn" in name}
        ours = f"blocks.{layer}.attention"
        for kind, values in (("kernel", weights[f"{ours}.qkv.kernel"]), ("bias", weights[f"{ours}.qkv.bias"][None])):
            by_head = {
                one: of_layer[f"{one}_proj.{'weight' if kind == 'kernel' else 'bias'}"].reshape(count, tiny_model.HEAD, -1)
                for one, count in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
            }
            assert values.shape[1:] == (heads.num_kv_heads, heads.group + 2, tiny_model.HEAD)
            for place, kv_head in enumerate(heads.kv_heads):
                queries = heads.query_heads[place * heads.group : (place + 1) * heads.group]
                sources = [*(("q", head) for head in queries), ("k", kv_head), ("v", kv_head)]
                for at, (one, head) in enumerate(sources):
                    np.testing.assert_array_equal(values[:, place, at], 0 if head is None else by_head[one][head].T)
        out = of_layer["o_proj.weight"].T.reshape(HEADS, tiny_model.HEAD, -1)
        for place, head in enumerate(heads.query_heads):
            np.testing.assert_array_equal(weights[f"{ours}.out.kernel"][place], 0 if head is None else out[head])


@pytest.mark.parametrize(
    ("dtype", "is_packed"), [("float32", True), ("float32", False), ("bfloat16", True), ("int8", True), ("int8", False)]
)
def test_scores_are_one_devices_in_every_form(folder: Path, dtype: str, is_packed: bool) -> None:
    one, eight = (
        model_on_mesh.put(folder, device_ids, dtype=dtype, is_packed=is_packed).plain_logits(TOKENS)
        for device_ids in ((0,), tuple(range(8)))
    )
    assert np.abs(eight - one).mean() < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_made_up_weights_are_one_devices_too(folder: Path, dtype: str) -> None:
    scores = []
    for num_devices in (1, 8):
        made = model_on_mesh.put(folder, tuple(range(num_devices)), dtype=dtype)
        weights = random_weights(made.template, made.mesh, TENSOR_PARALLEL)
        scores.append(model_on_mesh.OnMesh(made.template, made.mesh, weights, made.pool).plain_logits(TOKENS))
    assert scores[0].std() > 0.1
    for found in scores[1:]:
        np.testing.assert_allclose(found, scores[0], atol=1e-3)


def test_where_devices_divide_the_heads_nothing_is_another(folder: Path) -> None:
    own = config_of(open_source(folder))
    assert own.on_devices(1) is own and own.on_devices(3) is own
    assert own.on_devices(2).on_devices(8) == own.on_devices(8) != own.on_devices(2)
    assert own.on_devices(8).on_devices(3) == own
    assert own.on_devices(8).with_own_heads() == own
