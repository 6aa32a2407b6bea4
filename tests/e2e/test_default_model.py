"""The embedded default model answers, on one device and on two meshes alike."""

from __future__ import annotations

import numpy as np

from jaxinfer.request import SamplingParams

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


def test_it_knows_the_capital_of_france(default_llm):
    output = default_llm.chat(QUESTION, SamplingParams(temperature=0.0, max_tokens=40))
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
    assert default_llm.engine.stats.num_compilations_after_ready == 0


def test_what_it_reports_is_the_plain_passes(default_llm):
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=24, logprobs=0, prompt_logprobs=0)
    for output in default_llm.generate(["def fibonacci(n):", "Once upon a time"], params):
        reported = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        plain = default_llm.logprobs(output.prompt_token_ids + output.outputs[0].token_ids)
        np.testing.assert_allclose([one.logprob for one in reported], plain[1:], atol=1e-4)
