"""Each role lives without the other: sequences cross as bytes, go back, go elsewhere, and are given up; no page is
lost."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxinfer.config import EngineConfig
from jaxinfer.decode.role import RollBackError
from jaxinfer.engine import Engine
from jaxinfer.kv_cache.spec import NULL_PAGE
from jaxinfer.kv_transfer.handoff import HandOff, HandOffError, HandOffState
from jaxinfer.prefill.role import PrefillRole
from jaxinfer.request import SamplingParams
from jaxinfer.sequence import Sequence, SequenceState
from pallas_kernels.span import FULL_ATTENTION, Span
from tests.engine import roles
from tests.engine.fake_device import VOCAB, expected_tokens, fake_engine
from tests.engine.page_audit import audit_pages

MAX_MODEL_LEN = 120
MIXES = {
    "full attention": (FULL_ATTENTION,),
    "windows": (FULL_ATTENTION, Span(window=9)),
    "chunks": (Span(chunk=12), FULL_ATTENTION),
    "windows alone": (Span(window=20),),
}


def engine_of(spans: tuple[Span, ...] = (FULL_ATTENTION,), num_pages: int = 120, seed: int = 0, **flat: object) -> Engine:
    settings = {"page_size": 4, "prefill_buckets": (32,), "prefill_chunk_size": 32, "max_batch_size": 8, "decode_buckets": (8,)}
    config = EngineConfig.of(max_model_len=MAX_MODEL_LEN, decode_devices=(1,), **settings | flat)
    return fake_engine(config, num_pages, seed=seed, spans=spans)


def audit(engines: list[Engine], live: list[Sequence]) -> None:
    """Every page of every role has just the owners that are known of; `live` are the sequences of all sides."""
    for engine in engines:
        prefill, decode = engine._components.prefill, engine._components.decode
        mine = [*prefill.scheduler.prefilling, *prefill.prefilled]
        assert {s for s in live if s.prefill.pages and s in mine} == set(mine)
        owned = Counter(page for s in mine for page in s.prefill.pages)
        owned.update(prefill.manager._shared.pages())
        del owned[NULL_PAGE]
        audit_pages(prefill.manager, owned)
        tables = [s.decode.pages for s in decode.running] + [handoff.sequence.decode.pages for handoff in decode.incoming]
        owned = Counter(page for table in (*tables, *(handoff.pages for handoff in decode.outgoing)) for page in table)
        del owned[NULL_PAGE]
        audit_pages(decode.manager, owned)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def params_of(max_tokens: int = 30) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=5)


def check(sequence: Sequence, spans: tuple[Span, ...]) -> None:
    prompt, params = sequence.prompt.token_ids.tolist(), sequence.params
    assert sequence.token_ids[len(prompt) :] == expected_tokens(prompt, params, sequence.index, MAX_MODEL_LEN, spans)


@pytest.mark.parametrize("spans", MIXES.values(), ids=MIXES)
def test_a_prefill_role_and_another_engines_decode_role_give_one_engines_tokens(spans):
    here, there = engine_of(spans), engine_of(spans)
    source, target = here._components.prefill, there._components.decode
    new = [roles.sequences(here, f"r{n}", prompt_of(n, n), params_of())[0] for n in (1, 4, 17, 60, 80)]
    roles.prefill(source, *new)
    running = [roles.pull(source.offer(sequence), source, target, there) for sequence in new]
    audit([here, there], [*new, *running])
    assert not source.prefilled
    roles.drain(target)
    for sequence in running:
        check(sequence, spans)
    audit([here, there], [])
    assert here._components.prefill.manager.num_used == there._components.decode.manager.num_used == 0


@pytest.mark.parametrize("spans", MIXES.values(), ids=MIXES)
def test_pages_cross_chunk_by_chunk_while_prefill_goes_on(spans):
    here, there = engine_of(spans), engine_of(spans)
    source, target = here._components.prefill, there._components.decode
    [sequence] = roles.sequences(here, "long", prompt_of(90), params_of(20))
    source.add(sequence)
    received, num_received = None, []
    while source.has_prompts:
        roles.prefill_step(source)
        handoff = source.offer(sequence)
        newer = roles.sent(handoff, there)
        if received is None:
            received = newer
            assert target.accept(received, roles.link(source, target))
        else:
            received.update(newer)
        is_complete = target.receive(received)
        num_received.append(received.num_received)
        assert received.state is (HandOffState.COMPLETE if is_complete else HandOffState.TRANSFERRING)
        assert is_complete == (sequence.state is SequenceState.PREFILLED)
        audit([here, there], [sequence, received.sequence])
    assert received is not None
    assert num_received == [32, 64, 90], "whole blocks of each chunk, and the rest with the first token"
    target.join(received)
    handoff.to(HandOffState.ACCEPTED)
    handoff.to(HandOffState.TRANSFERRING)
    handoff.to(HandOffState.COMPLETE)
    source.close(handoff)
    roles.drain(target)
    check(received.sequence, spans)
    audit([here, there], [])


@pytest.mark.parametrize("spans", MIXES.values(), ids=MIXES)
def test_a_decode_role_gives_a_sequence_back_and_another_goes_on(spans):
    here, there, elsewhere = (engine_of(spans, seed=seed) for seed in range(3))
    source, first, second = here._components.prefill, there._components.decode, elsewhere._components.decode
    [sequence] = roles.sequences(here, "moves", prompt_of(33), params_of())
    roles.prefill(source, sequence)
    running = roles.pull(source.offer(sequence), source, first, there)
    while running.num_output < 9:
        roles.decode_step(first)
    moved = roles.pull(first.give_back(running), first, second, elsewhere)
    assert moved.num_output == running.num_output
    audit([here, there, elsewhere], [running, moved])
    roles.drain(first)  # a step with its row was under way
    assert running.num_output == moved.num_output, "what was in flight is dropped"
    while moved.num_output < 15:
        roles.decode_step(second)
    # Preempted: it goes back to a prefill role, without its pages.
    handoff = second.give_back(moved)
    again = roles.sent(handoff, here).sequence
    handoff.cancel()
    second.close(handoff)
    roles.drain(second)
    roles.prefill(source, again)
    last = roles.pull(source.offer(again), source, first, there)
    roles.drain(first)
    check(last, spans)
    audit([here, there, elsewhere], [])
    assert all(manager.num_used == 0 for manager in (source.manager, first.manager, second.manager))


def test_pages_of_another_geometry_are_refused():
    here, there = engine_of(), engine_of(page_size=8)
    [sequence] = roles.sequences(here, "a", prompt_of(9), params_of())
    source, target = here._components.prefill, there._components.decode
    roles.prefill(source, sequence)
    with pytest.raises(HandOffError, match="page_size=8"):
        target.accept(source.offer(sequence))
    audit([here, there], [sequence])


class HandOffsAtRandom(RuleBasedStateMachine):
    """Two prefill roles and two decode roles of different engines. Sequences are prefilled, offered early or late,
    accepted, sent in parts, cancelled by either side in every state, rolled back, given back and moved on. At the end
    each has its tokens."""

    @initialize(mix=st.sampled_from(sorted(MIXES)), prefix_cache=st.booleans(), num_pages=st.sampled_from([70, 100]))
    def begin(self, mix: str, prefix_cache: bool, num_pages: int) -> None:
        self.spans = MIXES[mix]
        self.engines = [engine_of(self.spans, num_pages, seed, prefix_cache=prefix_cache) for seed in range(2)]
        self.live: list[Sequence] = []  # on any side
        self.under_way: list[tuple[PrefillRole, HandOff, Engine, HandOff]] = []  # source, its hand-off, target, its own
        self.num_added = self.num_finished = self.num_dropped = 0

    @rule(which=st.integers(0, 1), length=st.integers(1, 80), kind=st.integers(0, 2), max_tokens=st.integers(2, 30))
    def add(self, which: int, length: int, kind: int, max_tokens: int) -> None:
        if len(self.live) >= 6:
            return
        prefill = self.engines[which]._components.prefill
        [sequence] = roles.sequences(self.engines[which], f"r{self.num_added}", prompt_of(80, kind)[:length], params_of(max_tokens))
        self.num_added += 1
        self.live.append(sequence)
        prefill.add(sequence)

    @rule(which=st.integers(0, 1), wait=st.integers(0, 2))
    def prefill_step(self, which: int, wait: int) -> None:
        prefill = self.engines[which]._components.prefill
        roles.prefill_step(prefill, 4 - prefill.num_admitted, wait)
        for sequence in [s for s in self.live if s.state is SequenceState.FINISHED]:
            for place, (_, handoff, engine, received) in enumerate(self.under_way):
                if handoff.sequence is sequence:
                    assert handoff.state is HandOffState.CANCELLED
                    engine._components.decode.cancel(received)
                    self.live.remove(received.sequence)
                    del self.under_way[place]
                    break
            self._finished(sequence)

    @rule(source=st.integers(0, 1), takes=st.integers(0, 1), which=st.integers(0, 9))
    def offer(self, source: int, takes: int, which: int) -> None:
        prefill, engine = self.engines[source]._components.prefill, self.engines[takes]
        taken = {handoff.sequence for _, handoff, _, _ in self.under_way}
        offered = [s for s in (*prefill.scheduler.prefilling, *prefill.prefilled) if s not in taken]
        if not offered:
            return
        handoff = prefill.offer(offered[which % len(offered)])
        received = roles.sent(handoff, engine)
        decode = engine._components.decode
        if len(decode.running) + len(decode.incoming) < 8 and decode.accept(received, roles.link(prefill, decode)):
            self.under_way.append((prefill, handoff, engine, received))
            self.live.append(received.sequence)
        else:
            handoff.cancel()
            prefill.close(handoff)

    @precondition(lambda self: self.under_way)
    @rule(which=st.integers(0, 9), joins=st.booleans())
    def receive(self, which: int, joins: bool) -> None:
        place = which % len(self.under_way)
        prefill, handoff, engine, received = self.under_way[place]
        if received.state is not HandOffState.COMPLETE:
            received.update(roles.sent(prefill.offer(handoff.sequence), engine))
            engine._components.decode.receive(received)
        if joins and received.state is HandOffState.COMPLETE:
            del self.under_way[place]
            engine._components.decode.join(received)
            for state in (HandOffState.ACCEPTED, HandOffState.TRANSFERRING, HandOffState.COMPLETE):
                handoff.to(state)
            prefill.close(handoff)
            self.live.remove(handoff.sequence)

    @precondition(lambda self: self.under_way)
    @rule(which=st.integers(0, 9), drops=st.booleans())
    def cancel(self, which: int, drops: bool) -> None:
        """Either the target gives up, and another may take it, or the request is aborted on both sides."""
        prefill, handoff, engine, received = self.under_way.pop(which % len(self.under_way))
        engine._components.decode.cancel(received)
        self.live.remove(received.sequence)
        if drops:
            prefill.remove(handoff.sequence)
            handoff.sequence.state = SequenceState.FINISHED  # so that a step under way is ignored
            self.live.remove(handoff.sequence)
            self.num_dropped += 1
        else:
            handoff.cancel()
            prefill.close(handoff)

    @rule(which=st.integers(0, 1), num_steps=st.integers(1, 4))
    def decode_steps(self, which: int, num_steps: int) -> None:
        decode = self.engines[which]._components.decode

        def preempt() -> Sequence:
            victim = max(decode.running, key=lambda s: s.scheduling_order)
            self._to_prefill(self.engines[which], victim)
            return victim

        for _ in range(num_steps):
            for sequence in roles.decode_step(decode, preempt):
                self._finished(sequence)

    @rule(source=st.integers(0, 1), which=st.integers(0, 9), has_pages=st.booleans())
    def give_back(self, source: int, which: int, has_pages: bool) -> None:
        """A running sequence moves on with its pages, or begins anew."""
        engine, other = self.engines[source], self.engines[1 - source]
        decode, target = engine._components.decode, other._components.decode
        if not decode.running:
            return
        sequence = decode.running[which % len(decode.running)]
        if not has_pages:
            self._to_prefill(engine, sequence)
            return
        handoff = decode.give_back(sequence)
        received = roles.sent(handoff, other)
        audit(self.engines, self.live)
        self.live.remove(sequence)
        if len(target.running) + len(target.incoming) < 8 and target.accept(received, roles.link(decode, target)):
            assert target.receive(received)
            target.join(received)
        else:
            other._components.prefill.add(received.sequence)
        handoff.cancel()  # the source need not know which
        decode.close(handoff)
        self.live.append(received.sequence)

    @rule(source=st.integers(0, 1), which=st.integers(0, 9), num_tokens=st.integers(1, 12))
    def roll_back(self, source: int, which: int, num_tokens: int) -> None:
        """A running sequence forgets its last tokens; where its pages don't allow that, prefill computes them again."""
        engine = self.engines[source]
        decode = engine._components.decode
        generated = [sequence for sequence in decode.running if sequence.num_output]  # others have nothing to forget
        if not generated:
            return
        sequence = generated[which % len(generated)]
        num_tokens = min(num_tokens, sequence.num_output)
        most, num_left = decode.max_roll_back(sequence), len(sequence.token_ids) - num_tokens
        assert 0 <= most <= sequence.num_output
        if num_tokens <= most:
            decode.roll_back(sequence, num_tokens)
            assert len(sequence.decode.pages) == decode.manager.spec.blocks_for(num_left) * decode.manager.spec.num_groups
        else:
            with pytest.raises(RollBackError) as refused:
                decode.roll_back(sequence, num_tokens)
            assert refused.value.max_tokens == most
            assert len(sequence.token_ids) == num_left + num_tokens
            del sequence.token_ids[-num_tokens:]
            self._to_prefill(engine, sequence)
        assert len(sequence.token_ids) == num_left

    def _to_prefill(self, engine: Engine, sequence: Sequence) -> None:
        handoff = engine._components.decode.give_back(sequence)
        received = roles.sent(handoff, engine)
        handoff.cancel()
        engine._components.decode.close(handoff)
        self.live.remove(sequence)
        self.live.append(received.sequence)
        engine._components.prefill.add(received.sequence)

    def _finished(self, sequence: Sequence) -> None:
        check(sequence, self.spans)
        self.live.remove(sequence)
        self.num_finished += 1

    @invariant()
    def no_page_is_lost(self) -> None:
        if hasattr(self, "live"):
            audit(self.engines, self.live)

    def teardown(self) -> None:
        if not hasattr(self, "live"):
            return
        while self.under_way:
            self.cancel(0, drops=False)
        for _ in range(2000):
            if not self.live:
                break
            for which, engine in enumerate(self.engines):
                self.prefill_step(which, 10)
                while engine._components.prefill.prefilled:
                    self.offer(which, which, -1)  # one that is prefilled: of others nothing more comes here
                    if not self.under_way:
                        break
                    self.receive(0, joins=True)
                self.decode_steps(which, 3)
        assert not self.live
        assert self.num_finished + self.num_dropped == self.num_added
        for engine in self.engines:
            roles.drain(engine._components.decode)
        audit(self.engines, [])
        for engine in self.engines:
            assert engine._components.prefill.manager.num_used == engine._components.decode.manager.num_used == 0


TestHandOffsAtRandom = HandOffsAtRandom.TestCase
TestHandOffsAtRandom.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
