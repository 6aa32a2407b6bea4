"""A plan's activations and collectives are those of compiled programs; what must hold of the largest models."""

from __future__ import annotations

from functools import cache

import pytest

from jaxinfer.architecture.known_models import model_shape
from jaxinfer.planner.report import as_json, describe
from jaxinfer.planner.search import PlanSettings
from jaxinfer.planner.target import Target
from jaxinfer.planner.target_model import TargetModel
from jaxinfer.planner.target_plan import TargetPlan, named_layouts, plan_target
from jaxinfer.planner.workload import Workload

pytestmark = pytest.mark.aot

GIB = 2**30


@cache
def planned(
    model: str,
    target: str,
    prefill: str,
    decode: str | None = None,
    *,
    context: int = 8192,
    batch: int = 32,
    chunk: int = 2048,
    num_layers: int | None = None,
) -> TargetPlan:
    shape = model_shape(model) | ({} if num_layers is None else {"num_hidden_layers": num_layers})
    shapes, setting = TargetModel(shape, Target.of(target)), PlanSettings(context, Workload.of_means(2048, 256), batch, chunk)
    return plan_target(shapes, setting, named_layouts(shapes.target, prefill, decode))


def all_kv_bytes(plan: TargetPlan) -> int:
    return sum(device["kv_bytes"] for device in as_json(plan)["devices"])


@pytest.mark.exhaustive  # a minute
def test_activations_are_compiled_and_grow_with_the_batch():
    small, large = (planned("smollm2-135m", "1xh100", "tp=1", batch=batch, chunk=256, num_layers=2) for batch in (1, 128))
    assert small.is_compiled
    assert as_json(small)["compiled"]
    few, many = (plan.chosen.decode_memory.stages[0].activation_bytes for plan in (small, large))
    assert 0 < few < many < GIB


@pytest.mark.exhaustive  # a minute; others compile these programs too
def test_every_stage_of_both_roles_is_compiled():
    """Prefill on two stages, decode on four devices, whose number the model's three KV heads don't have."""
    plan = planned("smollm2-135m", "8xh100", "tp=2,pp=2", "tp=4", batch=8, chunk=256, num_layers=4)
    assert plan.is_compiled
    assert [program.name for program in plan.prefill_programs] == ["prefill/256 stage 1 of 2", "prefill/256 stage 2 of 2"]
    assert [program.name for program in plan.decode_programs] == ["decode/8"]
    made = as_json(plan)["collectives"]
    assert [(each["kind"], each["count"]) for each in made["decode"]["a_layer"]] == [("all-reduce", 2)]
    assert made["decode"]["besides"]
    assert dict(describe(plan))["decode"].startswith("4 device(s)")


@pytest.mark.exhaustive
def test_kimi_on_eight_h100_leaves_more_than_30_gib_for_kv():
    plan = planned("kimi-k2.5", "8xh100", "tp=8", context=65536)
    assert plan.is_compiled
    assert plan.fits
    assert 8 * plan.chosen.decode_memory.stages[0].weight_bytes > 560e9
    print(f"{all_kv_bytes(plan) / GIB:.1f} GiB, {plan.kv_tokens} tokens")
    assert all_kv_bytes(plan) > 30 * GIB
    assert plan.kv_tokens > 600_000, "eight cards hold eight times what one does"


@pytest.mark.exhaustive
def test_scout_on_two_h200_holds_more_than_1_2_million_tokens():
    plan = planned("llama-4-scout", "2xh200", "tp=2", context=1_200_000)
    assert plan.is_compiled
    assert plan.fits
    print(f"{all_kv_bytes(plan) / GIB:.1f} GiB, {plan.kv_tokens} tokens")
    assert all_kv_bytes(plan) > 56 * GIB
    assert plan.kv_tokens > 1_200_000
