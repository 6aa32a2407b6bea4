"""Stages of a pipeline hold a model between them, and none takes much longer than another."""

from __future__ import annotations

from itertools import pairwise

import jax.numpy as jnp
import pytest

from jaxinfer.architecture.known_models import model_shape
from jaxinfer.models.registry import read_config
from jaxinfer.planner.model_work import model_work
from jaxinfer.planner.stage_partition import STEPS, cut, stage_layers
from jaxinfer.weights.formats.plain import Plain
from jaxinfer.weights.formats.weight_format import ModelWeightFormat
from jaxinfer.weights.template import ModelTemplate, make_template
from sharding.cost_model import part_cost
from sharding.hardware import HARDWARE
from sharding.layout import Parallel
from sharding.rules import RULES

FORMAT = ModelWeightFormat(Plain(jnp.dtype("bfloat16")))


def paths(template: ModelTemplate) -> list[str]:
    return [path for leaf in template.leaves for path in leaf.paths]


@pytest.mark.parametrize("name", ["smollm2-135m", "llama-3.1-8b"])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_stages_hold_every_parameter_once_but_a_tied_table(name: str, num_stages: int) -> None:
    whole = make_template(read_config(model_shape(name)), FORMAT)
    stages = cut(whole, layers_of(name, f"pp={num_stages}", "decode"))
    assert [stage.is_first for stage in stages] == [True] + [False] * (num_stages - 1)
    assert [stage.is_last for stage in stages] == [False] * (num_stages - 1) + [True]
    assert [layer for stage in stages for layer in stage.layers] == list(whole.layers)
    held = [path for stage in stages for path in paths(stage)]
    is_tied = not any(path.startswith("head.") for path in held)
    assert is_tied == (name == "smollm2-135m")
    assert sorted(held) == sorted(paths(whole) + ["embedding.table"] * is_tied)
    for stage in stages:
        assert {int(path.split(".")[1]) for path in paths(stage) if path.startswith("blocks.")} == set(stage.layers)


def layers_of(name: str, layout: str, *roles: str, device: str = "h100") -> list[range]:
    whole = make_template(read_config(model_shape(name)), FORMAT)
    return stage_layers(model_work(whole, RULES["decode"]), Parallel.parse(layout), roles, HARDWARE[device])


def test_each_role_is_cut_by_its_own_time() -> None:
    """Llama 3.1 8B's head reads as much as two layers and a half, which decode does for each token and prefill for one of a chunk; its embedding
    is as large, and costs memory alone."""
    assert [len(stage) for stage in layers_of("llama-3.1-8b", "pp=4", "prefill")] == [8, 8, 8, 8]
    assert [len(stage) for stage in layers_of("llama-3.1-8b", "pp=4", "decode")] == [7, 9, 9, 7]
    of_prefill, of_decode = (layers_of("smollm2-135m", "pp=2", role, device="cpu") for role in ("prefill", "decode"))
    assert len(of_prefill[1]) > len(of_decode[1])
    both = layers_of("smollm2-135m", "pp=2", "prefill", "decode", device="cpu")
    assert len(of_prefill[1]) >= len(both[1]) >= len(of_decode[1])


@pytest.mark.parametrize("roles", [("prefill",), ("decode",), ("prefill", "decode")])
@pytest.mark.parametrize(("name", "layout"), [("llama-3.1-8b", "tp=2,pp=3"), ("kimi-k2.5", "tp=1,pp=8"), ("llama-4-scout", "tp=2,pp=4")])
def test_the_slowest_stage_is_as_fast_as_any_cut_makes_it(name: str, layout: str, roles: tuple[str, ...]) -> None:
    """Against moving a layer over any border; `tests/sharding/test_stage_balancer.py` holds every cut there is against the balancer."""
    parallel, hardware = Parallel.parse(layout), HARDWARE["h100"]
    work = model_work(make_template(read_config(model_shape(name)), FORMAT), RULES["decode"])

    def slowest(bounds: list[int]) -> float:
        stages = [range(a, b) for a, b in pairwise(bounds)]
        steps = [STEPS[role] for role in roles]
        return max(
            sum(times * part_cost(part, step, parallel.tp, 1, hardware).seconds for step, times in steps for part in work.of_stage(stage))
            for stage in stages
        )

    stages = stage_layers(work, parallel, roles, hardware)
    bounds = [0, *(stage.stop for stage in stages)]
    made = slowest(bounds)
    for border in range(1, parallel.pp):
        for by in (-1, 1):
            moved = [bound + by * (number == border) for number, bound in enumerate(bounds)]
            assert made <= slowest(moved) * 1.021


def test_stages_have_a_layer_each() -> None:
    whole = make_template(read_config(model_shape("llama-3.1-8b")), FORMAT)
    assert cut(whole, [range(32)]) == (whole,)
    assert layers_of("llama-3.1-8b", "tp=2", "decode") == [range(32)]
    with pytest.raises(ValueError, match="33 stages of 32 layers: each stage needs a layer; use a pp of 1 to 32"):
        layers_of("llama-3.1-8b", "pp=33", "decode")
