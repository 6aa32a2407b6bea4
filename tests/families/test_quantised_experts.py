"""Experts that a checkpoint has quantised: kept and read so, and computing what the numbers they stand for do."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints.safetensors_source import SafetensorsSource
from jaxinfer import LLM, SamplingParams
from jaxinfer.config import CacheConfig, ConfigError, DeviceConfig, EngineConfig, ModelConfig
from jaxinfer.models.registry import config_of
from jaxinfer.planner.engine_plan import Plan, make_plan
from jaxinfer.reference_forward import ReferenceForward
from jaxinfer.weights.load import load_weights, weight_bytes
from tests.families import checkpoint, deepseek
from tests.families.serving import SETTINGS

EXPERTS, SIZE, INNER = 4, 128, 256
CHANGES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": SIZE,
    "moe_intermediate_size": INNER,
    "n_routed_experts": EXPERTS,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}
TEXT = checkpoint.config_of("deepseek_v3") | CHANGES
BITS = {"fp8": 8 + 32 * 32 / 128 / 128, "int4": 4.5}  # of a weight; fp8's scales are repeated 32 times, as kernels read them
DECLARED = {"fp8": deepseek.FP8, "int4": deepseek.INT4}
# What activations are multiplied in beside them: int4's products with scales are bfloat16.
DTYPES = {"fp8": "float32", "int4": "bfloat16"}
ROUNDING = {"fp8": 2e-3, "int4": 2e-2}  # of scores, then
ABSORBED = {"fp8": 2e-3, "int4": 0.1}  # and between a pass that expands latents and steps that absorb what would
PROMPT = np.random.default_rng(0).integers(0, 500, 45).tolist()


def write(folder: Path, kind: str) -> tuple[Path, Path]:
    """DeepSeek-V3's or Kimi K2.5's, quantised, and the numbers."""
    config = TEXT | {"num_nextn_predict_layers": int(kind == "fp8")}
    there, values = deepseek.quantised(checkpoint.tensors(config, deepseek.shapes_of(config)), kind)
    if kind == "int4":
        there = {f"language_model.{name}": tensor for name, tensor in there.items()} | {
            "vision_tower.final_layernorm.weight": np.ones(3, np.float32)
        }
        whole = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"}
        packed = whole | {"text_config": config | {"quantization_config": DECLARED[kind]}}
    else:
        packed = config | {"quantization_config": DECLARED[kind]}
    return deepseek.write(folder / "packed", packed, there), deepseek.write(folder / "plain", config, values)


def plan_for(source: SafetensorsSource, layout: str = "tp=1", dtype: str = "float32") -> Plan:
    config = EngineConfig(
        model=ModelConfig(model=str(source.path), dtype=dtype),
        cache=CacheConfig(kv_memory="2MiB", page_size=8),
        devices=DeviceConfig(prefill_parallel=layout, decode_parallel=layout),
    )
    return make_plan(config, config_of(source), source)


def plain_logits(folder: Path, dtype: str = "float32") -> np.ndarray:
    """Of the prompt, by the plain forward pass of what the plan makes of a checkpoint."""
    source = SafetensorsSource(folder)
    plan = plan_for(source, dtype=dtype)
    weights = load_weights(plan.template, source, plan.decode.stages[0].mesh, plan.decode.rules)
    return ReferenceForward([(plan.template, plan.decode.stages[0].mesh)], lambda: [weights]).logits(PROMPT)


def test_shapes_are_those_of_the_references_class() -> None:
    config = checkpoint.config_of("deepseek_v3") | {"num_nextn_predict_layers": 0}
    assert deepseek.shapes_of(config) == checkpoint.shapes_of("deepseek_v3")


@pytest.mark.parametrize("kind", BITS)
def test_packed_experts_answer_as_the_numbers_they_stand_for(tmp_path: Path, kind: str) -> None:
    packed, plain = write(tmp_path, kind)
    llm = LLM(str(packed), **SETTINGS | {"dtype": DTYPES[kind]})
    expected = plain_logits(plain, DTYPES[kind])
    found = llm.logits(PROMPT)
    assert expected.std() > 1
    assert np.abs(found - expected).max() < ROUNDING[kind]
    (output,) = llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1))
    (answer,) = output.outputs
    steps = llm.logits(PROMPT + answer.token_ids)[len(PROMPT) - 1 : -1].astype(np.float64)
    logprobs = steps - np.log(np.exp(steps).sum(1, keepdims=True))
    assert answer.logprobs is not None
    np.testing.assert_allclose([one.logprob for one in answer.logprobs], logprobs[np.arange(24), answer.token_ids], atol=ABSORBED[kind])


# Of whole experts four devices hold one each, of which no columns for four could be packed.
@pytest.mark.parametrize(("layout", "num_devices"), [("tp=1", 1), ("tp=2", 2), ("tp=2,ep=2", 2), ("tp=4,ep=4", 4)])
@pytest.mark.parametrize("kind", BITS)
def test_devices_hold_and_read_what_is_stored(
    tmp_path: Path, kind: str, layout: str, num_devices: int, caplog: pytest.LogCaptureFixture
) -> None:
    source = SafetensorsSource(write(tmp_path, kind)[0])
    with caplog.at_level(logging.INFO):
        plan = plan_for(source, layout)
    weights = load_weights(plan.template, source, plan.decode.stages[0].mesh, plan.decode.rules)
    held = sum(w.addressable_shards[0].data.nbytes for leaf, w in zip(plan.template.leaves, weights, strict=True) if leaf.part)
    assert held == EXPERTS * 3 * SIZE * INNER * BITS[kind] / 8 / num_devices, "of the one layer with experts, and not of the module"
    assert weight_bytes(weights) == plan.decode.stages[0].weight_bytes
    not_ours = re.compile(r"model\.layers\.2\.|vision_tower")  # the first: a module that nothing runs
    taken = [name for name in source.names() if not not_ours.search(name)]
    of_file = sum(source.stored(name).num_bytes for name in taken)
    # An int4 matrix's shape is read with the header; a scale whose matrix is cut between devices by each of them.
    assert source.bytes_read == pytest.approx(of_file, rel=1e-3)
    assert f"experts: stored as {kind}" in caplog.text
    assert ("dequantised to float32" in caplog.text) == (kind == "fp8")  # DeepSeek's other matrices


def test_experts_that_are_stored_in_several_ways_are_dequantised_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = TEXT | {"num_nextn_predict_layers": 0, "quantization_config": deepseek.FP8}
    there, values = deepseek.quantised(checkpoint.tensors(config, deepseek.shapes_of(config)), "fp8")
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    del there[f"{name}_scale_inv"]
    source = SafetensorsSource(deepseek.write(tmp_path / "mixed", config, there | {name: values[name]}))
    with caplog.at_level(logging.INFO):
        plan = plan_for(source)
    assert not any(leaf.part for leaf in plan.template.leaves)
    assert "experts: stored as float32 (the checkpoint has them in F32 and FP8 128x128" in caplog.text
    found = plain_logits(source.path)
    plain = deepseek.write(tmp_path / "plain", {key: value for key, value in config.items() if key != "quantization_config"}, values)
    np.testing.assert_allclose(found, plain_logits(plain), atol=1e-5)


def test_experts_that_devices_do_not_divide_can_not_be_dealt_out(tmp_path: Path) -> None:
    config = TEXT | {"n_routed_experts": 6, "num_nextn_predict_layers": 0}
    values = checkpoint.tensors(config, deepseek.shapes_of(config))
    source = SafetensorsSource(deepseek.write(tmp_path / "six", config, values))
    words = (
        "parallel is tp=4,ep=4: .*experts.*: its experts axis of 6 can't be split over 4 devices; use a number of devices that divides 6"
    )
    with pytest.raises(ConfigError, match=words):
        plan_for(source, "tp=4,ep=4")
    assert plan_for(source, "tp=2,ep=2").decode.layout.ep == 2


def test_a_layout_that_deals_out_experts_that_there_are_none_of_is_refused(tiny_model_path: Path) -> None:
    with pytest.raises(ConfigError, match="prefill_parallel is tp=2,ep=2, but this model has no experts: leave out ep=2"):
        LLM(str(tiny_model_path), prefill_parallel="tp=2,ep=2")


def test_experts_whose_part_of_a_device_no_tile_divides_are_dequantised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = SafetensorsSource(write(tmp_path, "fp8")[0])
    with caplog.at_level(logging.INFO):
        plan = plan_for(source, "tp=4")
    assert not any(leaf.part for leaf in plan.template.leaves)
    assert "stored as float32 (their expert_mlp axis has 64 on a device, of 4" in caplog.text
