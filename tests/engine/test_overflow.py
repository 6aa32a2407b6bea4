"""A model that overflows for one request spoils no other: not those beside it, nor those that get its pages."""

from __future__ import annotations

import numpy as np
from safetensors.numpy import save_file

from jaxinfer.llm import LLM
from jaxinfer.request import SamplingParams
from tests import tiny_model
from tests.conftest import TINY
from tests.engine.page_audit import assert_all_free
from tests.engine.workload import tokens_of, workload

POISON = 300  # the token whose embedding overflows


def test_numbers_that_are_none_stay_in_their_request(tmp_path, llm):
    folder, tensors = tiny_model.write(tmp_path), tiny_model.tensors()
    tensors["model.embed_tokens.weight"][POISON] = np.inf
    save_file(tensors, folder / "model.safetensors")
    spoiled = LLM(str(folder), **TINY)
    prompts, params = workload()
    prompts = [[token if token != POISON else 0 for token in prompt] for prompt in prompts]
    # Nor may it be generated, by these or by what they are compared with.
    params = [SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logit_bias={POISON: -100.0}) for _ in params]
    expected = tokens_of(llm.generate(prompts, params))
    bad = [[POISON] * 100, [3, POISON], [POISON]] * 4
    mixed = [prompt for pair in zip(prompts[:12], bad, strict=True) for prompt in pair] + prompts[12:]
    outputs = spoiled.generate(mixed, params + params[:12])
    assert all(output.is_finished for output in outputs)
    assert tokens_of(outputs[0:24:2] + outputs[24:]) == expected
    assert tokens_of(spoiled.generate(prompts, params)) == expected, "from pages that hold what the spoiled ones left"
    assert_all_free(spoiled.engine)
