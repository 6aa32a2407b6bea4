"""bfloat16 weights on a CPU: products in bfloat16, everything else in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import SamplingParams
from jaxinfer.weights.formats.plain import multiply
from tests.engine.workload import workload

PROMPTS, _ = workload()


@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_a_product_with_narrow_weights_sums_in_float32(num_rows):
    random = np.random.default_rng(0)
    x, kernel = random.standard_normal((num_rows, 256), np.float32), random.standard_normal((256, 96), np.float32)
    narrow = jnp.asarray(kernel, jnp.bfloat16)
    found = jax.jit(multiply)(x, narrow)
    assert (found.dtype, found.shape) == (jnp.float32, (num_rows, 96))
    exact = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) @ np.asarray(narrow, np.float64)
    np.testing.assert_allclose(found, exact, atol=1e-3)  # of the rounded operands; sums of 256 rounded to bfloat16 would be off by 0.1
    np.testing.assert_array_equal(jax.jit(multiply)(x, kernel), jax.jit(jnp.matmul)(x, kernel))


def test_weights_are_half_the_bytes_and_pages_stay_float32(llms, llm):
    narrow = llms(dtype="bfloat16").engine.stats.memory
    wide = llm.engine.stats.memory
    assert narrow["shared weights"] * 2 == wide["shared weights"]
    assert narrow["shared KV pages"] == wide["shared KV pages"]


def test_what_sampling_reports_is_the_plain_pass_and_near_float32s(llms, llm):
    narrow = llms(dtype="bfloat16")
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    for output in narrow.generate(PROMPTS[:6], params):
        tokens = output.prompt_token_ids + output.outputs[0].token_ids
        reported = [one.logprob for one in [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]]
        np.testing.assert_allclose(reported, narrow.logprobs(tokens)[1:], atol=0.05)
        np.testing.assert_allclose(reported, llm.logprobs(tokens)[1:], atol=0.25)
    assert narrow.engine.stats.num_compilations_after_ready == 0
