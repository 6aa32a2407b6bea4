"""Bad words and allowed tokens, of random requests on the host half: no answer holds a bad word, whatever is preempted meanwhile."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.request import RequestError, SamplingParams
from jaxinfer.sampling.bad_words import bans_after, bans_before_newest, tokenize_bad_words
from jaxinfer.tokenizer import Tokenizer
from tests import tiny_model
from tests.engine import test_fuzz
from tests.engine.fake_device import TOKENIZER, fake_engine

LETTERS = tuple(TOKENIZER.encode("abcd"))


def random_params(random: np.random.Generator) -> SamplingParams:
    """Of four letters that all answers are made of, words that are likely in them."""
    words = ["".join(random.choice(list("abcd"), int(random.integers(1, 5)))) for _ in range(int(random.integers(0, 5)))]
    return SamplingParams(
        seed=int(random.integers(0, 2**62)),
        max_tokens=int(random.choice([1, 9, 30, 60])),
        n=int(random.choice([1, 1, 3])),
        allowed_token_ids=(*LETTERS, *TOKENIZER.encode("e")),  # which no word bans
        bad_words=tuple(words),
    )


@pytest.mark.parametrize(
    "devices",
    [{"decode_devices": (0,)}, {"decode_devices": (1,)}, {"prefill_parallel": "pp=2", "decode_parallel": "pp=3"}],
    ids=["one mesh", "two meshes", "pipelines"],
)
@pytest.mark.parametrize("num_pages", [12, 200])
def test_no_answer_holds_a_bad_word(clock, monkeypatch, devices, num_pages):
    monkeypatch.setattr(test_fuzz, "random_params", random_params)
    monkeypatch.setattr(test_fuzz, "STEPS", 300)
    config = EngineConfig.of(
        max_model_len=min(120, num_pages * 8),
        page_size=8,
        ageing_seconds=0.05,
        max_batch_size=8,
        decode_buckets=(1, 4, 8),
        prefill_buckets=(32, 64),
        prefill_chunk_size=64,
        **devices,
    )
    engine = fake_engine(config, num_pages, clock=clock)
    followed = test_fuzz.run(engine, np.random.default_rng(1), clock)
    whole = [request for request in followed.values() if not request.is_aborted and set(request.reasons.values()) <= {"stop", "length"}]
    for request in whole:
        for index, tokens in request.tokens.items():
            assert tokens == test_fuzz.expected_tokens(request.prompt, request.params, index, engine.max_model_len)
            assert not any(word in TOKENIZER.decode(tokens) for word in request.params.bad_words)
    assert sum(len(request.params.bad_words) for request in whole) > 40
    if num_pages == 12:
        assert engine.stats.num_preemptions > 5


def test_words_are_banned_as_they_are_and_after_a_space(tmp_path):
    tiny_model.write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    words = tokenize_bad_words(tokenizer, tokenizer.vocab_size, ["eb", " eb", "so", "xyz"])
    assert [[tokenizer.decode([token]) for token in word] for word in words] == [["e", "b"], [" e", "b"], ["so"], ["x", "y", "z"]]
    assert tokenize_bad_words(tokenizer, 3, ["so"]) == ()  # of tokens that the model does not have


def test_bans_are_of_generated_tokens_alone():
    words = [(1,), (2, 3), (4, 5, 6), (5, 6, 7, 8)]
    token_ids = [4, 5, 5, 6, 7]  # the first two are the prompt
    assert bans_after(words, token_ids, 2) == [(1, None), (8, None)]
    assert bans_after(words, token_ids, 4) == [(1, None)]
    assert bans_after(words, [4, 5], 2) == [(1, None)]
    assert bans_before_newest(words, token_ids, 2, 4) == [(1, None), (3, 2), (8, 7)]
    assert bans_before_newest(words, [4], 0, 1) == [(1, None), (3, 2), (6, 5)]


@pytest.mark.parametrize(
    ("params", "param", "words"),
    [
        ({"allowed_token_ids": [300]}, "allowed_token_ids", "token id 300: this model's are 0 to 257"),
        ({"logprob_token_ids": [258]}, "logprob_token_ids", "token id 258"),
        ({"allowed_token_ids": [257], "min_tokens": 2}, "allowed_token_ids", "only tokens that end the answer, and min_tokens is 2"),
        (
            {"bad_words": [f"w{i}" for i in range(100)], "logit_bias": dict.fromkeys(range(201), 1.0)},
            "bad_words",
            "100 sequences of tokens, beside 201 entries of logit_bias: at most 300 together",
        ),
    ],
)
def test_what_a_row_has_no_room_for_is_refused_by_name(params, param, words):
    engine = fake_engine(EngineConfig.of(max_model_len=64, page_size=8), 20)
    with pytest.raises(RequestError, match=words) as caught:
        engine.validate([1], SamplingParams(**params))
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": range(301)}, "allowed_token_ids has 301 entries: at most 300"),
        ({"logprob_token_ids": range(21)}, "logprob_token_ids has 21 entries: at most 20"),
        ({"logprob_token_ids": ["a"]}, "logprob_token_ids is 'a': it must be an integer"),
        ({"bad_words": ["a", " "]}, "not blank"),
        ({"bad_words": "word"}, "it must be a list"),
        ({"bad_words": ["a"] * 101}, "101 words, .* at most 100 of 200"),
        ({"bad_words": ["a" * 201]}, "the longest of 201 characters"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0: it must be an integer from 1"),
    ],
)
def test_values_out_of_their_range_are_refused(params, words):
    with pytest.raises(RequestError, match=words):
        SamplingParams(**params)


def test_a_prompt_is_truncated_to_its_last_tokens():
    prompt = list(range(100))

    def kept(count: int | None, **params: int | None) -> int:
        left = SamplingParams(truncate_prompt_tokens=count, **params).truncated(prompt, 64)
        assert left == prompt[100 - len(left) :]
        return len(left)

    assert [kept(None), kept(10), kept(200), kept(-1, max_tokens=16)] == [100, 10, 100, 48]
    assert [kept(-1, max_tokens=None), kept(-1, max_tokens=32_000), kept(-1, max_tokens=0)] == [63, 63, 64]
