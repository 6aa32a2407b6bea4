"""What may be sampled and what is told of it, through the compiled programs: the plain forward pass says what the tokens must be."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.llm import LLM
from jaxinfer.request import RequestOutput, SamplingParams
from tests.engine.test_logprobs import log_softmax
from tests.engine.test_token_equality import LAYOUTS
from tests.engine.workload import workload
from tests.tiny_model import END, END_OF_TURN

PROMPTS = [prompt[:20] for prompt in workload()[0][:8]]
LETTERS = "bfgjkqvwxyz"  # of which the tokenizer makes no longer tokens
WORDS = ("bf", "fg", "gg", "kqv", "qvw", "xyz", "jjjj", "zxyb", "v w")
GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}


def check_greedy(plain: LLM, output: RequestOutput, allowed: list[int], words: tuple[str, ...]) -> None:
    """Each token is the likeliest that is allowed and completes no word."""
    banned = [plain.tokenizer.encode(word) for word in words]
    [sequence] = output.outputs
    scores = plain.logits(output.prompt_token_ids + sequence.token_ids)
    for place, token in enumerate(sequence.token_ids):
        before = sequence.token_ids[:place]
        left = [t for t in allowed if not any([*before, t][-len(word) :] == word for word in banned)]
        assert token == max(left, key=lambda t: scores[len(output.prompt_token_ids) - 1 + place, t])


@pytest.mark.usefixtures("prefills_are_read_soon")
@pytest.mark.parametrize("layout", ["one device", "two meshes of two"])
def test_restrictions_hold_and_leave_others_alone(llms, llm, layout):
    of_layout = llms(**LAYOUTS.get(layout, {}))
    stats = of_layout.engine.stats
    compiled, preempted = stats.num_compilations_after_ready, stats.num_preemptions
    allowed = llm.tokenizer.encode(LETTERS)
    listed = [END, 5, 300, 17]
    params = [
        SamplingParams(**GREEDY, allowed_token_ids=allowed, bad_words=WORDS),
        SamplingParams(**GREEDY, allowed_token_ids=allowed),
        SamplingParams(**GREEDY),
        SamplingParams(**(GREEDY | {"temperature": 1.0, "seed": 3}), logprob_token_ids=listed, bad_words=WORDS),
    ]
    prompts = PROMPTS * 4  # more than there are pages for
    each = [params[i % 4] for i in range(len(prompts))]
    outputs = of_layout.generate(prompts, each)
    for output, of_output in zip(outputs, each, strict=True):
        if of_output.allowed_token_ids is not None:
            check_greedy(llm, output, allowed, of_output.bad_words)
        if of_output.logprob_token_ids:
            expected = log_softmax(llm.logits(output.prompt_token_ids + output.outputs[0].token_ids))
            for place, told in enumerate(output.outputs[0].logprobs, len(output.prompt_token_ids) - 1):
                assert [token for token, _ in told.top] == listed
                np.testing.assert_allclose([logprob for _, logprob in told.top], expected[place, listed], atol=1e-4)
    [several] = of_layout.generate(
        [PROMPTS[0]], SamplingParams(n=4, temperature=1.0, seed=1, allowed_token_ids=allowed, bad_words=["b", *WORDS])
    )
    assert len(several.outputs) == 4 and not any(word in o.text for o in several.outputs for word in ("b", *WORDS))
    assert all(set(o.token_ids) <= set(allowed) for o in several.outputs)
    texts = [output.outputs[0].text for output in outputs]
    assert any(word in text for text in texts[1::4] for word in WORDS), "without the bans there are such words"
    alone = llm.generate(PROMPTS, [SamplingParams(**GREEDY)] * len(PROMPTS))
    assert [o.outputs[0].token_ids for o in outputs[2::4]] == [alone[i % 8].outputs[0].token_ids for i in range(2, len(prompts), 4)]
    assert stats.num_compilations_after_ready == compiled
    if layout == "one device":
        assert stats.num_preemptions > preempted


def test_texts_hold_special_tokens_and_stops_where_asked(llm):
    def text(**params) -> str:
        [output] = llm.generate([PROMPTS[3]], SamplingParams(**({"temperature": 0.0, "max_tokens": 3} | params)))
        return output.outputs[0].text

    special = {"allowed_token_ids": [END_OF_TURN], "ignore_eos": True}
    assert text(**special) == ""
    assert text(**special, skip_special_tokens=False) == "<|im_end|>" * 3
    assert text(allowed_token_ids=[END_OF_TURN], skip_special_tokens=False) == ""
    assert text(allowed_token_ids=[END_OF_TURN], skip_special_tokens=False, include_stop_str_in_output=True) == "<|im_end|>"
    letters = {"allowed_token_ids": llm.tokenizer.encode("z"), "max_tokens": 5}
    assert text(**letters, stop=["zzz"]) == ""
    assert text(**letters, stop=["zzz"], include_stop_str_in_output=True) == "zzz"
    assert text(**letters, stop_token_ids=llm.tokenizer.encode("z"), include_stop_str_in_output=True) == "z"


def test_a_prompt_is_truncated_offline_too(llm):
    long = list(range(3, 403)) * 2
    output, kept = llm.generate([long, long], [SamplingParams(truncate_prompt_tokens=k, max_tokens=12, temperature=0.0) for k in (-1, 7)])
    assert output.prompt_token_ids == long[-500:] and kept.prompt_token_ids == long[-7:]
    [same] = llm.generate([long[-7:]], SamplingParams(max_tokens=12, temperature=0.0))
    assert kept.outputs[0].token_ids == same.outputs[0].token_ids
