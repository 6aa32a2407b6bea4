"""Mixtures of experts: against a plain loop over tokens and experts, under uneven loads, and split over devices."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.architecture.model_config import Routing
from jaxinfer.layers.moe import Experts, MixtureOfExperts, unsupported_reason
from jaxinfer.weights.formats.int8 import Int8
from jaxinfer.weights.formats.plain import Plain
from jaxinfer.weights.formats.weight_format import ExpertFormat, ModelWeightFormat
from tests.layers.on_mesh import on_mesh, shapes
from tests.layers.plain_experts import mixture, silu

SIZE, INNER = 32, 24
FLOAT32 = ModelWeightFormat(Plain(jnp.dtype("float32")))
BFLOAT16 = jnp.dtype("bfloat16")
DEEPSEEK = Routing(16, 3, "sigmoid", has_bias=True, num_groups=4, top_groups=2, normalises=True, scale=2.5)
KINDS = {
    "llama4": (Routing(8, 1, "sigmoid", scales_input=True), 40),
    "deepseek": (DEEPSEEK, 48),
    "qwen3": (Routing(8, 2, "softmax", normalises=True), None),
    "scaled_inputs_of_several": (Routing(8, 3, "sigmoid", scales_input=True), None),
}


def made(layer, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape, np.float32) / 4 for name, shape in shapes(layer).items()}


def rows(num_tokens: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_tokens, SIZE), np.float32)


@pytest.mark.parametrize("num_tokens", [1, 7, 130])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_what_a_plain_loop_makes_of_it(kind: str, num_tokens: int) -> None:
    routing, shared_size = KINDS[kind]
    layer = MixtureOfExperts(SIZE, INNER, routing, FLOAT32, shared_size=shared_size)
    values, x = made(layer), rows(num_tokens)
    found = on_mesh(layer, values)(x)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, mixture(routing, values, x), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("devices", [(0, 1), (4, 5, 6, 7)])
@pytest.mark.parametrize("kind", KINDS)
def test_split_over_devices_it_is_what_one_device_makes_of_it(kind: str, devices: tuple[int, ...]) -> None:
    routing, shared_size = KINDS[kind]
    layer = MixtureOfExperts(SIZE, INNER, routing, FLOAT32, shared_size=shared_size)
    values, x = made(layer), rows(19)
    one, several = on_mesh(layer, values)(x), on_mesh(layer, values, devices)(x)
    np.testing.assert_allclose(several, one, atol=1e-5, rtol=1e-5)


def one_expert(values: dict[str, np.ndarray], expert: int, x: np.ndarray) -> np.ndarray:
    gate, up = np.moveaxis(np.tensordot(np.float64(x), values["gate_up"][expert], 1), -2, 0)
    return (silu(gate) * up) @ values["down"][expert]


def weighted(values: dict[str, np.ndarray], x: np.ndarray, chosen: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Each row's sum over its experts."""
    out = np.zeros(x.shape)
    for token, place in np.ndindex(chosen.shape):
        out[token] += weights[token, place] * one_expert(values, chosen[token, place], x[token])
    return out


LOADS = {
    "all_to_the_first": lambda random: np.zeros((37, 1), int),
    "all_to_the_last": lambda random: np.full((37, 1), 7),
    "most_have_none": lambda random: random.choice([2, 5], (37, 1)),
    "one_token_of_many": lambda random: random.permutation(8)[None, :5],
    "one_token_of_one": lambda random: np.array([[3]]),
    "every_expert_for_every_token": lambda random: np.stack([random.permutation(8) for _ in range(9)]),
    "one_has_all_but_one": lambda random: np.array([[6]] * 64 + [[0]]),
}


