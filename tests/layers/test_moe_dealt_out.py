"""Experts dealt out to devices whole: what they give is what one device makes of it, whichever way their results come together."""

from __future__ import annotations

import logging
import re
from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from jaxinfer.architecture.model_config import Routing
from jaxinfer.layers import expert_rows, moe
from jaxinfer.layers.moe import Experts, MixtureOfExperts
from jaxinfer.weights.formats.packed import Packed
from jaxinfer.weights.formats.plain import Plain
from jaxinfer.weights.formats.weight_format import ModelWeightFormat
from sharding.expert_exchange import Link
from sharding.rules import EXPERT_PARALLEL, RULES, TENSOR_PARALLEL, Rules, rules_for
from tests.layers.on_mesh import compiled, on_mesh
from tests.layers.plain_experts import mixture
from tests.layers.test_moe import BFLOAT16, DEEPSEEK, FLOAT32, INNER, KINDS, SIZE, made, rows, weighted

DEVICES = {2: (0, 1), 4: (4, 5, 6, 7), 8: tuple(range(8))}
EXCHANGES = ("replicate", "all_to_all")


@pytest.fixture(params=EXCHANGES)
def exchange(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(moe, "choose", lambda mixture, link: (request.param, "a test says so"))
    return request.param


@pytest.mark.parametrize(("num_devices", "num_tokens"), [(2, 19), (8, 5)])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_what_a_plain_loop_makes_of_it(exchange: str, kind: str, num_devices: int, num_tokens: int) -> None:
    routing, shared_size = KINDS[kind]
    layer = MixtureOfExperts(SIZE, INNER, routing, FLOAT32, shared_size=shared_size)
    values, x = made(layer), rows(num_tokens)
    found = on_mesh(layer, values, DEVICES[num_devices], EXPERT_PARALLEL)(x)
    np.testing.assert_allclose(found, mixture(routing, values, x), atol=2e-5, rtol=1e-4)


LOADS = {
    "all_to_the_first": lambda random: np.zeros((37, 1), int),
    "all_to_the_last": lambda random: np.full((37, 1), 7),
    "all_to_one_device": lambda random: np.stack([2 + random.permutation(2) for _ in range(33)]),
    "one_token_of_many": lambda random: random.permutation(8)[None, :5],
    "every_expert_for_every_token": lambda random: np.stack([random.permutation(8) for _ in range(9)]),
    "one_has_all_but_one": lambda random: np.array([[6]] * 64 + [[0]]),
    "the_last_share_is_of_one": lambda random: np.stack([random.permutation(8)[:3] for _ in range(5)]),
}


@pytest.mark.parametrize("load", LOADS)
def test_loads_however_uneven_drop_no_token(exchange: str, load: str) -> None:
    check_load(load)


def check_load(load: str) -> None:
    random = np.random.default_rng(2)
    chosen = LOADS[load](random).astype(np.int32)
    weights = random.uniform(0.1, 2, chosen.shape).astype(np.float32)
    layer = Experts(SIZE, INNER, Routing(8, chosen.shape[1], "softmax"), FLOAT32)
    values, x = made(layer), rows(len(chosen))
    found = on_mesh(layer, values, DEVICES[4], EXPERT_PARALLEL)(x, chosen, weights)
    np.testing.assert_allclose(found, weighted(values, x, chosen, weights), atol=2e-5, rtol=1e-4)


def ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """What JAX's documentation says of its namesake, which XLA has not for CPUs; NaN where receivers expect another size than is sent."""
    operands, starts, sizes, targets = (lax.all_gather(a, axis_name) for a in (operand, input_offsets, send_sizes, output_offsets))
    me, place = lax.axis_index(axis_name), jnp.arange(len(output))[:, None]
    for sender in range(len(sizes)):
        start, size, target = (n[sender, me] for n in (starts, sizes, targets))
        taken = operands[sender].at[place[:, 0] - target + start].get(mode="clip")
        output = jnp.where((place >= target) & (place < target + size), taken, output)
    return jnp.where((recv_sizes == sizes[:, me]).all(), output, jnp.nan)


@pytest.mark.parametrize("load", LOADS)
def test_what_gpus_send_to_each_other_by_a_ragged_all_to_all_is_enough(load: str, monkeypatch: pytest.MonkeyPatch) -> None:
    by_platform = lax.platform_dependent
    monkeypatch.setattr(moe, "choose", lambda mixture, link: ("all_to_all", "a test says so"))
    monkeypatch.setattr(lax, "ragged_all_to_all", ragged_all_to_all)
    monkeypatch.setattr(
        expert_rows.lax,
        "platform_dependent",
        lambda *args, cpu, default: (
            default(*args) if getattr(default, "__name__", "") == "ragged" else by_platform(*args, cpu=cpu, default=default)
        ),
    )
    check_load(load)


def test_rows_that_are_no_numbers_spoil_no_others(exchange: str) -> None:
    layer = MixtureOfExperts(SIZE, INNER, DEEPSEEK, FLOAT32)
    run, x = on_mesh(layer, made(layer), DEVICES[4], EXPERT_PARALLEL), rows(21)
    clean = run(x)
    x[[2, 17, 20]] = np.array([[np.nan], [np.inf], [np.nan]])
    found = run(x)
    others = np.delete(np.arange(21), [2, 17, 20])
    np.testing.assert_array_equal(found[others], clean[others])
    assert not np.isfinite(found[[2, 20]]).any()


def test_what_a_token_comes_out_as_depends_on_no_other(exchange: str) -> None:
    layer = MixtureOfExperts(SIZE, INNER, DEEPSEEK, FLOAT32)
    run, x = on_mesh(layer, made(layer), DEVICES[4], EXPERT_PARALLEL), rows(32)
    other = rows(32, seed=9)
    other[11] = x[11]
    np.testing.assert_array_equal(run(x)[11], run(other)[11])


def test_bfloat16_activations_stay_bfloat16(exchange: str) -> None:
    layer = MixtureOfExperts(SIZE, INNER, DEEPSEEK, ModelWeightFormat(Plain(BFLOAT16)), shared_size=48)
    values, x = made(layer), rows(40).astype(BFLOAT16)
    one, several = on_mesh(layer, values)(x), on_mesh(layer, values, DEVICES[4], EXPERT_PARALLEL)(x)
    assert several.dtype == BFLOAT16
    assert np.abs(several.astype(np.float32) - one.astype(np.float32)).max() < 0.02 * np.abs(one.astype(np.float32)).max()


def collectives(layer: nnx.Module, num_tokens: int, rules: Rules) -> Counter[tuple[str, str]]:
    """In the compiled code of a layer on four devices."""
    text = re.sub(r"\{[\d,]*\}", "", compiled(layer, num_tokens, DEVICES[4], rules).as_text())  # without layouts; XLA joins some to a tuple
    kinds = "all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all"
    return Counter(re.findall(rf"= (\S+|\([^()]*\)) ({kinds})(?:-start)?\(", text))


@pytest.mark.parametrize(
    "weight_format", [FLOAT32, ModelWeightFormat(Plain(BFLOAT16)), ModelWeightFormat(Packed(jnp.dtype("float32")))], ids=str
)
@pytest.mark.parametrize("rules", [TENSOR_PARALLEL, EXPERT_PARALLEL], ids=["columns", "whole"])
@pytest.mark.parametrize("shared_size", [None, 64])
def test_one_all_reduce_serves_shared_and_routed_experts(shared_size: int | None, rules: Rules, weight_format: ModelWeightFormat) -> None:
    layer = MixtureOfExperts(SIZE, INNER, DEEPSEEK, weight_format, shared_size=shared_size)
    assert collectives(layer, 12, rules) == Counter({(f"f32[12,{SIZE}]", "all-reduce"): 1})


def test_an_all_to_all_is_one_and_a_gather_of_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "choose", lambda mixture, link: ("all_to_all", "a test says so"))
    found = collectives(MixtureOfExperts(SIZE, INNER, DEEPSEEK, FLOAT32), 13, EXPERT_PARALLEL)
    assert sorted(kind for _, kind in found.elements()) == ["all-gather", "all-to-all"]
    assert found[f"f32[16,{SIZE}]", "all-gather"] == 1


