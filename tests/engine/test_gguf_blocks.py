"""Matrices that stay in a GGUF file's blocks: the tokens and scores of dequantised weights, on every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from jaxinfer import LLM, SamplingParams
from pallas_kernels.block_matmul.op import unsupported_reason
from tests import tiny_model
from tests.conftest import TINY
from tests.covering import covered_layouts
from tests.engine.workload import workload
from tests.families import gguf_file

PROMPTS, _ = workload()
SMALL = {"max_batch_size": 8, "decode_buckets": (8,), "prefill_buckets": (64,), "prefill_chunk_size": 64, "dtype": "float32"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
TYPES = {"q_proj": Type.Q4_1, "k_proj": Type.Q4_1, "v_proj": Type.Q4_1, "o_proj": Type.Q5_0, "gate": Type.Q4_0, "up": Type.Q4_0}
TYPES |= {"layers.0.mlp.down": Type.Q5_1, "down": Type.Q8_0, "embed": Type.Q8_0}

LAYOUTS: dict[str, dict[str, Any]] = {
    "one device": {},
    "tp=4 to pp=2": {
        "prefill_parallel": "tp=4",
        "prefill_devices": (0, 1, 2, 3),
        "decode_parallel": "pp=2",
        "decode_devices": (4, 5),
    },
}

pytestmark = pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason()))


def results(path: Path, **settings: Any) -> tuple[LLM, list[Any], np.ndarray]:
    llm = LLM(str(path), **(TINY | SMALL | settings))
    outputs = [one.outputs[0] for one in llm.generate(PROMPTS[:6], GREEDY)]
    assert llm.engine.stats.num_compilations_after_ready == 0
    return llm, [one.token_ids for one in outputs], np.array([[each.logprob for each in one.logprobs] for one in outputs])


def write(path: Path, types: dict[str, Type]) -> Path:
    return gguf_file.write(path, gguf.MODEL_ARCH.LLAMA, tiny_model.CONFIG, tiny_model.tensors(), types)


@pytest.mark.parametrize("layout", covered_layouts(LAYOUTS))
def test_results_are_those_of_dequantised_weights(tmp_path: Path, layout: str) -> None:
    """Also where layers differ in type, rows of queries are interleaved in the file, and heads are spread over a mesh."""
    path = write(tmp_path / "tiny.gguf", TYPES)
    ours, tokens, scores = results(path, **LAYOUTS[layout])
    plain, wanted_tokens, wanted_scores = results(path, **LAYOUTS[layout], weights="dequantised")
    assert "Q4_1" in ours.engine.stats.weights
    # of heads that are spread over a mesh each must have blocks of its own
    assert ("dequantised: 2 Q5_0)" in ours.engine.stats.weights) == (layout != "one device")
    assert "(dequantised: " in plain.engine.stats.weights
    of_weights = [sum(size for name, size in llm.engine.stats.memory.items() if "weights" in name) for llm in (ours, plain)]
    assert of_weights[0] < 0.5 * of_weights[1]
    assert tokens == wanted_tokens
    np.testing.assert_allclose(scores, wanted_scores, rtol=0, atol=1e-4)


def test_what_no_kernel_reads_is_dequantised(tmp_path: Path) -> None:
    """Tensors of two types side by side in one matrix, and types without a kernel."""
    path = write(tmp_path / "tiny.gguf", TYPES | {"v_proj": Type.Q8_0, "embed": Type.BF16})
    ours, tokens, _ = results(path)
    assert "(dequantised: " in ours.engine.stats.weights
    assert "Q4_0" in ours.engine.stats.weights
    assert tokens == results(path, weights="dequantised")[1]
