"""Linear layers in tiles of lossless bfloat16: the scores of plain bfloat16, on one device and on two."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from checkpoints.safetensors_source import SafetensorsSource
from checkpoints.source import TensorSource
from jaxinfer.architecture.model_config import ArchitectureConfig
from jaxinfer.models.registry import read_config
from jaxinfer.reference_forward import ReferenceForward
from jaxinfer.weights.formats.plain import Plain
from jaxinfer.weights.formats.tiled import Tiled
from jaxinfer.weights.formats.weight_format import ExpertFormat, MatrixAxes, ModelWeightFormat
from jaxinfer.weights.load import load_weights, random_weights
from jaxinfer.weights.template import make_template
from sharding.mesh import TENSOR, make_mesh
from sharding.rules import TENSOR_PARALLEL, rules_for
from tests import tiny_model
from tests.families import checkpoint, deepseek
from tests.families.test_quantised_experts import TEXT

BFLOAT16 = Plain(jnp.dtype(jnp.bfloat16))
# Heads of 64: queries, key and value of a KV head are cut into tiles together.
CONFIG = read_config(
    tiny_model.CONFIG | {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512}
)


def logits(
    config: ArchitectureConfig, weight_format: ModelWeightFormat, devices: tuple[int, ...], ep: int = 1, source: TensorSource | None = None
) -> tuple[Any, set[str]]:
    """Of a few tokens, by random weights where there is no checkpoint; and the names of the matrices in tiles."""
    template = make_template(config.on_devices(len(devices)), weight_format, jnp.dtype("float32"))
    mesh, rules = make_mesh(devices), rules_for("decode", ep)
    weights = random_weights(template, mesh, rules) if source is None else load_weights(template, source, mesh, rules)
    in_tiles = {path for leaf in template.leaves if leaf.dtype == jnp.int32 for path in leaf.paths}
    return ReferenceForward([(template, mesh)], lambda: [weights]).logits(list(range(3, 12))), in_tiles


@pytest.mark.parametrize("devices", [(0,), (0, 1)], ids=str)
def test_a_models_scores_are_those_of_plain_matrices(devices: tuple[int, ...]) -> None:
    splits = tuple((axis, len(devices)) for axis in TENSOR_PARALLEL)
    formats = ModelWeightFormat(Tiled("xla", splits)), ModelWeightFormat(BFLOAT16)
    (found, in_tiles), (expected, _) = (logits(CONFIG, each, devices) for each in formats)
    layers = "attention.qkv", "attention.out", "mlp.gate_up", "mlp.down"
    assert in_tiles == {f"blocks.{block}.{layer}.kernel" for block in range(2) for layer in layers}
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("ep", [1, 2])
def test_so_are_those_of_a_checkpoints_experts(tmp_path: Path, ep: int) -> None:
    config = TEXT | {"hidden_size": 256, "num_nextn_predict_layers": 0}
    source = SafetensorsSource(deepseek.write(tmp_path / "plain", config, checkpoint.tensors(config, deepseek.shapes_of(config))))
    splits = tuple((axis, 2) for axis in rules_for("decode", ep))
    formats = ModelWeightFormat(Tiled("xla", splits), ExpertFormat(packing="lossless")), ModelWeightFormat(BFLOAT16)
    (found, in_tiles), (expected, _) = (logits(read_config(config), each, (0, 1), ep, source) for each in formats)
    assert {f"blocks.1.mlp.{name}" for name in ("experts.gate_up", "experts.down", "shared.gate_up.kernel")} <= in_tiles
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_devices_pack_what_they_hold() -> None:
    """Experts' columns are split within their outputs: XLA would gather an axis that is put together of several, with a split one inside."""
    mesh = make_mesh((0, 1))
    held = NamedSharding(mesh, PartitionSpec(None, None, TENSOR, None))
    experts = jax.ShapeDtypeStruct((2, 2, 256, 128), jnp.bfloat16, sharding=held)
    packed = PartitionSpec(None, None, TENSOR, None, None, None)
    with jax.set_mesh(mesh):
        pack = jax.jit(jax.sharding.auto_axes(lambda experts: Tiled().from_plain(experts, 3)[0], out_sharding=packed))
        compiled = pack.lower(experts).compile().as_text()
    assert not re.search(r"all-gather|all-to-all|collective-permute|all-reduce", compiled)


def test_what_no_tile_holds_is_plain() -> None:
    inputs = (("embed", 256),)
    gate_up = MatrixAxes((("gate_up", 2), ("mlp", 384)), inputs, inputs_first=True)
    assert isinstance(Tiled().for_matrix(gate_up), Tiled)
    odd = [
        (Tiled(splits=(("mlp", 2),)), gate_up),  # three tiles
        (Tiled(incompressible=frozenset([gate_up])), gate_up),
        (Tiled(), MatrixAxes((("mlp", 200),), inputs, inputs_first=True)),
        (Tiled(), MatrixAxes((("vocab", 256),), inputs, inputs_first=False)),
        (Tiled(splits=(("mlp", 2),)), MatrixAxes((("gate_up", 2), ("mlp", 192)), inputs, inputs_first=True)),  # a tile of both
    ]
    assert [each.for_matrix(axes) for each, axes in odd] == [BFLOAT16] * len(odd)
    exponents = np.random.default_rng(0).integers(-60, 0, (256, 256))
    (wide,) = Tiled().from_plain(jnp.exp2(jnp.asarray(exponents, jnp.float32)), 1)
    assert Tiled().num_misfits([wide]) > 0
