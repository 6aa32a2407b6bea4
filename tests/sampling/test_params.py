"""What rows ask for, as the host sees it."""

import numpy as np
import pytest

from jaxinfer.request import SamplingParams
from jaxinfer.sampling.params import are_greedy, neutral_rows, set_row

GREEDY = SamplingParams(temperature=0.0)


def greedy(*params: SamplingParams, num_generated: int = 0) -> bool:
    rows = neutral_rows(len(params) + 1)  # one is padding
    for row, of_row in enumerate(params):
        set_row(rows, row, of_row, 7, [3])
    return bool(are_greedy(rows, np.full(len(params) + 1, num_generated, np.int32)))


def test_rows_that_take_their_best_tokens_are_greedy():
    assert greedy()
    assert greedy(GREEDY, SamplingParams(temperature=0.0, top_k=5, top_p=0.5, min_p=0.1))


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0.1},
        {"logprobs": 0},
        {"logit_bias": {5: 1.0}},
        {"repetition_penalty": 1.1},
        {"presence_penalty": -0.5},
        {"frequency_penalty": 0.5},
        {"allowed_token_ids": [5]},
        {"logprob_token_ids": [5]},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_one_row_that_asks_for_more_is_enough(asked):
    assert not greedy(GREEDY, SamplingParams(**({"temperature": 0.0} | asked)))
    assert not greedy(SamplingParams(**({"temperature": 0.0} | asked)), GREEDY, num_generated=1000)


def test_a_ban_that_comes_and_goes_is_enough():
    rows = neutral_rows(1)
    set_row(rows, 0, GREEDY, 7, [3], [(5, 9)])
    assert not are_greedy(rows, np.zeros(1, np.int32))


def test_tokens_that_may_not_end_it_yet_are_a_bias_until_they_may():
    held_back = SamplingParams(temperature=0.0, min_tokens=4)
    assert [greedy(held_back, num_generated=count) for count in (0, 3, 4, 5)] == [False, False, True, True]
