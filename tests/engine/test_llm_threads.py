"""One LLM from many threads: each call gets its own answers, whatever ends the others. No token is taken by whoever steps."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jaxinfer.engine_access import EngineClosedError
from jaxinfer.engine_loop import EngineFailedError
from jaxinfer.llm import LLM
from jaxinfer.request import RequestError, SamplingParams
from tests import tiny_encoder
from tests.conftest import TINY
from tests.engine.page_audit import assert_all_free

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PROMPTS = [[7 + i, 3, 11 * i + 2] for i in range(24)]
SMALL = TINY | {"max_batch_size": 8, "decode_buckets": (8,), "prefill_buckets": (32,), "prefill_chunk_size": 32}


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def is_let_go_of(engine):
    """Within ten seconds. A collection does nothing while another thread's is under way, and then this one has to come again."""
    end = time.monotonic() + 10
    while engine() is not None and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    return engine() is None


def test_every_thread_gets_its_own_whatever_it_asks_for(llms, tmp_path):
    both = llms(embedding_model=str(tiny_encoder.write(tmp_path / "encoder")))
    texts = tiny_encoder.token_lists()
    expected = tokens(both.generate(PROMPTS, GREEDY, progress=False))
    expected_rows, expected_logits = both.embed(texts), both.logits(PROMPTS[0])

    def ask(number):
        prompt = PROMPTS[number]
        match number % 4:
            case 0:
                np.testing.assert_allclose(both.embed(texts), expected_rows, atol=1e-5)
                return [token for delta in both.stream(prompt, GREEDY) for token in delta.token_ids]
            case 1:
                np.testing.assert_allclose(both.logits(PROMPTS[0]), expected_logits, atol=1e-5)
                assert np.isfinite(both.logprobs(list(range(40 + number)))[1:]).all(), "of a length that is compiled meanwhile"
                return both.generate([prompt], GREEDY)[0].outputs[0].token_ids
            case 2:
                deltas = both.stream(prompt, GREEDY)
                next(deltas)
                deltas.close()
        return tokens(both.generate([prompt, PROMPTS[0]], GREEDY))[0]

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, range(24))) == expected
    assert_all_free(both.engine)
    assert both.engine.stats.num_compilations_after_ready == 0


def test_an_interrupted_call_leaves_nothing_behind(llm, monkeypatch):
    taken, original = 0, llm.engine.step

    def step():
        nonlocal taken
        taken += 1
        if taken == 5:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # Ctrl+C while the step runs
            time.sleep(0.5)  # for the main thread to see it, however busy the machine is
        return original()

    monkeypatch.setattr(llm.engine, "step", step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["one", "two", "three"], SamplingParams(max_tokens=50, n=2, ignore_eos=True))
    assert 5 <= taken < 20
    monkeypatch.undo()
    assert_all_free(llm.engine)
    assert tokens(llm.generate(PROMPTS[:2], GREEDY)) == tokens(llm.generate(PROMPTS[:2], GREEDY))


def test_a_stream_that_is_left_is_aborted(llm):
    aborted = llm.engine.stats.finished.get("abort", 0)
    for delta in llm.stream("one", SamplingParams(max_tokens=400, ignore_eos=True)):
        assert delta.token_ids
        break
    del delta
    gc.collect()
    llm.generate("two", GREEDY)
    assert llm.engine.stats.finished["abort"] == aborted + 1
    assert_all_free(llm.engine)


def test_a_stream_is_what_generate_gives(llm):
    params = SamplingParams(temperature=0.0, max_tokens=20, n=2, logprobs=1)
    deltas, [whole] = list(llm.stream("hello", params)), llm.generate("hello", params)
    for output in whole.outputs:
        of_output = [delta for delta in deltas if delta.index == output.index]
        assert "".join(delta.text for delta in of_output) == output.text
        assert [token for delta in of_output for token in delta.token_ids] == output.token_ids
        assert of_output[-1].finish_reason == output.finish_reason
    messages = [{"role": "user", "content": "hi"}]
    assert "".join(delta.text for delta in llm.stream_chat(messages, GREEDY)) == llm.chat(messages, GREEDY).outputs[0].text
    with pytest.raises(RequestError, match="there are 2 prompts: stream one at a time"):
        llm.stream(["a", "b"])
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.stream("")


def test_an_engine_is_driven_by_hand_or_by_its_llm_but_never_by_both(llm):
    llm.engine.add_request("by hand", [1], GREEDY)
    with pytest.raises(RequestError, match="has requests that were added to it by hand"):
        llm.generate([2], GREEDY)
    while llm.engine.has_work:
        llm.engine.step()
    stream = llm.stream([2], SamplingParams(max_tokens=500, ignore_eos=True))
    next(stream)
    for touch in (llm.engine.step, lambda: llm.engine.add_request("x", [1], GREEDY), lambda: llm.engine.abort("request-0")):
        with pytest.raises(RequestError, match="another thread drives this engine"):
            touch()
    stream.close()
    llm.engine.step()
    assert_all_free(llm.engine)


def test_closing_ends_what_waits_and_all_that_is_asked_later(tiny_model_path):
    with LLM(str(tiny_model_path), **SMALL) as llm:
        expected = tokens(llm.generate([PROMPTS[0]], GREEDY))
        assert len(expected[0]) == 20
        started = threading.Event()
        raised = []

        def ask():
            try:
                for _ in llm.stream(PROMPTS[1], SamplingParams(max_tokens=500, ignore_eos=True)):
                    started.set()
            except RequestError as error:
                raised.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        assert started.wait(10)
    thread.join(10)
    assert [type(error) for error in raised] == [EngineClosedError]
    llm.close()
    for ask_later in (
        lambda: llm.generate("x"),
        lambda: llm.chat([{"role": "user", "content": "x"}]),
        lambda: llm.stream("x"),
        lambda: llm.logits([1]),
        lambda: llm.embed("x"),
        lambda: llm.engine.add_request("x", [1], GREEDY),
        llm.engine.step,
    ):
        with pytest.raises(EngineClosedError, match="the engine is closed: nothing can be asked of it any more; make a new one"):
            ask_later()
    thread = llm.engine_loop._thread
    engine = weakref.ref(llm.engine)
    del llm, ask_later, raised
    assert is_let_go_of(engine)
    assert not thread.is_alive()


def test_an_llm_that_nobody_has_any_more_is_let_go_of(tiny_model_path):
    llm = LLM(str(tiny_model_path), **SMALL)
    llm.generate([PROMPTS[0]], GREEDY)
    engine, thread = weakref.ref(llm.engine), llm.engine_loop._thread
    del llm
    assert is_let_go_of(engine)
    thread.join(10)
    assert not thread.is_alive()


def test_a_failed_step_ends_every_call_and_the_next_ones_say_so(tiny_model_path, monkeypatch):
    llm = LLM(str(tiny_model_path), **SMALL)
    monkeypatch.setattr(llm.engine, "step", lambda: 1 / 0)
    with ThreadPoolExecutor(3) as pool:
        errors = [future.exception(10) for future in [pool.submit(llm.generate, [PROMPTS[i]], GREEDY) for i in range(3)]]
    assert {type(error) for error in errors} <= {ZeroDivisionError, EngineFailedError}
    assert ZeroDivisionError in map(type, errors)
    with pytest.raises(EngineFailedError, match=r"the engine failed \(ZeroDivisionError: division by zero\): make a new one") as caught:
        llm.generate([PROMPTS[0]])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    llm.close()
