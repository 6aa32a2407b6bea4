"""The tiny model, prefilled by one engine's role and decoded by another's: one engine's tokens, though only bytes
cross."""

from __future__ import annotations

from collections import deque

from jaxinfer.llm import LLM
from jaxinfer.sequence import Sequence
from tests.conftest import MakeLLM
from tests.engine import roles
from tests.engine.page_audit import audit
from tests.engine.workload import workload

PROMPTS, PARAMS = workload()
SMALL = {"max_batch_size": 8, "decode_buckets": (8,), "prefill_buckets": (128,)}


def outputs_of(sequences: list[Sequence]) -> list[list[list[int]]]:
    return [[sequence.token_ids[sequence.num_prompt :]] for sequence in sequences]


def two_engines(llms: MakeLLM) -> tuple[LLM, LLM]:
    """Which share neither devices nor weights."""
    first = llms(prefill_devices=(1,), decode_devices=(0,))
    return first, llms(prefill_devices=(2,), decode_devices=(3,), **SMALL)


def test_a_prefill_role_and_another_engines_decode_role_give_one_engines_tokens(llms: MakeLLM, expected: list[list[list[int]]]) -> None:
    first, second = two_engines(llms)
    source, target = first.engine._components.prefill, second.engine._components.decode
    new = [
        roles.sequences(first.engine, f"r{number}", prompt, params)[0]
        for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True))
    ]
    waiting, running, ended = deque(new), [], []
    while len(ended) < len(new):
        while waiting and len(running) - len(ended) < 3:  # whose pages always fit
            roles.prefill(source, waiting[0])
            running.append(roles.pull(source.offer(waiting.popleft()), source, target, second.engine))
        ended += roles.decode_step(target)
    roles.drain(target)
    assert outputs_of(running) == expected
    assert source.manager.num_used == target.manager.num_used == 0
    for llm in (first, second):
        llm.engine._metrics.update_gauges()
        audit(llm.engine)
        assert llm.engine.stats.num_compilations_after_ready == 0


def test_running_sequences_move_to_another_engines_decode_role(llms: MakeLLM, expected: list[list[list[int]]]) -> None:
    """One after the other, at different lengths, forward and reverse, once through a prefill role."""
    first, second = two_engines(llms)
    source, here, there = (first.engine._components.prefill, first.engine._components.decode, second.engine._components.decode)
    chosen = [2, 3, 5, 11, 12, 14]  # greedy, sampled and with penalties
    for number in chosen:
        [sequence] = roles.sequences(first.engine, f"m{number}", PROMPTS[number], PARAMS[number])
        roles.prefill(source, sequence)
        running = roles.pull(source.offer(sequence), source, here, first.engine)
        while running.num_output < 5 + number:
            roles.decode_step(here)
        running = roles.pull(here.give_back(running), here, there, second.engine)
        while running.num_output < 9 + number:
            roles.decode_step(there)
        handoff = there.give_back(running)
        again = roles.sent(handoff, first.engine).sequence
        handoff.cancel()
        there.close(handoff)
        roles.prefill(source, again)
        last = roles.pull(source.offer(again), source, here, first.engine)
        roles.drain(here)
        roles.drain(there)
        assert [last.token_ids[last.num_prompt :]] == expected[number]
    assert source.manager.num_used == here.manager.num_used == there.manager.num_used == 0
