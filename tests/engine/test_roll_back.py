"""A running sequence that is rolled back goes on with the tokens and the text that it had; no page is lost."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.decode.role import RollBackError
from jaxinfer.engine import Engine
from jaxinfer.request import OutputDelta, SamplingParams
from jaxinfer.sequence import Sequence
from pallas_kernels.span import FULL_ATTENTION, Span
from tests.conftest import MakeLLM
from tests.covering import covered_layouts
from tests.engine import roles
from tests.engine.fake_device import VOCAB, expected_tokens, fake_engine
from tests.engine.page_audit import assert_all_free
from tests.engine.roll_backs import run_with_roll_backs
from tests.engine.test_token_equality import LAYOUTS, SMALL, forget
from tests.engine.workload import workload

PROMPTS, PARAMS = workload()
CHOSEN = (2, 3, 4, 5, 6, 8, 11, 12, 13, 14)  # greedy, sampled, with penalties, with log-probabilities; up to 200 tokens of prompt
MAX_MODEL_LEN = 120
STAGES = {"prefill_devices": (0,), "decode_devices": (2, 3), "decode_parallel": "pp=2", **SMALL}


@pytest.mark.parametrize(
    "layout",
    covered_layouts(
        {"one device": {}, "two devices": LAYOUTS["two devices"], "one mesh of two": LAYOUTS["one mesh of two"], "stages": STAGES}
    ),
)
def test_tokens_are_the_same_after_roll_backs(llms: MakeLLM, expected: list[list[list[int]]], layout: str) -> None:
    """Greedy and seeded, with penalties; twice: the second time prompts and answers are in the prefix cache."""
    llm = llms(**(LAYOUTS | {"stages": STAGES}).get(layout, {}))
    forget(llm)
    for turn in range(2):
        cached = llm.engine.stats.num_cached_tokens
        for number in CHOSEN:
            llm.engine.add_request(f"r{number}", PROMPTS[number], PARAMS[number])
        tokens, times = run_with_roll_backs(llm.engine, np.random.default_rng(turn))
        assert {number: [tokens[f"r{number}", 0]] for number in CHOSEN} == {number: expected[number] for number in CHOSEN}
        assert sum(times.values()) > 3 * len(CHOSEN)
        assert (llm.engine.stats.num_cached_tokens > cached) == (turn == 1)
    assert llm.engine.stats.num_compilations_after_ready == 0
    assert_all_free(llm.engine)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("is_shared", [True, False], ids=["one mesh", "two meshes"])
@pytest.mark.parametrize(
    "spans", [(FULL_ATTENTION,), (FULL_ATTENTION, Span(window=30)), (Span(chunk=24),)], ids=["full attention", "windows", "chunks"]
)
def test_no_page_is_lost_and_siblings_keep_their_prompt(prefix_cache: bool, is_shared: bool, spans: tuple[Span, ...]) -> None:
    config = EngineConfig.of(
        max_model_len=MAX_MODEL_LEN,
        decode_devices=(0,) if is_shared else (1,),
        page_size=4,
        prefix_cache=prefix_cache,
        max_batch_size=8,
        decode_buckets=(8,),
        prefill_buckets=(32,),
        prefill_chunk_size=32,
    )
    engine = fake_engine(config, 44, spans=spans)
    asked: dict[str, tuple[list[int], SamplingParams]] = {}
    for number, length in enumerate((1, 7, 16, 21, 50, 60, 60, 16)):
        prompt = np.random.default_rng(length).integers(0, VOCAB, length).tolist()
        params = SamplingParams(max_tokens=50, ignore_eos=True, seed=number, n=1 + number % 3, repetition_penalty=1.0 + number % 2)
        engine.add_request(f"r{number}", prompt, params)
        asked[f"r{number}"] = prompt, params
    tokens, times = run_with_roll_backs(engine, np.random.default_rng(5))
    for (request_id, index), found in tokens.items():
        assert found == expected_tokens(*asked[request_id], index, MAX_MODEL_LEN, spans), (request_id, index)
    assert len(tokens) == sum(params.n for _, params in asked.values())
    assert sum(times.values()) > 100
    assert engine.stats.num_preemptions > 0 or FULL_ATTENTION not in spans
    assert_all_free(engine)


def decoding(num_prompt: int, num_output: int, **settings: object) -> tuple[Engine, Sequence]:
    """An engine with one running sequence that has so many tokens."""
    spans = settings.pop("spans", (FULL_ATTENTION,))
    small = {"page_size": 4, "max_batch_size": 8, "decode_buckets": (8,), "prefill_buckets": (32,), "prefill_chunk_size": 32}
    config = EngineConfig.of(max_model_len=MAX_MODEL_LEN, **small | settings)
    engine = fake_engine(config, 70, spans=spans)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=60, ignore_eos=True, seed=1, stop=("never said",))
    engine.add_request("a", np.random.default_rng(0).integers(0, VOCAB, num_prompt).tolist(), params)
    [sequence] = engine._requests["a"]
    while sequence.num_output < num_output:
        engine.step()
    return engine, sequence


@pytest.mark.parametrize(
    ("num_prompt", "prefix_cache", "spans", "most"),
    [
        (10, True, (FULL_ATTENTION,), 25),  # to the prompt's last token, whose page is not whole
        (12, True, (FULL_ATTENTION,), 24),  # that page is the prefix cache's
        (12, False, (FULL_ATTENTION,), 25),
        # The step of position 32, for which a page was needed, let go of what that does not attend to: all before 24, or 32.
        (10, True, (FULL_ATTENTION, Span(window=9)), 2),
        (10, True, (FULL_ATTENTION, Span(chunk=16)), 2),
        (10, True, (Span(window=80),), 25),
    ],
)
def test_how_far_it_can_go_back(num_prompt: int, prefix_cache: bool, spans: tuple[Span, ...], most: int) -> None:
    engine, sequence = decoding(num_prompt, 25, prefix_cache=prefix_cache, spans=spans)
    decode, tokens = engine._components.decode, list(sequence.token_ids)
    assert decode.max_roll_back(sequence) == most
    for num_tokens in (-1, 0, 26):
        with pytest.raises(ValueError, match=f"'a' has generated 25 tokens: {num_tokens} can't be taken back") as refused:
            decode.roll_back(sequence, num_tokens)
        assert not isinstance(refused.value, RollBackError)
    if most < 25:
        with pytest.raises(RollBackError, match=f"'a' can go back by {most} tokens here, not by {most + 1}"):
            decode.roll_back(sequence, most + 1)
    assert sequence.token_ids == tokens
    decode.roll_back(sequence, most)
    assert sequence.token_ids == tokens[: len(tokens) - most]
    roles.drain(decode)
    assert sequence.token_ids[num_prompt:] == expected_tokens(tokens[:num_prompt], sequence.params, 0, MAX_MODEL_LEN, spans)


def test_text_goes_on_after_the_tokens_that_are_left() -> None:
    """Also what was held back of it, for it might have begun a stop string."""
    engine, sequence = decoding(10, 1)
    deltas: list[OutputDelta] = []
    while sequence.num_output < 30:
        deltas += engine.step()
    texts = [delta.text for delta in deltas]
    engine._components.decode.roll_back(sequence, 20)
    engine._output.roll_back(sequence)
    again: list[OutputDelta] = []
    while sequence.num_output < 30:
        again += engine.step()
    assert [delta.token_ids for delta in again] == [delta.token_ids for delta in deltas[-20:]]
    assert [delta.text for delta in again] == texts[-20:]
    assert "".join(texts)
