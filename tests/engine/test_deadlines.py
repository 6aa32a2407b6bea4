"""A request whose deadline passes ends with its last delta, wherever it stands, and leaves nothing behind; in simulated time."""

from __future__ import annotations

import pytest

from jaxinfer.request import FinishReason, RequestContext
from jaxinfer.sequence import SequenceState
from tests.engine.fake_device import TOKENIZER, expected_tokens, sequences_of
from tests.engine.page_audit import assert_all_free
from tests.engine.simulated import MAX_MODEL_LEN, Clock, Driver, endless, recorded_chunks


def within(clock: Clock, seconds: float) -> RequestContext:
    return RequestContext(deadline=clock.now + seconds)


@pytest.mark.parametrize("meshes", ["shared", "two"])
def test_in_whatever_state_a_request_ends_at_its_deadline_and_frees_everything(clock, meshes):
    run = Driver(clock, meshes, num_pages=56)
    prompts = {"old": [1] * 100, "middle": [2] * 250, "young": [3] * 30, "last": [4] * 100}
    seen = set()
    for num_steps in range(0, 60, 2):
        run.engine._components.prefill.manager.forget()
        run.engine._components.decode.manager.forget()
        for name, prompt in prompts.items():
            context = RequestContext(deadline=clock.now + 100) if name != "young" else RequestContext()
            run.add(f"{name} {num_steps}", prompt, endless(90, n=2), context)
        for _ in range(num_steps):
            run.step()
        doomed = [s for s in sequences_of(run.engine) if s.context.deadline is not None]
        seen |= {sequence.state for sequence in doomed}
        clock.now += 100
        before = {(s.request.request_id, s.index): s.num_output for s in doomed}
        ended = [delta for delta in run.step() if delta.finish_reason is FinishReason.TIMEOUT]
        assert {(delta.request_id, delta.index) for delta in ended} == set(before)
        assert all(delta.token_ids == () and delta.device_usage is not None for delta in ended)
        assert all(s.context.deadline is None for s in sequences_of(run.engine))
        run.finish()
        for (request_id, index), num_tokens in before.items():
            tokens = run.tokens(request_id, index)
            assert len(tokens) == num_tokens
            assert tokens == expected_tokens(prompts[request_id.split()[0]], endless(90), index, MAX_MODEL_LEN)[:num_tokens]
        for index in range(2):
            assert run.tokens(f"young {num_steps}", index) == expected_tokens(prompts["young"], endless(90), index, MAX_MODEL_LEN)
        assert_all_free(run.engine)
    assert seen == set(SequenceState) - {SequenceState.FINISHED, SequenceState.PAUSED}


def test_a_request_ends_at_its_deadline_and_not_before(clock):
    run = Driver(clock)
    run.add("a", [1], endless(300), within(clock, 1.0))
    started = clock.now
    while run.reason("a") is None:
        last = clock.now
        run.step()
    assert run.reason("a") is FinishReason.TIMEOUT
    assert last - started >= 1.0
    assert last - started < 1.0 + 0.02, "within a step"
    assert len(run.tokens("a")) > 80
    assert_all_free(run.engine)


def test_one_that_comes_too_late_is_not_computed_at_all(clock):
    run = Driver(clock)
    with recorded_chunks(run.engine) as chunks:
        run.ask("a", [1] * 50, endless(5, n=3), within(clock, -1.0))
    assert [run.reason("a", index) for index in range(3)] == [FinishReason.TIMEOUT] * 3
    assert chunks == []
    assert run.engine.stats.finished == {"timeout": 3}
    assert_all_free(run.engine)


def test_sequences_that_have_ended_are_not_told_again(clock):
    first, others = (expected_tokens([1], endless(30), index, MAX_MODEL_LEN) for index in range(2))
    stop = next(token for token in first[5:20] if token not in others)
    run = Driver(clock)
    run.add("a", [1], endless(300, n=2, stop_token_ids=(stop,)), within(clock, 0.3))
    run.finish()
    assert [run.reason("a", index) for index in range(2)] == [FinishReason.STOP, FinishReason.TIMEOUT]
    assert run.engine.stats.finished == {"stop": 1, "timeout": 1}
    assert_all_free(run.engine)


