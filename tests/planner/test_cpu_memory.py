"""What a plan for a CPU says of memory is what an engine that is started there then allocates."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import jax
import pytest

from jaxinfer.architecture.known_models import model_shape, read_shape
from jaxinfer.config import ScheduleConfig
from jaxinfer.llm import LLM
from jaxinfer.planner.search import PlanSettings
from jaxinfer.planner.target import Target
from jaxinfer.planner.target_model import TargetModel
from jaxinfer.planner.target_plan import TargetPlan, named_layouts, plan_target
from jaxinfer.planner.workload import Workload
from sharding.layout import Parallel
from tests import tiny_model

FEW = {"decode_buckets": (32,), "prefill_buckets": (512,)}  # the largest programs are those that count


@pytest.fixture(scope="module")
def smollm2_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model in its own sizes, of which it has fewer layers; its weights are random."""
    folder = tiny_model.write(tmp_path_factory.mktemp("models") / "smollm2")
    (folder / "config.json").write_text(json.dumps(model_shape("smollm2-135m") | {"num_hidden_layers": 4}))
    return folder


def planned(model: Path, layout: str) -> TargetPlan:
    target = Target.of(f"{Parallel.parse(layout).num_devices}xcpu")
    shapes, schedule = TargetModel(read_shape(str(model)), target), ScheduleConfig()
    context = shapes.architecture.max_position_embeddings
    setting = PlanSettings(context, Workload.of_means(128, 128), schedule.max_batch_size, schedule.prefill_chunk_size)
    return plan_target(shapes, setting, named_layouts(target, layout, None))


def live_bytes(num_devices: int) -> list[int]:
    """Of all arrays, on each device."""
    gc.collect()
    found = [0] * num_devices
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            if shard.device.id < num_devices:
                found[shard.device.id] += shard.data.nbytes
    return found


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("tiny", "tp=2,pp=2"),
        pytest.param("smollm2", "tp=1", marks=pytest.mark.exhaustive),
        pytest.param("tiny", "tp=2", marks=pytest.mark.exhaustive),
        pytest.param("smollm2", "tp=2,pp=2", marks=pytest.mark.exhaustive),
    ],
)
def test_a_plan_says_what_an_engine_allocates(tiny_model_path: Path, smollm2_path: Path, model: str, layout: str) -> None:
    path = tiny_model_path if model == "tiny" else smollm2_path
    plan = planned(path, layout)
    [(_, _, memory)] = plan.roles
    parallel = Parallel.parse(layout)
    before = live_bytes(parallel.num_devices)
    llm = LLM(str(path), prefill_parallel=layout, random_weights=model != "tiny", **FEW)
    allocated = [after - of_before for after, of_before in zip(live_bytes(parallel.num_devices), before, strict=True)]
    told = llm.engine.stats.memory
    assert plan.is_compiled
    for number, stage in enumerate(memory.stages):
        name = "shared" if parallel.pp == 1 else f"shared stage {number + 1} of {parallel.pp}"
        assert told[f"{name} weights"] == stage.weight_bytes
        assert told[f"{name} KV pages"] == memory.kv_bytes(number)
        predicted = stage.weight_bytes + stage.activation_bytes + memory.kv_bytes(number)
        for device in range(number * parallel.tp, (number + 1) * parallel.tp):
            used = allocated[device] + told[f"{name} temporaries"]
            assert predicted == pytest.approx(used, rel=0.03), (device, stage, told)
            if model != "tiny":  # whose pages are all but a thousandth of it
                pages = memory.kv_bytes(number)
                assert predicted - pages == pytest.approx(used - pages, rel=0.03), (device, stage, told)
