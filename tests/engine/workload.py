"""Requests of every kind for the tiny model, and what they give when each is alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxinfer.llm import LLM
from jaxinfer.request import RequestOutput, SamplingParams
from tests.tiny_model import VOCAB

# Around the sizes of pages, tiles, chunks and buckets, and one in several chunks of any size.
PROMPT_LENGTHS = (1, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 128, 129, 200)
NUM_TOKENS = 40


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    """32 prompts as token ids: half greedy, half sampled in some way with a seed. Of no draw may the number lie within float32's rounding of a border between
    two tokens, where sums of parts, made in another order, decide otherwise: another seed helps."""
    random = np.random.default_rng(11)
    lengths = (PROMPT_LENGTHS * 3)[:32]
    prompts = [random.integers(0, VOCAB - 3, length).tolist() for length in lengths]
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    kinds = [
        greedy,
        replace(greedy, temperature=0.9, seed=4),
        greedy,
        replace(greedy, temperature=1.2, top_p=0.9, seed=-6),
        replace(greedy, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2),
        replace(greedy, temperature=1.0, top_k=20, min_p=0.02, seed=2**40, presence_penalty=1.0),
        replace(greedy, max_tokens=25, logprobs=3),
        replace(greedy, temperature=0.7, seed=8, min_tokens=10, ignore_eos=False, logit_bias={VOCAB - 1: 4.0}),
    ]
    return prompts, [kinds[i % len(kinds)] for i in range(len(prompts))]


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    """Of each request, of each of its sequences."""
    return [[sequence.token_ids for sequence in output.outputs] for output in outputs]


def alone(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[list[int]]]:
    """Each request by itself, in a batch of one."""
    return [tokens_of(llm.generate([prompt], of_prompt))[0] for prompt, of_prompt in zip(prompts, params, strict=True)]
