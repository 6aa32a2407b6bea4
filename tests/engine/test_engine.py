"""Engine.add_request, step and abort over a make-believe device: what comes when, and what is left."""

from __future__ import annotations

import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.engine import Engine
from jaxinfer.request import FinishReason, OutputDelta, SamplingParams
from jaxinfer.sequence import SequenceState
from tests.engine.fake_device import TOKENIZER, VOCAB, expected_tokens, fake_engine, sequences_of
from tests.engine.page_audit import assert_all_free, audit

ENDLESS = {"ignore_eos": True, "seed": 1}


def engine_of(meshes: str = "shared", num_pages: int = 200, **settings: object) -> Engine:
    decode_devices = (0,) if meshes == "shared" else (1,)
    flat = {"page_size": 8, "prefill_chunk_size": 64, "prefill_buckets": (64,), "max_batch_size": 8} | settings
    return fake_engine(EngineConfig.of(decode_devices=decode_devices, max_model_len=400, **flat), num_pages)


def finish(engine: Engine) -> list[OutputDelta]:
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    return deltas


def test_an_idle_engine_has_nothing_to_do():
    engine = engine_of()
    assert not engine.has_work
    assert engine.step() == []
    assert not engine.abort("nobody")


def test_deltas_joined_are_the_tokens_text_and_one_end():
    engine, params = engine_of(), SamplingParams(max_tokens=30, **ENDLESS)
    engine.add_request("a", [1, 2, 3], params)
    deltas = finish(engine)
    tokens = [token for delta in deltas for token in delta.token_ids]
    assert tokens == expected_tokens([1, 2, 3], params, 0, 400)
    assert "".join(delta.text for delta in deltas) == TOKENIZER.decode(tokens)
    assert [delta.finish_reason for delta in deltas] == [None] * 29 + [FinishReason.LENGTH]
    assert_all_free(engine)


def test_a_stop_token_ends_the_text_before_it():
    params = SamplingParams(max_tokens=40, **ENDLESS)
    tokens = expected_tokens([5], params, 0, 400)
    last = next(i for i in range(8, 40) if tokens[i] not in tokens[:i])
    engine = engine_of()
    engine.add_request("a", [5], SamplingParams(max_tokens=40, stop_token_ids=(tokens[last], 300 % VOCAB), **ENDLESS))
    deltas = finish(engine)
    assert [token for delta in deltas for token in delta.token_ids] == tokens[: last + 1]
    assert "".join(delta.text for delta in deltas) == TOKENIZER.decode(tokens[:last])
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, tokens[last])
    assert_all_free(engine)


def test_the_models_own_end_is_no_stop_token_of_the_request():
    engine, params = engine_of(), SamplingParams(max_tokens=350, seed=0)
    prompt = next([i] for i in range(VOCAB) if expected_tokens([i], params, 0, 400)[-1] in TOKENIZER.eos_token_ids)
    engine.add_request("a", prompt, params)
    deltas = finish(engine)
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, None)


def test_echo_comes_first_and_once_for_each_sequence():
    engine = engine_of()
    prompt = TOKENIZER.encode("Grüße<|im_end|>")
    engine.add_request("a", prompt, SamplingParams(max_tokens=3, echo=True, n=2, **ENDLESS))
    deltas = finish(engine)
    for index in range(2):
        of_sequence = [delta for delta in deltas if delta.index == index]
        assert of_sequence[0].text.startswith("Grüße<|im_end|>")
        assert sum("Grüße" in delta.text for delta in of_sequence) == 1


@pytest.mark.parametrize("echo", [False, True])
def test_no_token_wanted_gives_one_empty_delta(echo):
    engine = engine_of()
    engine.add_request("a", [65, 66], SamplingParams(max_tokens=0, echo=echo, n=2))
    deltas = finish(engine)
    text = TOKENIZER.decode([65, 66]) if echo else ""
    assert [(d.index, d.text, d.token_ids, d.finish_reason) for d in deltas] == [(i, text, (), FinishReason.LENGTH) for i in range(2)]
    assert_all_free(engine)


