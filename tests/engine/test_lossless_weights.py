"""--weights lossless: the tokens and scores of bfloat16 weights, on every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer import LLM, ConfigError, SamplingParams
from pallas_kernels.lossless_matmul.op import unsupported_reason
from tests import tiny_model
from tests.conftest import TINY, MakeLLM
from tests.covering import covered_layouts
from tests.engine.workload import workload

PROMPTS, _ = workload()
SMALL = {"max_batch_size": 8, "decode_buckets": (8,), "prefill_buckets": (64,), "prefill_chunk_size": 64, "dtype": "bfloat16"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=0, prompt_logprobs=0)
SEEDED = SamplingParams(temperature=0.8, seed=7, max_tokens=16, ignore_eos=True, logprobs=0)

LAYOUTS: dict[str, dict[str, Any]] = {
    "one device": {},
    "tp=2": {"prefill_parallel": "tp=2", "prefill_devices": (0, 1)},
    "tp=2 and pp=2": {
        "prefill_parallel": "tp=2",
        "prefill_devices": (0, 1),
        "decode_parallel": "pp=2",
        "decode_devices": (2, 3),
    },
}

pytestmark = pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason()))


def results(llm: LLM) -> list[Any]:
    found = llm.generate(PROMPTS[:6], GREEDY) + llm.generate(PROMPTS[:6], SEEDED)
    return [(one.outputs[0].token_ids, [each.logprob for each in one.outputs[0].logprobs]) for one in found]


@pytest.mark.parametrize("layout", covered_layouts(LAYOUTS))
def test_results_are_those_of_bfloat16(llms: MakeLLM, layout: str) -> None:
    plain, ours = (llms(**SMALL, **LAYOUTS[layout], weights=weights) for weights in ("auto", "lossless"))
    assert ours.engine.stats.weights == "bfloat16 lossless"
    assert results(ours) == results(plain)
    assert ours.engine.stats.num_compilations_after_ready == 0


def test_matrices_whose_values_do_not_fit_stay_as_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One of the three that are loaded as one kind of leaf; others of its shape stay too, and nothing is wrong."""
    folder = tiny_model.write(tmp_path / "wide")
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj.weight"
    wide = np.exp2(np.random.default_rng(0).integers(-60, 0, tensors[name].shape)).astype(ml_dtypes.bfloat16)
    save_file(tensors | {name: wide.astype(tensors[name].dtype)}, file)
    settings = TINY | SMALL
    ours, plain = (LLM(str(folder), **settings, weights=weights) for weights in ("lossless", "auto"))
    assert "blocks.1.mlp.down" in caplog.text and "starting anew" in caplog.text
    assert results(ours) == results(plain)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "float32"}, "dtype is float32: use auto or bfloat16"),
        ({"matmul_backend": "xla"}, "matmul_backend is xla"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(tiny_model_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(str(tiny_model_path), **(TINY | SMALL | {"weights": "lossless"} | change))
