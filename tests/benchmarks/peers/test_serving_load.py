from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.http_load import LoadOutcome, RequestRecord
from benchmarks.peers.serving_load import ClientLoad, figures, random_texts, vocabulary_words
from checkpoints.hub import open_source
from jaxinfer.tokenizer import Tokenizer


def record(sent: float, arrivals: list[float], output_tokens: int | None) -> RequestRecord:
    return RequestRecord(sent, sent=sent, ended=arrivals[-1], arrivals=arrivals, outcome=LoadOutcome.ANSWERED, output_tokens=output_tokens)


def test_throughput_is_of_all_tokens_from_the_first_request_to_the_last_answer() -> None:
    records = [record(10.0, [10.5, 11.0, 12.0], 5), record(10.0, [11.0, 14.0], 11)]
    found = {label: value for label, _, value, _ in figures(records)}
    assert found["output"] == pytest.approx(16 / 4)
    assert found["time to first token, median"] == pytest.approx(0.75)
    assert found["time to first token, p99"] == pytest.approx(0.995)
    assert found["time per token after it, median"] == pytest.approx((1.5 / 4 + 3.0 / 10) / 2)


def test_events_are_counted_where_a_server_does_not_tell_its_tokens() -> None:
    found = {label: value for label, _, value, _ in figures([record(0.0, [1.0, 2.0, 4.0], None)])}
    assert found["output"] == pytest.approx(3 / 4)
    assert found["time per token after it, median"] == pytest.approx(1.5)


def test_one_token_alone_has_no_time_after_it() -> None:
    assert {label: value for label, _, value, _ in figures([record(0.0, [1.0], 1)])}["time per token after it, median"] is None


def test_prompts_have_the_tokens_asked_for_and_no_round_repeats_them(tiny_model_path: Path) -> None:
    tokenizer = Tokenizer.from_source(open_source(tiny_model_path))
    words = vocabulary_words(tokenizer)
    assert len(words) > 5
    load = ClientLoad(4, 8, 20, 8)
    rounds = [random_texts(words, load, seed) for seed in (1, 2)]
    assert [len(tokenizer.encode(text)) for prompts in rounds for text in prompts] == [20] * 16
    assert len({text for prompts in rounds for text in prompts}) == 16
    assert random_texts(words, load, 1) == rounds[0]
