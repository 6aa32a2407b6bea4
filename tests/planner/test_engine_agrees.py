"""`jaxinfer plan` and the engine agree: on stages, bytes of weights and pages, formats, and the context that fits."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from checkpoints.hub import open_source
from jaxinfer.config import ConfigError, DeviceConfig, EngineConfig, ModelConfig, ScheduleConfig
from jaxinfer.models.registry import config_of
from jaxinfer.planner.engine_plan import Plan, RolePlan, make_plan
from jaxinfer.planner.kv_memory import max_context_tokens
from jaxinfer.planner.search import PlanSettings
from jaxinfer.planner.target import Target
from jaxinfer.planner.target_model import TargetModel
from jaxinfer.planner.target_plan import TargetPlan, named_layouts, plan_target
from jaxinfer.planner.workload import Workload
from tests import tiny_model
from tests.families import checkpoint, deepseek, test_quantised_experts

LAYOUTS = [("tp=1", None), ("tp=2", None), ("pp=2", None), ("tp=2,pp=2", None), ("tp=2", "pp=2"), ("tp=1", "tp=2,pp=2")]
CHUNK_SIZE = 128
MODELS = {
    "llama": {"num_hidden_layers": 4},
    "heads that two devices don't divide": {"num_hidden_layers": 4, "num_attention_heads": 3, "num_key_value_heads": 3},
    "matrices that can't be packed on two devices": {"num_hidden_layers": 4, "intermediate_size": 2 * 20},
}


@pytest.fixture(scope="module", params=[*MODELS, "gemma3", "deepseek_v3", "int4", "fp8"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    match request.param:
        case "int4" | "fp8":
            return test_quantised_experts.write(folder, request.param)[0]
        case "deepseek_v3":
            config = checkpoint.config_of("deepseek_v3")
            return deepseek.write(folder / "model", config, checkpoint.tensors(config, deepseek.shapes_of(config)))
        case "gemma3":
            config = checkpoint.config_of("gemma_3")
            return checkpoint.write(folder / "model", config, checkpoint.shapes_of("gemma_3"))
    return tiny_model.write(folder / "model", **MODELS[request.param])


def planned_by_engine(path: Path, prefill: str, decode: str | None, *, dtype: str) -> Plan:
    target = named_layouts(Target.of("8xcpu"), prefill, decode)
    assert target is not None
    first = 0 if target.is_shared else target.prefill.num_devices
    devices = DeviceConfig(
        prefill_parallel=prefill,
        decode_parallel=decode or prefill,
        prefill_devices=tuple(range(target.prefill.num_devices)),
        decode_devices=tuple(range(first, first + target.decode.num_devices)),
    )
    schedule = ScheduleConfig(prefill_chunk_size=CHUNK_SIZE, prefill_buckets=(CHUNK_SIZE,))
    source = open_source(path)
    return make_plan(EngineConfig(ModelConfig(str(path), dtype=dtype), schedule=schedule, devices=devices), config_of(source), source)


def planned_for_target(path: Path, prefill: str, decode: str | None, *, dtype: str) -> TargetPlan:
    model = TargetModel(open_source(path).config, Target.of("8xcpu"), dtype=dtype)
    setting = PlanSettings(64, Workload.of_means(16, 16), 32, CHUNK_SIZE)
    return plan_target(model, setting, named_layouts(model.target, prefill, decode), num_compiled=0)


def device_bytes(role: RolePlan) -> list[int]:
    """Of the weights that each of a stage's devices gets, as the arrays' own shardings have it."""
    return [
        sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for leaf in stage.template.abstract(stage.mesh, role.rules)
        )  # type: ignore[union-attr]
        for stage in role.stages
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_plan_is_what_the_engine_does(model: Path, layout: tuple[str, str | None], dtype: str) -> None:
    engine, target = planned_by_engine(model, *layout, dtype=dtype), planned_for_target(model, *layout, dtype=dtype)
    chosen = target.chosen
    assert engine.shares_mesh == chosen.layouts.is_shared
    assert str(engine.template.weight_format) == str(chosen.decode.template.weight_format)
    for role, shape, memory in (
        (engine.prefill, chosen.prefill, chosen.prefill_memory),
        (engine.decode, chosen.decode, chosen.decode_memory),
    ):
        assert [stage.template.layers for stage in role.stages] == [stage.layers for stage in shape.stages]
        assert device_bytes(role) == [stage.weight_bytes for stage in memory.stages]
        assert [pool.device_bytes for pool in role.pools()] == [memory.kv_bytes(n) for n in range(len(memory.stages))]
        assert role.num_pages == memory.num_pages
        assert role.heads_cost == shape.heads_cost
    spec, num_pages = engine.page_spec, min(engine.prefill.num_pages, engine.decode.num_pages)
    assert spec == chosen.decode_memory.spec
    assert max_context_tokens(spec, num_pages - 1, CHUNK_SIZE, num_pages * spec.page_size) == target.kv_tokens


@pytest.mark.parametrize("layout", ["tp=7", "pp=8"])
def test_both_refuse_a_layout_for_the_same_reason(tiny_model_path: Path, layout: str) -> None:
    said = []
    for plan in (planned_by_engine, planned_for_target):
        with pytest.raises(ConfigError) as refused:
            plan(tiny_model_path, layout, None, dtype="float32")
        said.append(str(refused.value))
    assert said[0] == said[1]
