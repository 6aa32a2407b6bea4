"""Checkpoints of 4-bit integers in groups: the tokens and scores of dequantised weights, with and without blocks, on every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxinfer import LLM, SamplingParams
from pallas_kernels.block_matmul.op import unsupported_reason
from tests import tiny_model
from tests.checkpoints.test_int4_tensors import AWQ_ORDER, words
from tests.conftest import TINY
from tests.engine.workload import workload

PROMPTS, _ = workload()
SMALL = {"max_batch_size": 8, "decode_buckets": (8,), "prefill_buckets": (64,), "prefill_chunk_size": 64}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
LAYOUTS: dict[str, dict[str, Any]] = {
    "one device": {},
    "tp=2 to pp=2": {"prefill_parallel": "tp=2", "prefill_devices": (0, 1), "decode_parallel": "pp=2", "decode_devices": (2, 3)},
}
GROUP = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
DECLARED = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False},
    "gptq act-order": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"all": {"weights": GROUP}}},
}


def write(folder: Path, method: str) -> Path:
    """The tiny model with its layers' matrices in groups of 32."""
    tiny_model.write(folder, quantization_config=DECLARED[method])
    random, stored = np.random.default_rng(2), {}
    for name, tensor in tiny_model.tensors().items():
        if not name.endswith("proj.weight"):
            stored[name] = tensor
            continue
        module, (rows, columns) = name.removesuffix("weight"), tensor.shape
        inputs = np.arange(columns) if method != "gptq act-order" else random.permutation(columns)
        groups = tensor[:, inputs].reshape(rows, -1, 32)
        low, high = groups.min(-1), groups.max(-1)
        if method == "compressed-tensors":
            # of powers of two, so that rounding products to the scales' type, as dequantising does, changes none
            scale = np.exp2(np.ceil(np.log2(np.maximum(-low, high) / 7))).astype(ml_dtypes.bfloat16)
            zeros = np.full(scale.shape, 8)
        else:
            scale = ((high - low) / 15).astype(np.float16)
            zeros = np.clip(np.round(-low / scale.astype(np.float32)), 0, 15).astype(int)
        codes = np.clip(np.round(groups / scale.astype(np.float32)[..., None]) + zeros[..., None], 0, 15).astype(int)
        in_place = np.empty((rows, columns), int)
        in_place[:, inputs] = codes.reshape(rows, columns)
        if method == "compressed-tensors":
            parts = {"weight_packed": words(in_place, 1), "weight_scale": scale, "weight_shape": np.array([rows, columns])}
        elif method == "awq":
            parts = {"qweight": words(in_place.T, 1, AWQ_ORDER), "qzeros": words(zeros.T, 1, AWQ_ORDER), "scales": scale.T}
        else:
            indices = np.empty(columns, np.int32)
            indices[inputs] = np.arange(columns) // 32
            parts = {"qweight": words(in_place.T, 0), "qzeros": words((zeros - 1 & 15).T, 1), "scales": scale.T, "g_idx": indices}
        stored |= {module + part: np.ascontiguousarray(array) for part, array in parts.items()}
    save_file(stored, folder / "model.safetensors")
    assert json.loads((folder / "config.json").read_text())["quantization_config"]
    return folder


def results(path: Path, **settings: Any) -> tuple[LLM, list[Any], np.ndarray]:
    llm = LLM(str(path), **(TINY | SMALL | settings))
    outputs = [one.outputs[0] for one in llm.generate(PROMPTS[:6], GREEDY)]
    return llm, [one.token_ids for one in outputs], np.array([[each.logprob for each in one.logprobs] for one in outputs])


@pytest.mark.parametrize(
    ("method", "layout", "kept"),
    [
        ("gptq", "tp=2 to pp=2", "8 as INT4 zero 32 F16"),
        ("awq", "one device", "8 as INT4 zero 32 F16"),
        ("compressed-tensors", "one device", "8 as INT4 BF16"),
        ("gptq act-order", "one device", "(dequantised: 14 GPTQ 32 act-order)"),
    ],
)
def test_results_are_those_of_dequantised_weights(tmp_path: Path, method: str, layout: str, kept: str) -> None:
    """float32, in which integers times scales are exact."""
    path = write(tmp_path / "model", method)
    ours, tokens, scores = results(path, **LAYOUTS[layout])
    if unsupported_reason() is None:
        assert kept in ours.engine.stats.weights
    plain, wanted_tokens, wanted_scores = results(path, **LAYOUTS[layout], weights="dequantised")
    assert "dequantised: 14" in plain.engine.stats.weights
    assert tokens == wanted_tokens
    # float16 rounds the products of others.
    np.testing.assert_allclose(scores, wanted_scores, rtol=0, atol=2e-2)