@pytest.mark.parametrize("ends_by", ["itself", "abort"])
@pytest.mark.parametrize("again_within", [None, 2.0])
def test_the_deadline_of_a_request_is_not_that_of_another_with_its_id(clock, ends_by, again_within):
    run = Driver(clock)
    run.add("a", [1], endless(3 if ends_by == "itself" else 300), within(clock, 1.0))
    if ends_by == "itself":
        run.finish()
    else:
        run.step()
        assert run.engine.abort("a")
    run.add("a", [2], endless(300), RequestContext() if again_within is None else within(clock, again_within))
    started = clock.now
    run.finish()
    assert run.reason("a") is (FinishReason.LENGTH if again_within is None else FinishReason.TIMEOUT)
    assert clock.now - started > (again_within or 1.0)
    assert_all_free(run.engine)


def test_text_held_back_is_given_at_the_deadline(clock):
    run = Driver(clock)
    free = run.ask("free", [1], endless(300), within(clock, 0.5)).outputs[0]
    held = run.ask("held", [1], endless(300, stop=(free.text[-1] + "and so on",)), within(clock, 0.5)).outputs[0]
    assert run.reason("held") is FinishReason.TIMEOUT
    assert run.deltas[-1].text.endswith(free.text[-1]), "it might have been the stop string's first"
    assert held.text == TOKENIZER.decode(held.token_ids)


def test_a_request_that_only_waited_took_nothing_but_that_time(clock):
    run = Driver(clock, max_batch_size=1)
    run.add("runs", [1] * 100, endless(200))
    run.step()
    run.add("waits", [2] * 50, endless(5, n=2), within(clock, 0.5))
    run.finish("waits")
    usage = run.outputs["waits"].device_usage
    assert usage.queue_seconds == pytest.approx(0.5, abs=0.1)
    assert usage.queue_seconds >= 0.5
    assert (usage.prefill_seconds, usage.decode_seconds) == (0, 0)


def test_a_request_that_ran_says_how_long_it_had_waited(clock):
    run = Driver(clock)
    run.add("a", [1], endless(300, n=2), within(clock, 0.5))
    run.finish()
    usage = run.outputs["a"].device_usage
    assert usage.queue_seconds == pytest.approx(0, abs=1e-5)
    assert usage.prefill_seconds + usage.decode_seconds == pytest.approx(run.devices[0].busy_seconds, abs=0.03)


def test_deadlines_pass_in_their_own_order(clock):
    run = Driver(clock)
    for seconds in (3.0, 1.0, 2.0, 0.5):
        run.add(f"{seconds}", [1], endless(390), within(clock, seconds))
    started, ended = clock.now, {}
    while run.engine.has_work:
        now = clock.now
        ended |= {delta.request_id: now - started for delta in run.step() if delta.finish_reason}
    assert ended == {f"{seconds}": pytest.approx(seconds, abs=0.03) for seconds in (0.5, 1.0, 2.0, 3.0)}


@pytest.mark.parametrize("meshes", ["shared", "two"])
def test_what_was_computed_before_the_deadline_is_found_by_the_next(clock, meshes):
    run = Driver(clock, meshes)
    run.add("a", [1] * 390, endless(5), within(clock, 0.2))
    run.finish()
    assert run.reason("a") is FinishReason.TIMEOUT
    assert not run.tokens("a")
    cached = run.ask("again", [1] * 390, endless(5)).cached_tokens
    assert cached >= 128
    assert cached % 64 == 0, "the chunks that were started"
    assert run.tokens("again") == expected_tokens([1] * 390, endless(5), 0, MAX_MODEL_LEN)
    assert_all_free(run.engine)
