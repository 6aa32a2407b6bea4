"""Quantised experts: kept as the checkpoint has them where that can be, and what a model then computes and holds."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from checkpoints.safetensors_source import SafetensorsSource
from checkpoints.weight_map import Weight, WeightMap
from jaxinfer.architecture.model_config import Routing
from jaxinfer.layers import moe
from jaxinfer.layers.moe import MixtureOfExperts
from jaxinfer.weights.expert_packing import choose_packing
from jaxinfer.weights.formats.int8 import Int8
from jaxinfer.weights.formats.packed import Packed
from jaxinfer.weights.formats.plain import Plain
from jaxinfer.weights.formats.weight_format import ExpertFormat, ModelWeightFormat
from jaxinfer.weights.load import load_weights, random_weights
from jaxinfer.weights.template import Template, template_of
from sharding.mesh import make_mesh
from sharding.rules import EXPERT_PARALLEL, TENSOR_PARALLEL, Rules
from tests.kernels.grouped_experts import compressed_tensors_words

LAYERS, EXPERTS, SIZE, INNER = 2, 4, 128, 512
ROUTING = Routing(EXPERTS, 2, "sigmoid", has_bias=True, normalises=True)
QUANTISATION = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}}},
    },
    "bfloat16": None,
}
FLOAT32 = jnp.dtype("float32")
EXPERT = "model.layers.{layer}.mlp.experts.{expert}."
SHARED = "model.layers.{layer}.mlp.shared_experts."


class Mixtures(nnx.Module):
    """Layers of experts and nothing else."""

    weight_map = WeightMap(
        {
            "blocks.{layer}.router.kernel": Weight(("model.layers.{layer}.mlp.gate.weight",), transpose=True),
            "blocks.{layer}.router.bias": Weight(("model.layers.{layer}.mlp.gate.e_score_correction_bias",)),
            "blocks.{layer}.experts.gate_up": Weight((EXPERT + "gate_proj.weight", EXPERT + "up_proj.weight"), transpose=True, axis=-2),
            "blocks.{layer}.experts.down": Weight((EXPERT + "down_proj.weight",), transpose=True),
            "blocks.{layer}.shared.gate_up.kernel": Weight(
                (SHARED + "gate_proj.weight", SHARED + "up_proj.weight"), transpose=True, axis=-2
            ),
            "blocks.{layer}.shared.down.kernel": Weight((SHARED + "down_proj.weight",), transpose=True),
        },
        renamed=(("language_model.model.", "model."),),
    )

    def __init__(self, config: None, weight_format: ModelWeightFormat, activation_dtype: jnp.dtype) -> None:
        self.blocks = nnx.List([MixtureOfExperts(SIZE, INNER, ROUTING, weight_format, shared_size=INNER) for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = x + block(x)
        return x


def stored(name: str, shape: tuple[int, int], kind: str, random: np.random.Generator) -> dict[str, np.ndarray]:
    """A matrix as such a checkpoint has it."""
    outputs, inputs = shape
    if kind == "int4":
        return {
            f"{name}_packed": compressed_tensors_words(random.integers(-8, 8, shape)),
            f"{name}_scale": random.uniform(0.005, 0.02, (outputs, inputs // 32)).astype(ml_dtypes.bfloat16),
            f"{name}_shape": np.array(shape, np.int32),
        }
    if kind == "fp8":
        scale = random.uniform(0.02, 0.1, (outputs // 128, inputs // 128)).astype(np.float32)
        return {name: random.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn), f"{name}_scale_inv": scale}
    return {name: (random.standard_normal(shape) / 16).astype(ml_dtypes.bfloat16)}


def write(folder: Path, kind: str) -> SafetensorsSource:
    random, tensors = np.random.default_rng(0), {}
    for layer in range(LAYERS):
        mlp = f"language_model.model.layers.{layer}.mlp."
        tensors[mlp + "gate.weight"] = random.standard_normal((EXPERTS, SIZE)).astype(ml_dtypes.bfloat16)
        tensors[mlp + "gate.e_score_correction_bias"] = random.standard_normal(EXPERTS).astype(np.float32)
        for module, its_kind in (*((f"experts.{expert}", kind) for expert in range(EXPERTS)), ("shared_experts", "bfloat16")):
            for part, shape in (("gate", (INNER, SIZE)), ("up", (INNER, SIZE)), ("down", (SIZE, INNER))):
                tensors |= stored(f"{mlp}{module}.{part}_proj.weight", shape, its_kind, random)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": QUANTISATION[kind]}))
    return SafetensorsSource(folder)


def laid_out(weight_format: ModelWeightFormat) -> Template:
    return template_of(Mixtures, None, weight_format, FLOAT32)


def outputs(template: Template, source: SafetensorsSource, device_ids: tuple[int, ...], rules: Rules = TENSOR_PARALLEL) -> np.ndarray:
    mesh = make_mesh(device_ids)
    weights = load_weights(template, source, mesh, rules)
    x = np.random.default_rng(1).standard_normal((21, SIZE)).astype(np.float32)
    with jax.set_mesh(mesh):
        return np.asarray(jax.jit(lambda weights, x: template.merge(weights)(x))(weights, x))


# By its own weights' type each: int4's products with scales are bfloat16.
ALIKE = {"int4": jnp.dtype("bfloat16"), "fp8": FLOAT32}


@pytest.mark.parametrize(
    ("device_ids", "rules"),
    [
        ((0,), TENSOR_PARALLEL),
        ((0, 1), TENSOR_PARALLEL),
        ((4, 5, 6, 7), TENSOR_PARALLEL),
        ((0, 1), EXPERT_PARALLEL),
        ((4, 5, 6, 7), EXPERT_PARALLEL),
    ],
    ids=["1", "2", "4", "2 of whole ones", "4 of whole ones"],
)
@pytest.mark.parametrize("kind", ALIKE)
def test_packed_experts_compute_what_dequantised_ones_do(tmp_path: Path, kind: str, device_ids: tuple[int, ...], rules: Rules) -> None:
    source = write(tmp_path, kind)
    plain = laid_out(ModelWeightFormat(Plain(FLOAT32), experts=ExpertFormat(ALIKE[kind])))
    packed = laid_out(ModelWeightFormat(Plain(FLOAT32), experts=ExpertFormat(packing=kind)))
    expected = outputs(plain, source, (0,))
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(outputs(packed, source, device_ids, rules), expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("kind", ALIKE)
def test_packed_experts_go_with_integers_and_packed_matrices(tmp_path: Path, kind: str) -> None:
    source, experts = write(tmp_path, kind), ExpertFormat(packing=kind)
    expected = outputs(laid_out(ModelWeightFormat(Plain(FLOAT32), experts=experts)), source, (0,))
    for weight_format, most in (
        (ModelWeightFormat(Packed(FLOAT32), experts), 1e-5),
        (ModelWeightFormat(Int8(), experts=experts), 2e-2),
    ):
        assert np.abs(outputs(laid_out(weight_format), source, (0, 1)) - expected).max() < most * np.abs(expected).max()


def test_plain_experts_beside_integers_are_loaded_as_bfloat16(tmp_path: Path) -> None:
    source = write(tmp_path, "bfloat16")
    expected = outputs(laid_out(ModelWeightFormat(Plain(FLOAT32))), source, (0,))
    beside_integers = laid_out(ModelWeightFormat(Int8()))
    assert {leaf.dtype for leaf in beside_integers.leaves if ".experts." in leaf.name} == {jnp.dtype("bfloat16")}
    assert np.abs(outputs(beside_integers, source, (0, 1)) - expected).max() < 2e-2 * np.abs(expected).max()


@pytest.mark.parametrize(("kind", "bits"), [("int4", 4.5), ("fp8", 8 + 8 / 128)])
def test_what_is_held_and_read_is_what_is_stored(tmp_path: Path, kind: str, bits: float) -> None:
    source, mesh = write(tmp_path, kind), make_mesh((0, 1))
    template = laid_out(ModelWeightFormat(Plain(FLOAT32), experts=ExpertFormat(packing=kind)))
    weights = load_weights(template, source, mesh, TENSOR_PARALLEL)
    held = sum(w.addressable_shards[0].data.nbytes for leaf, w in zip(template.leaves, weights, strict=True) if leaf.part)
    num_weights = LAYERS * EXPERTS * 3 * SIZE * INNER
    assert held == num_weights * bits / 8 / 2
    of_file = sum(source.stored(name).num_bytes for name in source.names())
    assert of_file * 0.99 < source.bytes_read <= of_file


def test_packing_is_the_checkpoints(tmp_path: Path) -> None:
    template = laid_out(ModelWeightFormat(Plain(FLOAT32)))
    for kind, packing in (("int4", "int4"), ("fp8", "fp8"), ("bfloat16", None)):
        (folder := tmp_path / kind).mkdir()
        assert choose_packing(template, write(folder, kind), (1, 4)) == packing


def test_experts_that_no_tile_divides_stay_plain_and_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, template = write(tmp_path, "fp8"), laid_out(ModelWeightFormat(Plain(FLOAT32)))
    with caplog.at_level(logging.INFO):
        assert choose_packing(template, source, (1, 8)) is None
    assert "stored as float32 (their expert_mlp axis has 64 on a device, of 8: only multiples of 128 are packed)" in caplog.text


def test_scales_that_would_have_to_be_rounded_leave_experts_plain(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, template = write(tmp_path, "int4"), laid_out(ModelWeightFormat(Plain(FLOAT32)))
    tell, name = source.stored, "language_model.model.layers.1.mlp.experts.3.down_proj.weight"

    def with_float32(asked: str):
        found = tell(asked)
        if asked != name:
            return found
        return replace(found, parts={**found.parts, "weight_scale": replace(found.parts["weight_scale"], dtype=np.dtype(np.float32))})

    source.stored = with_float32
    with caplog.at_level(logging.INFO):
        assert choose_packing(template, source, (1,)) is None
    assert "the checkpoint's weight_scale is bfloat16 and float32: only bfloat16 is packed" in caplog.text


def test_dealt_out_packed_experts_come_together_by_an_all_to_all_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, template = write(tmp_path, "int4"), laid_out(ModelWeightFormat(Plain(FLOAT32), experts=ExpertFormat(packing="int4")))
    expected = outputs(template, source, (0, 1), EXPERT_PARALLEL)
    monkeypatch.setattr(moe, "choose", lambda mixture, link: ("all_to_all", "a test says so"))
    found = outputs(template, source, (0, 1), EXPERT_PARALLEL)
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("rules", [TENSOR_PARALLEL, EXPERT_PARALLEL], ids=["columns", "whole"])
@pytest.mark.parametrize("kind", ALIKE)
def test_made_up_packed_experts_are_the_same_on_every_mesh(kind: str, rules: Rules) -> None:
    template = laid_out(ModelWeightFormat(Plain(FLOAT32), experts=ExpertFormat(packing=kind)))
    one, two = (random_weights(template, make_mesh(ids), rules) for ids in ((0,), (0, 1)))
    for leaf, a, b in zip(template.leaves, one, two, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=leaf.name)
    assert len({np.asarray(a).tobytes()[:64] for leaf, a in zip(template.leaves, one, strict=True) if leaf.part}) > LAYERS
