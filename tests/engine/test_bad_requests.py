"""A request that can't be served as asked: the error names the field, the value and what would be right, and the engine serves on."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest

from jaxinfer.engine import intake
from jaxinfer.request import RequestError, SamplingParams
from jaxinfer.segments import Prompt
from jaxinfer.token_ids import checked_tokens
from tests.engine.page_audit import assert_all_free
from tests.sequences import Picture, text
from tests.tiny_model import CONTEXT, VOCAB

WRONG = {
    "temperature": (-0.1, 101, math.nan, math.inf, "1", None, True),
    "top_k": (-1, 2**31, 1.5, None),
    "top_p": (0, -0.5, 1.01, math.nan, "x"),
    "min_p": (-0.1, 1.5, math.nan),
    "seed": (-(2**63) - 1, 2**63, 0.5, "s"),
    "repetition_penalty": (0, 1e-40, -1, 101, math.nan),
    "presence_penalty": (-2.1, 2.1, None),
    "frequency_penalty": (-2.1, 2.1, math.inf),
    "logit_bias": ({-1: 0.0}, {1: 101.0}, {1: math.nan}, {"1": 1.0}, {1: None}, dict.fromkeys(range(301), 1.0), None, [1]),
    "stop": (("",), (3,), 5, None),
    "stop_token_ids": ((-1,), ("a",), tuple(range(33)), 7, None),
    "max_tokens": (-1, 2.0, "9", 2**31),
    "min_tokens": (-1, 17, None),
    "n": (0, -1, 129, 1.0, True, None),
    "logprobs": (-1, 21, True, "all"),
    "prompt_logprobs": (-1, 21, 0.5),
    "allowed_token_ids": ((-1,), ("a",), tuple(range(301)), 7),
    "logprob_token_ids": ((-1,), (1.0,), tuple(range(21)), None),
    "kept_special_tokens": ((-1,), ("a",), tuple(range(301)), None),
    "bad_words": ("word", (3,), (" ",), ("x",) * 101, None),
    "truncate_prompt_tokens": (0, -2, 1.5, "all"),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values], ids=lambda x: str(x)[:30]
)
def test_a_parameter_out_of_range_is_named(name, value):
    with pytest.raises(RequestError, match=rf"^{name} (is|has) .+: (it must|each (stop string )?must|at most)") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_every_parameter_with_a_range_is_among_those_tested():
    assert {field.name for field in fields(SamplingParams)} - WRONG.keys() == {
        *("ignore_eos", "echo", "skip_special_tokens", "include_stop_str_in_output"),
        "structured_outputs",  # whose own are in tests/structured
    }


def test_the_edges_of_every_range_are_served(llm):
    params = [
        SamplingParams(temperature=100, top_k=2**31 - 1, top_p=1e-9, min_p=1, seed=-(2**63), max_tokens=3),
        SamplingParams(temperature=1e-30, top_k=1, seed=2**63 - 1, repetition_penalty=100, min_tokens=3, max_tokens=3),
        SamplingParams(repetition_penalty=1e-6, presence_penalty=-2, frequency_penalty=2, max_tokens=3, logprobs=20, prompt_logprobs=20),
        SamplingParams(logit_bias={0: -100, VOCAB - 1: 100}, stop=["\U0001f600" * 50], stop_token_ids=range(32), max_tokens=3),
        SamplingParams(max_tokens=0, n=128),
    ]
    outputs = llm.generate(["x"] * len(params), params)
    assert all(output.is_finished for output in outputs)
    assert len(outputs[1].outputs[0].token_ids) == 3
    assert len(outputs[4].outputs) == 128
    assert_all_free(llm.engine)


@pytest.mark.parametrize(
    ("prompt", "params", "param", "words"),
    [
        ([], {}, "prompt", "the prompt is empty: give at least one token"),
        ([3, VOCAB], {}, "prompt", f"token id {VOCAB}: this model's are 0 to {VOCAB - 1}"),
        ([-1], {}, "prompt", "token id -1"),
        ([1, "2"], {}, "prompt", "token id '2'"),
        ([1.0], {}, "prompt", "token id 1.0"),
        ([5, 2**40], {}, "prompt", f"token id {2**40}"),
        (np.array([1, VOCAB]), {}, "prompt", f"token id {VOCAB}"),
        (np.array([1.0]), {}, "prompt", "token id 1.0"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, "logit_bias", f"logit_bias has token id {VOCAB}"),
        ([1], {"stop_token_ids": (VOCAB + 5,)}, "stop_token_ids", f"stop_token_ids has token id {VOCAB + 5}"),
        ([1] * (CONTEXT + 1), {"max_tokens": 0}, "prompt", f"the prompt has {CONTEXT + 1} tokens: at most {CONTEXT} fit; shorten"),
        ([1] * CONTEXT, {"max_tokens": None}, "prompt", f"the prompt has {CONTEXT} tokens: at most {CONTEXT - 1} fit, .* room for one"),
        ([1] * CONTEXT, {"max_tokens": 32_000}, "prompt", f"at most {CONTEXT - 1} fit"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_a_request_that_can_never_be_served_is_refused(llm, prompt, params, param, words):
    with pytest.raises(RequestError, match=words) as caught:
        llm.engine.add_request("bad", prompt, SamplingParams(**params))
    assert caught.value.param == param
    assert (caught.value.code == "context_length_exceeded") == ("fit" in words)
    assert_all_free(llm.engine)


def test_a_prompts_token_ids_are_looked_at_once(llm, monkeypatch):
    looked_at = []

    def counted(token_ids, vocab_size, name, param=None):
        looked_at.append((name, len(token_ids)))
        return checked_tokens(token_ids, vocab_size, name, param)

    monkeypatch.setattr(intake, "checked_tokens", counted)
    llm.generate([[1] * 20, np.arange(30), "text"], SamplingParams(max_tokens=1, stop_token_ids=[3]))
    assert [length for name, length in looked_at if name == "prompt"] == [20, 30, len(llm.tokenizer.encode("text"))]
    assert looked_at.count(("stop_token_ids", 1)) == 3, "with each prompt"


def test_a_prompt_of_more_than_token_ids_is_checked_and_not_cut(llm):
    pictured = Prompt((Picture(4, b"cat"), text([1, 2])))
    assert llm.engine.validate(pictured, SamplingParams()) is pictured
    with pytest.raises(RequestError, match=f"prompt has token id {VOCAB}"):
        llm.engine.validate(Prompt((Picture(4, b"cat"), text([VOCAB]))), SamplingParams())
    with pytest.raises(RequestError, match="truncate_prompt_tokens is 3: only a list of token ids can be cut"):
        llm.engine.validate(pictured, SamplingParams(truncate_prompt_tokens=3))


def test_the_longest_requests_there_can_be_are_served(llm):
    greedy = {"temperature": 0.0, "ignore_eos": True}
    outputs = llm.generate(
        [[1] * CONTEXT, [2] * (CONTEXT - 1), [3], [4] * 500],
        [
            SamplingParams(max_tokens=0),
            SamplingParams(**greedy, max_tokens=None),
            SamplingParams(**greedy, max_tokens=None),
            SamplingParams(**greedy, max_tokens=32_000),  # more than there is room for: clamped to it
        ],
    )
    assert [len(output.outputs[0].token_ids) for output in outputs] == [0, 1, CONTEXT - 1, CONTEXT - 500]
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}


def test_an_id_in_use_is_refused(llm):
    llm.engine.add_request("one", [1], SamplingParams())
    with pytest.raises(RequestError, match="request id 'one' is in use") as caught:
        llm.engine.add_request("one", [2], SamplingParams())
    assert caught.value.param == "request_id"
    assert llm.engine.abort("one")
    assert not llm.engine.abort("one")
    llm.engine.add_request("one", [1], SamplingParams(max_tokens=1))
    deltas = []
    while llm.engine.has_work:
        deltas += llm.engine.step()
    assert [delta.finish_reason for delta in deltas] == ["length"]


def test_a_bad_prompt_among_good_ones_starts_none(llm):
    requests = llm.engine.stats.num_requests
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.generate(["fine", "", "fine too"])
    with pytest.raises(RequestError, match="2 sampling parameters for 1 prompts") as caught:
        llm.generate(["fine"], [SamplingParams(), SamplingParams()])
    assert caught.value.param == "params"
    assert llm.engine.stats.num_requests == requests
    assert llm.generate([]) == []
    assert llm.generate("fine", SamplingParams(max_tokens=2))[0].is_finished
