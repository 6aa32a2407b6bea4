"""What eight H100s say to each other in the programs of models that are split over all of them, at their real sizes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from jaxinfer.architecture.known_models import model_shape
from jaxinfer.models.registry import read_config
from jaxinfer.weights.formats.plain import Plain
from jaxinfer.weights.formats.weight_format import ExpertFormat, ModelWeightFormat
from sharding.collectives import Collective, collectives, collectives_a_layer
from tests.aot.engine_programs import BFLOAT16, compile_for, first_layers
from tests.sharding.branches import exchanges_in_branches

pytestmark = pytest.mark.aot

ROOT = Path(__file__).parents[2]
LLAMA = first_layers(read_config(model_shape("llama-3.1-70b")), 1)


@dataclass(frozen=True)
class Case:
    model: str
    num_layers: int  # of the shorter of two: the longer has one more, of the kind that most are
    packing: str | None = None


CASES = [Case("llama-3.1-70b", 1), Case("kimi-k2.5", 1, "int4")]


# Latents that eight cards share out, of 64 heads: every card's queries, and each head's results with the logarithm of its sum in two words of 16 bits,
# or in prefill the latents of 8,192 tokens of context, in a loop over it.
KIMI_DECODE = {Collective("all-gather", ("bf16[256,8,576]",)): 1, Collective("all-to-all", ("u16[8,32,8,514]",)): 1}
KIMI_PREFILL = {Collective("all-gather", ("bf16[64,8,9216]",)): 1}
MORE = {("kimi-k2.5", "decode/32"): KIMI_DECODE, ("kimi-k2.5", "prefill/2048"): KIMI_PREFILL}


@pytest.mark.parametrize("name", ["decode/32", "prefill/2048"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.model)
def test_a_layer_costs_two_sums_and_what_latents_take(case, name):
    config = read_config(model_shape(case.model))
    weight_format = ModelWeightFormat(Plain(BFLOAT16), experts=ExpertFormat(packing=case.packing, backend="mosaic_gpu"))
    shorter, longer = (
        compile_for("h100", 8, first_layers(config, num), weight_format, name, num_pages=2**12, context=8192).compiled.as_text()
        for num in (case.num_layers, case.num_layers + 1)
    )
    found = collectives(shorter)
    num_tokens = int(name.partition("/")[2])
    rows, in_one = f"bf16[{num_tokens},{config.hidden_size}]", f"bf16[{num_tokens * config.hidden_size}]"
    # A sum that is small is a kernel of Triton's in the XLA of JAX 0.11, which takes all rows as one.
    residual = next(sums for sums in (Collective("all-reduce", (array,)) for array in (rows, in_one)) if sums in found)
    of_latents = MORE.get((case.model, name), {})
    assert collectives_a_layer(shorter, longer) == {residual: 2, **of_latents}
    # One more is the embedding's.
    assert found == {residual: 2 * case.num_layers + 1, **dict.fromkeys(of_latents, case.num_layers)}
    assert not exchanges_in_branches(shorter)


def sampling_program(name: str) -> str:
    return compile_for("h100", 8, LLAMA, ModelWeightFormat(Plain(BFLOAT16)), name, num_pages=2**12, context=8192).compiled.as_text()


def test_every_branch_is_in_a_cuda_graph():
    """As XLA says, in a process that it says it in."""
    told = {"TF_CPP_VMODULE": "command_buffer_conversion_pass=5", "TF_CPP_MIN_LOG_LEVEL": "0"}
    script = "from tests.aot.test_collectives import sampling_program; sampling_program('decode/sample/32')"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | told,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    in_graphs = [line for line in done.stderr.splitlines() if "Creating command buffer thunk" in line]
    assert sum(line.count("conditional.") for line in in_graphs) == 4, "penalties, biases, log-probabilities of each part and of all"
    assert "kConditional is not lowered" not in done.stderr


@pytest.mark.parametrize("name", ["decode/greedy/32", "decode/sample/32", "prefill/score/2048"])
def test_sampling_exchanges_no_scores_and_waits_at_no_branch(name):
    """Best scores, sums, candidates. A host that waited at a branch would launch the next step's hundreds of kernels only then."""
    program = sampling_program(name)
    found = collectives(program)
    print(f"{name}: {', '.join(map(str, sorted(found)))}")
    rows = 32  # that are sampled, or whose prompts' log-probabilities are worked out at a time
    assert 0 < max(collective.num_bytes for collective in found) < rows * LLAMA.vocab_size * 4 / 100
    assert not exchanges_in_branches(program)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.model)
def test_tokens_that_are_split_are_gathered_before_products_and_sums_scattered(case):
    config = read_config(model_shape(case.model))
    weight_format = ModelWeightFormat(Plain(BFLOAT16), experts=ExpertFormat(packing=case.packing, backend="mosaic_gpu"))
    shorter, longer = (
        compile_for(
            "h100", 8, first_layers(config, num), weight_format, "prefill/2048", num_pages=2**12, context=8192, sequence_parallel="on"
        ).compiled.as_text()
        for num in (case.num_layers, case.num_layers + 1)
    )
    share, whole = (f"bf16[{num_tokens},{config.hidden_size}]" for num_tokens in (2048 // 8, 2048))
    of_latents = MORE.get((case.model, "prefill/2048"), {})
    expected = {Collective("reduce-scatter", (share,)): 2, Collective("all-gather", (whole,)): 2, **of_latents}
    assert collectives_a_layer(shorter, longer) == expected