@pytest.mark.parametrize("meshes", ["shared", "two"])
def test_abort_frees_everything_in_whatever_state(meshes):
    engine = engine_of(meshes, num_pages=50, max_batch_size=4)
    seen = set()
    for num_steps in range(40):
        for request_id, prompt in {"old": [1] * 100, "middle": [2] * 300, "young": [3] * 30, "last": [4] * 100}.items():
            engine.add_request(request_id, prompt, SamplingParams(max_tokens=90, n=2, **ENDLESS))
        for _ in range(num_steps):
            engine.step()
        seen |= {sequence.state for sequence in sequences_of(engine)}
        for request_id in ("middle", "last", "old", "young"):
            engine.abort(request_id)
            audit(engine)
        assert engine.stats.decode_pages_used == engine.stats.prefill_pages_used == 0
        assert finish(engine) == []
        assert_all_free(engine)
    assert seen >= {SequenceState.WAITING, SequenceState.PREFILLING, SequenceState.RUNNING}


def test_a_long_prompt_does_not_stall_those_that_decode():
    engine = engine_of()
    engine.add_request("stream", [1], SamplingParams(max_tokens=300, **ENDLESS))
    while not engine.stats.num_running:
        engine.step()
    engine.add_request("long", [2] * 390, SamplingParams(max_tokens=2, **ENDLESS))
    num_tokens = num_steps = 0
    while engine.stats.num_prefill_steps < 8:  # the stream's one and seven chunks
        num_tokens += sum(len(delta.token_ids) for delta in engine.step())
        num_steps += 1
    assert num_tokens >= num_steps - 1


def test_requests_join_at_the_next_step_and_leave_when_done():
    engine = engine_of()
    engine.add_request("a", [1], SamplingParams(max_tokens=50, **ENDLESS))
    for _ in range(10):
        engine.step()
    assert engine.stats.num_running == 1
    engine.add_request("b", [2], SamplingParams(max_tokens=3, **ENDLESS))
    while engine.stats.num_running < 2:
        engine.step()
    last_of = {delta.request_id: i for i, delta in enumerate(finish(engine))}
    assert last_of["b"] < last_of["a"]


def test_never_more_than_the_batch_holds_and_oldest_first():
    engine = engine_of(max_batch_size=3, decode_buckets=(1, 3))
    for number in range(9):
        engine.add_request(f"{number}", [number], SamplingParams(max_tokens=5, **ENDLESS))
    ended = []
    while engine.has_work:
        ended += [delta.request_id for delta in engine.step() if delta.finish_reason]
        assert engine.stats.num_running <= 3
    assert ended == [f"{number}" for number in range(9)]


def test_stats_count_what_happened():
    engine = engine_of("two")
    engine.add_request("a", [1] * 100, SamplingParams(max_tokens=7, n=3, **ENDLESS))
    engine.add_request("b", [2], SamplingParams(max_tokens=2, **ENDLESS))
    engine.add_request("c", [2], SamplingParams(max_tokens=2, **ENDLESS))
    engine.abort("c")
    finish(engine)
    stats = engine.stats
    assert (stats.num_requests, stats.num_prompt_tokens, stats.num_output_tokens) == (3, 102, 23)
    assert stats.num_cached_tokens == 0, "what siblings start from was computed for the request"
    assert stats.finished == {"length": 4, "abort": 1}
    assert stats.num_pages_moved == 13 + 2 * 1 + 1, "the others' first twelve are there already"
    assert stats.num_prefill_steps >= 3
    assert stats.num_decode_steps >= 6
    assert stats.time_to_first_token.num_observed == 4
    assert stats.inter_token_latency.num_observed == 23 - 4
    assert stats.queue_seconds.num_observed == 4
    assert 14 <= stats.peak_pages_used <= 12 + 3 * 2 + 1


def test_an_oldest_request_is_never_starved_by_preemption():
    engine = engine_of(num_pages=50, max_batch_size=8)
    for number in range(8):
        engine.add_request(f"{number}", [number] * 20, SamplingParams(max_tokens=200, **ENDLESS))
    ended = [delta.request_id for delta in finish(engine) if delta.finish_reason]
    assert ended == sorted(ended)
    assert engine.stats.num_preemptions > 0
    assert_all_free(engine)