@pytest.mark.parametrize("load", LOADS)
def test_loads_however_uneven(load: str) -> None:
    random = np.random.default_rng(2)
    chosen = LOADS[load](random).astype(np.int32)
    weights = random.uniform(0.1, 2, chosen.shape).astype(np.float32)
    layer = Experts(SIZE, INNER, Routing(8, chosen.shape[1], "softmax"), FLOAT32)
    values, x = made(layer), rows(len(chosen))
    expected = weighted(values, x, chosen, weights)
    np.testing.assert_allclose(on_mesh(layer, values)(x, chosen, weights), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("devices", [(0,), (0, 1)])
def test_rows_that_are_no_numbers_spoil_no_others(devices: tuple[int, ...]) -> None:
    layer = MixtureOfExperts(SIZE, INNER, DEEPSEEK, FLOAT32, shared_size=48)
    run, x = on_mesh(layer, made(layer), devices), rows(21)
    clean = run(x)
    x[[2, 17, 20]] = np.array([[np.nan], [np.inf], [np.nan]])
    found = run(x)
    others = np.delete(np.arange(21), [2, 17, 20])
    np.testing.assert_array_equal(found[others], clean[others])
    assert not np.isfinite(found[[2, 20]]).any()


def test_what_a_token_comes_out_as_depends_on_no_other() -> None:
    """Alone or among others that fill its experts, bit for bit: tokens of a batch are different requests'."""
    layer = MixtureOfExperts(SIZE, INNER, DEEPSEEK, FLOAT32)
    run, x = on_mesh(layer, made(layer)), rows(32)
    other = rows(32, seed=9)
    other[11] = x[11]
    np.testing.assert_array_equal(run(x)[11], run(other)[11])


def test_bfloat16_matrices_are_close_and_read_as_they_are() -> None:
    """Rows in float32, as a CPU has them: no copy of the experts is made in another type."""
    routing = Routing(64, 2, "softmax", normalises=True)
    layer = Experts(SIZE, INNER, routing, ModelWeightFormat(Plain(BFLOAT16)))
    values = {name: value.astype("bfloat16").astype(np.float32) for name, value in made(layer).items()}
    random, x = np.random.default_rng(3), rows(12)
    chosen, weights = random.integers(0, 64, (12, 2), np.int32), random.uniform(0, 1, (12, 2)).astype(np.float32)
    expected = weighted(values, x, chosen, weights)
    found = on_mesh(layer, values)(x, chosen, weights)
    assert found.dtype == np.float32
    assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()


def test_experts_of_a_model_of_integers_are_bfloat16() -> None:
    layer = MixtureOfExperts(SIZE, INNER, DEEPSEEK, ModelWeightFormat(Int8()), shared_size=48)
    router, experts, shared = layer.router, layer.experts, layer.shared
    assert [param.dtype for param in (router.kernel, router.bias)] == [jnp.float32] * 2
    assert [param.dtype for param in (experts.gate_up, experts.down)] == [jnp.bfloat16] * 2
    assert shared.down.kernel.dtype == jnp.int8


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_activations_stay_bfloat16(kind: str) -> None:
    """As on a GPU: what each token comes out as is rounded, which experts it goes to is not."""
    routing, shared_size = KINDS[kind]
    layer = MixtureOfExperts(SIZE, INNER, routing, ModelWeightFormat(Plain(BFLOAT16)), shared_size=shared_size)
    values, x = made(layer), rows(40).astype(BFLOAT16)
    values = {name: value if name.startswith("router") else value.astype(BFLOAT16).astype(np.float32) for name, value in values.items()}
    found, expected = on_mesh(layer, values, (0, 1))(x), mixture(routing, values, x.astype(np.float32))
    assert found.dtype == BFLOAT16
    assert np.abs(found.astype(np.float32) - expected).max() < 0.03 * np.abs(expected).max()


def test_experts_run_by_the_backend_that_the_form_names() -> None:
    layer = Experts(SIZE, INNER, Routing(4, 1, "softmax"), ModelWeightFormat(Plain(BFLOAT16), experts=ExpertFormat(backend="mosaic_gpu")))
    with pytest.raises(ValueError, match="mosaic_gpu can't run: it has no kernel for 32 inputs and 48 outputs"):
        on_mesh(layer, made(layer))(rows(3).astype(BFLOAT16), np.zeros((3, 1), np.int32), np.ones((3, 1), np.float32))


def test_what_the_gpus_kernel_refuses_of_experts_is_told_beforehand() -> None:
    plain, packed = ModelWeightFormat(Plain(BFLOAT16)), ModelWeightFormat(Plain(jnp.dtype("float32")), experts=ExpertFormat(packing="fp8"))
    assert unsupported_reason(7168, 2048, 8, plain, BFLOAT16) is None and unsupported_reason(7168, 2048, 8, packed, BFLOAT16) is None
    assert unsupported_reason(7168, 2048, 8, plain, jnp.dtype("float32")) == "it multiplies bfloat16, not float32"
    assert unsupported_reason(7168, 2048, 8, FLOAT32, BFLOAT16) == "it multiplies bfloat16, not float32"
    assert "for 64 inputs and 7168 outputs" in str(unsupported_reason(7168, 512, 8, plain, BFLOAT16))
    assert "for 7100 inputs and 512 outputs" in str(unsupported_reason(7100, 2048, 8, plain, BFLOAT16))


def test_a_forms_name_tells_how_experts_are_kept_and_run() -> None:
    """Compiled programs are kept by it."""
    kinds = (ExpertFormat(), ExpertFormat(BFLOAT16), ExpertFormat(packing="int4"), ExpertFormat(packing="int4", backend="mosaic_gpu"))
    assert len({str(ModelWeightFormat(Plain(BFLOAT16), experts=experts)) for experts in kinds}) == len(kinds)
    assert str(ModelWeightFormat(Plain(BFLOAT16))) == "bfloat16"