def test_the_way_that_costs_less_is_taken_and_the_log_says_why(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    routing, counts = KINDS["qwen3"][0], {}
    for name, link in (("replicate", Link(1.0, 1e9)), ("all_to_all", Link(1.0, 0.0))):
        monkeypatch.setattr(moe, "link_for", lambda kind, link=link: link)
        with caplog.at_level(logging.INFO):
            counts[name] = collectives(MixtureOfExperts(SIZE, INNER, routing, FLOAT32), 16, EXPERT_PARALLEL)
        assert f"experts of 16 tokens on 4 devices: {name} (replicate " in caplog.text
    assert {kind for _, kind in counts["replicate"]} == {"all-reduce"}
    assert {kind for _, kind in counts["all_to_all"]} == {"all-gather", "all-to-all"}


def test_experts_that_devices_do_not_divide_are_named() -> None:
    layer = Experts(SIZE, INNER, Routing(6, 2, "softmax"), FLOAT32)
    with pytest.raises(
        ValueError, match="down: its experts axis of 6 can't be split over 4 devices; use a number of devices that divides 6"
    ):
        on_mesh(layer, made(layer), DEVICES[4], EXPERT_PARALLEL)


def test_a_table_is_chosen_by_the_layout() -> None:
    assert rules_for("decode", 4) is rules_for("prefill", 4) is EXPERT_PARALLEL
    assert {role: rules_for(role) for role in RULES} == dict(RULES)
