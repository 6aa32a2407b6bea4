"""Prompts in every form that callers give them; what is none is named, and said what would be right."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.prompts import as_conversations, as_params, as_prompts
from jaxinfer.request import RequestError, SamplingParams


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("one", ["one"]),
        ([1, 2], [[1, 2]]),
        ((1, 2), [[1, 2]]),
        (range(3), [[0, 1, 2]]),
        (np.array([1, 2]), [[1, 2]]),
        ([np.int64(1), np.int32(2)], [[1, 2]]),
        (["a", [1], (2, 3), np.array([4]), range(2)], ["a", [1], [2, 3], [4], [0, 1]]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        pytest.param((f"{number}" for number in range(3)), ["0", "1", "2"], id="generator of texts"),
        pytest.param(([number] * 2 for number in range(2)), [[0, 0], [1, 1]], id="generator of ids"),
        (dict.fromkeys("ab").keys(), ["a", "b"]),
        ([], []),
        ([[]], [[]]),
        ([""], [""]),
    ],
    ids=lambda x: str(x)[:40],
)
def test_what_is_a_prompt_or_several(given, expected):
    prompts = as_prompts(given, "prompts")
    assert prompts == expected
    assert all(type(token) is int for prompt in prompts if not isinstance(prompt, str) for token in prompt)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, r"prompts is None: one is a text or a list of token ids, several are a list of such"),
        (7, "prompts is 7: one is"),
        (b"bytes", "prompts is b'bytes': one is"),
        ({"role": "user"}, r"prompts is {'role': 'user'} \(conversations go to `chat`\)"),
        ([{"role": "user"}], r"prompts\[0\] is {'role': 'user'} \(conversations"),
        (["a", 3], "prompts has token ids beside 'a'"),
        ([1, "a"], "prompts has token ids beside 'a'"),
        ([1, 2.0], "prompts has token ids beside 2.0"),
        ([True], r"prompts\[0\] is True"),
        (["a", None], r"prompts\[1\] is None: a text or a list of token ids"),
        ([[1], [2, "x"]], r"prompts\[1\] has token id 'x'"),
        ([[1], [[2]]], r"prompts\[1\] has token id \[2\]"),
        (["x" * 1000, object], r"prompts\[1\] is <class 'object'>"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_what_is_no_prompt_is_named(given, words):
    with pytest.raises(RequestError, match=f"^{words}") as caught:
        as_prompts(given, "prompts")
    assert caught.value.param == "prompts"


def test_parameters_for_all_or_for_each():
    one, other = SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)
    assert as_params(one, 2) == [one] * 2
    assert as_params((params for params in (one, other)), 2) == [one, other]
    assert as_params([], 0) == []
    for given, words in (
        ({"temperature": 0}, r"params is {'temperature': 0}: give SamplingParams\(...\)"),
        (0.7, "params is 0.7"),
        ([one, None], r"params\[1\] is None: it must be SamplingParams"),
        ([one], "1 sampling parameters for 2 prompts: give one, or one for each"),
    ):
        with pytest.raises(RequestError, match=words):
            as_params(given, 2)


def test_conversations():
    hi = {"role": "user", "content": "hi"}
    assert as_conversations([hi]) == ([[hi]], True)
    assert as_conversations(message for message in [hi]) == ([[hi]], True)
    assert as_conversations([[hi], (hi, hi)]) == ([[hi], [hi, hi]], False)
    for given, words in (
        (None, "messages is None: a list of messages"),
        ("hi", "messages is 'hi'"),
        (hi, "messages is {'content'"),
        ([], "messages is empty: give at least one message"),
        ([hi, "hi"], "messages has 'hi': a message is a dict with 'role' and 'content'"),
        ([[hi], hi], r"messages\[1\] is {'content'"),
        ([None], r"messages\[0\] is None"),
    ):
        with pytest.raises(RequestError, match=words):
            as_conversations(given)
