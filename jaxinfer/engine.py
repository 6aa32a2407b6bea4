"""Engine: add_request, step, abort. Prefill worker -> KV hand-off -> decode worker, one turn of the wheel at a time."""

from __future__ import annotations

import heapq
import math
import secrets
import time
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from functools import lru_cache, partial

from jaxinfer.builder import EngineComponents, build
from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.detokenizer import IncrementalDetokenizer
from jaxinfer.engine_access import EngineAccess
from jaxinfer.multi_process.peer_failure import ProcessLostError
from jaxinfer.output import OutputBuilder
from jaxinfer.reference_forward import ReferenceForward
from jaxinfer.request import DEFAULT_CONTEXT, FinishReason, OutputDelta, Request, RequestContext, RequestError, SamplingParams, TokenLogprob
from jaxinfer.runtime.compilation import COUNTER, TOTAL
from jaxinfer.runtime.profile import Profile
from jaxinfer.sampling.bad_words import check_restrictions, needs_history, tokenize_bad_words
from jaxinfer.sequence import Meter, Sequence, SequenceState
from jaxinfer.start_progress import StartProgress
from jaxinfer.stats import EngineStats

_IDLE_WAIT = 0.01  # seconds


class Engine:
    """Drives both meshes from one thread. `add_request`, `step` and `abort` are that thread's; `validate` is anyone's. `encode` is the
    embedding model, which has requests and turns of its own; None without one. An `EngineLoop` is such a thread: while requests of its own
    are under way, these calls raise `RequestError` in others.

    Blocks until weights are loaded and every program is compiled; `progress` tells other threads how far it is. Raises `ConfigError`, `CheckpointError` or
    `UnsupportedModelError`, all of them `ValueError`s that say what to change.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        build: Callable[[EngineConfig, EngineStats], EngineComponents] = build,
        progress: StartProgress | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        schedule, progress = self.config.schedule, progress or StartProgress()
        self.stats = EngineStats(start=progress, target_ttft=schedule.target_ttft, target_itl=schedule.target_itl)
        devices = self.config.devices
        self._profile = Profile(devices.profile, devices.profile_seconds) if devices.profile is not None else None
        self._components = build(self.config, self.stats)
        self.tokenizer = self._components.tokenizer
        self.sampling_defaults = (
            self._components.sampling_defaults
        )  # of `SamplingParams`, by name; for callers to apply where they say nothing
        self.encode = self._components.encode
        self.max_model_len = self._components.plan.max_model_len
        # Some checkpoints' tokenizers know more tokens than the model has embeddings for, some models have spare ones.
        self._vocab_size = min(self.tokenizer.vocab_size, self._components.plan.template.config.vocab_size)
        self._requests: dict[str, list[Sequence]] = {}  # the unfinished sequences of each request
        self._prefilled: list[Sequence] = []  # hand-offs that wait for decode pages, in turn
        self._deadlines: list[tuple[float, str]] = []  # a heap
        self._num_arrived = 0
        self.access = EngineAccess(lambda: self.has_requests)
        self._bad_words = lru_cache(maxsize=256)(partial(tokenize_bad_words, self.tokenizer, self._vocab_size))
        self._output = OutputBuilder(self.tokenizer, self.stats, self.config.schedule)
        self._update_gauges()

    @property
    def has_requests(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do: the last steps are still under way when the last request has ended."""
        return bool(self._requests) or self._components.decode.num_in_flight > 0 or self._components.prefill.num_in_flight > 0

    def on_process_loss(self, listener: Callable[[ProcessLostError], None]) -> None:
        """Where the engine spans processes: have it called with the `ProcessLostError`, in a thread of its own, when one is gone. A step under
        way may then never return, and this process ends within seconds."""
        self._components.processes.on_loss(listener)

    def close(self) -> None:
        """Save what the prefix cache keeps to `kv_disk`, if there is one, for some seconds at most, and let go of it; write a profile that is
        being recorded. Nothing may be asked of the engine afterwards; closing it again is of no effect."""
        if self.access.is_closed:
            return
        with self.access.call():
            self.access.close()
            if self._profile is not None:
                self._profile.stop()
            if self._components.tiers is not None:
                self._components.tiers.close()
            self._components.processes.close()

    @property
    def shares_mesh(self) -> bool:
        """Whether prefill and decode run on the same devices."""
        return self._components.plan.shares_mesh

    def reference_forward(self) -> ReferenceForward:
        """The model without cache or batch, on the decode mesh's weights: what the engine's numbers are checked against. Raises
        `ConfigError` for an engine that spans processes: the others would have to launch it too."""
        components = self._components
        if self.config.devices.num_processes > 1:
            raise ConfigError("the reference forward pass (logits, logprobs) can't span processes: ask for logprobs while generating")
        return ReferenceForward([(stage.template, stage.mesh) for stage in components.plan.decode.stages], components.weights)

    def validate(self, prompt_token_ids: Tokens[int], params: SamplingParams) -> None:
        """Raise `RequestError` for a request that could never be served. `max_tokens` over the room is none: it is clamped to it."""
        prompt_token_ids = params.truncated(prompt_token_ids, self.max_model_len)
        vocab_size, length = self._vocab_size, len(prompt_token_ids)
        if not length:
            raise RequestError("the prompt is empty: give at least one token", "prompt")
        check_restrictions(params, self._bad_words(params.bad_words), self._end_tokens(params))
        longest = self.max_model_len - (params.max_tokens != 0)
        if length > longest:
            room = "" if longest == self.max_model_len else ", for the answer needs room for one"
            message = f"the prompt has {length} tokens: at most {longest} fit{room}; shorten the prompt"
            raise RequestError(message, "prompt", "context_length_exceeded")
        for name, ids in (("prompt", prompt_token_ids), *params.token_lists()):
            for token in ids:
                if not isinstance(token, int) or not 0 <= token < vocab_size:
                    raise RequestError(f"{name} has token id {token!r}: this model's are 0 to {vocab_size - 1}", name)

    def _end_tokens(self, params: SamplingParams) -> frozenset[int]:
        return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(self.tokenizer.eos_token_ids))

    def add_request(
        self, request_id: str, prompt_token_ids: Tokens[int], params: SamplingParams, context: RequestContext = DEFAULT_CONTEXT
    ) -> None:
        """Queue a request. Raises `RequestError` if it can never be served or its id is in use."""
        with self.access.call():
            self._add_request(request_id, prompt_token_ids, params, context)

    def _add_request(self, request_id: str, prompt_token_ids: Tokens[int], params: SamplingParams, context: RequestContext) -> None:
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use", "request_id")
        prompt_token_ids = params.truncated(prompt_token_ids, self.max_model_len)
        self.validate(prompt_token_ids, params)
        request = Request(request_id, tuple(prompt_token_ids), params, time.monotonic(), context)
        end_tokens = self._end_tokens(params)
        room = self.max_model_len - len(prompt_token_ids)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        meter, bad_words = Meter(), self._bad_words(params.bad_words)
        sequences: list[Sequence] = []
        for index in range(params.n):
            sequence = Sequence(
                request,
                index,
                self._num_arrived + index,
                (seed + index) % 2**64,
                end_tokens,
                room if params.max_tokens is None else min(params.max_tokens, room),
                IncrementalDetokenizer(
                    self.tokenizer, params.stop, params.skip_special_tokens, params.min_tokens, params.include_stop_str_in_output
                ),
                list(request.prompt_token_ids),
                meter,
                sequences[0] if sequences else None,
                bad_words=bad_words,
                needs_history=needs_history(bad_words),
            )
            sequences.append(sequence)
        self._num_arrived += params.n
        self._requests[request_id] = sequences
        for sequence in sequences:
            self._components.prefill.scheduler.add(sequence)
        if context.deadline is not None:
            heapq.heappush(self._deadlines, (context.deadline, request_id))
        self.stats.num_requests += 1
        self.stats.num_prompt_tokens += len(request.prompt_token_ids)
        self.stats.num_waiting = self._components.prefill.scheduler.num_waiting

    def abort(self, request_id: str) -> bool:
        """Drop a request wherever it stands and free its pages on both meshes; False if there is none of that id (any more)."""
        with self.access.call():
            sequences = self._requests.get(request_id)
            if sequences is None:
                return False
            for sequence in list(sequences):
                self._finish(sequence, FinishReason.ABORT)
            self._update_gauges()
            return True

    def step(self) -> list[OutputDelta]:
        """One iteration: start a prefill chunk, hand over what is prefilled, start a decode step, read the decode step before it.

        Raises `ProcessLostError` where the engine spans processes and one is gone; this process then ends within seconds."""
        with self.access.call(), self._components.processes.surface_peer_failure():
            return self._iterate()

    def _iterate(self) -> list[OutputDelta]:
        if self._profile is not None and self.has_work:
            self._profile.tick()
        unexpected, stats = COUNTER.num_unexpected_compilations, self.stats
        prefill, decode = self._components.prefill, self._components.decode
        # This thread's own time: waiting for the device, or for a core that the device keeps, is not the host's work.
        began = time.thread_time()
        deltas = self._time_out()
        changes, started = self._launch_prefill()
        self._hand_over()
        handed_over = time.thread_time()
        # More than that are under way where a lane has just lost its last sequence.
        launched = decode.num_in_flight <= decode.depth and decode.launch(self._preempt_last)
        launched_at = time.thread_time()
        # One decode step of each lane stays under way; the last one of a batch is read as soon as nothing follows it.
        is_due = decode.num_in_flight > (decode.depth if launched else 0)
        wait, until = int(not (is_due or launched or started)), math.inf
        if self._components.plan.shares_mesh and decode.num_in_flight:
            # On one mesh steps end in the order of their launches: reading them in that order costs no time and tells theirs.
            wait, until = prefill.num_in_flight if is_due else wait, decode.oldest_launch
        for first in prefill.collect(wait=wait, until=until):
            deltas.append(self._take_first(*first, time.monotonic()))
        changes = changes or bool(deltas)
        prefilled = time.thread_time()
        if is_due:
            decoded, now = decode.collect(), time.monotonic()
            self._output.observe_gaps([sequence for sequence, _, _ in decoded], now)
            taken = [self._output.token(*token, now) for token in decoded]
            for delta, (sequence, _, _) in zip(taken, decoded, strict=True):
                if delta.finish_reason is not None:
                    self._end(sequence, delta)
            deltas += taken
        stats.num_output_tokens += sum([len(delta.token_ids) for delta in deltas])
        if changes or not decode.is_steady:
            self._update_gauges()
        stats.num_compilations_after_ready += COUNTER.num_unexpected_compilations - unexpected
        stats.num_decode_steps += launched
        stats.prefill_host_seconds += handed_over - began + prefilled - launched_at
        if launched:
            stats.host_seconds += time.thread_time() - prefilled + launched_at - handed_over
        return deltas

    def _time_out(self) -> list[OutputDelta]:
        """End the requests whose deadline has passed."""
        deltas = []
        while self._deadlines and self._deadlines[0][0] <= time.monotonic():
            deadline, request_id = heapq.heappop(self._deadlines)
            sequences = self._requests.get(request_id, [])
            if sequences and sequences[0].context.deadline == deadline:  # else it ended, and another has its id perhaps
                first = sequences[0]
                if first.leader is None and first.first_scheduled_time is None:  # it waited to the end
                    first.meter.queue_seconds = time.monotonic() - first.request.arrival_time
                deltas += [self._end(sequence, self._output.cut(sequence, FinishReason.TIMEOUT)) for sequence in list(sequences)]
        return deltas

    def _launch_prefill(self) -> tuple[bool, bool]:
        """Whether any sequence waits or prefills, and whether a step was started."""
        components, scheduler = self._components, self._components.prefill.scheduler
        if not scheduler.num_waiting and not scheduler.prefilling:
            if components.tiers is not None:
                components.tiers.poll(0.0)
            return False, False
        # With nothing else to do the engine would turn idly until a fetch ends.
        is_idle = not (self._num_admitted or len(scheduler.queue) or components.prefill.num_in_flight or components.decode.num_in_flight)
        scheduler.poll_tiers(_IDLE_WAIT if is_idle else 0.0)
        num_running = len(components.decode.scheduler.running) + len(self._prefilled)
        # Running sequences grow: leave each a page, or what is admitted now would be preempted at once.
        reserved_pages = num_running if components.plan.shares_mesh else 0
        free_slots = self.config.schedule.max_batch_size - self._num_admitted
        chunks = components.prefill.launch(
            self._prefill_budget(num_running), free_slots, reserved_pages, self._preempt_for_admission, self._preempt_for_progress
        )
        now = time.monotonic()
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.first_scheduled_time is None:
                sequence.first_scheduled_time = now
                self.stats.queue_seconds.observe(now - sequence.request.arrival_time)
                if sequence.leader is None:
                    sequence.meter.queue_seconds = now - sequence.request.arrival_time
                    self.stats.num_cached_tokens += sequence.num_cached
        self.stats.num_prefill_steps += bool(chunks)
        return True, bool(chunks)

    @property
    def _num_admitted(self) -> int:
        """Sequences that hold pages."""
        components = self._components
        return len(components.decode.scheduler.running) + len(self._prefilled) + len(components.prefill.scheduler.prefilling)

    def _prefill_budget(self, num_running: int) -> int:
        chunk_controller, decode = self._components.prefill.chunk_controller, self._components.decode
        if not chunk_controller.steers:
            return self.config.schedule.prefill_chunk_size
        now = time.monotonic()
        chunk_controller.observe_decode(decode.step_seconds)
        return chunk_controller.budget(
            num_running, [(tokens, now - arrival_time) for tokens, arrival_time in self._components.prefill.scheduler.backlog()]
        )

    def _preempt_for_admission(self, waiting: Sequence, prefilling: list[Sequence]) -> bool:
        """Preempt what is less urgent than a sequence that waits: it holds the place or the pages that are short."""
        components = self._components
        holders = self._prefilled + prefilling
        # On two meshes a running sequence holds none of the pages that a prompt needs.
        if components.plan.shares_mesh or self._num_admitted >= self.config.schedule.max_batch_size:
            holders += components.decode.scheduler.running
        return self._preempt_above(components.prefill.scheduler.queue.level(waiting), holders)

    def _preempt_for_progress(self, sequence: Sequence, prefilling: list[Sequence]) -> bool:
        """Preempt the last in turn of those that are served after an admitted sequence, which lacks pages to go on."""
        components = self._components
        holders = self._prefilled + prefilling + (components.decode.scheduler.running if components.plan.shares_mesh else [])
        return self._preempt_after(sequence.turn, holders)

    def _hand_over(self) -> None:
        while self._prefilled and self._move(self._prefilled[0]):
            self._components.decode.join(self._prefilled.pop(0))
        self.stats.num_pages_moved = self._components.transfer.num_pages_moved

    def _move(self, sequence: Sequence) -> bool:
        running = self._components.decode.scheduler.running
        while not self._components.transfer.move(sequence, reserved_pages=len(running)):
            if not self._preempt_above(sequence.turn[0], running):
                return False
        return True

    def _preempt_above(self, level: int, holders: list[Sequence]) -> bool:
        """Preempt the last in turn of those that are less urgent than a level; False if none is."""
        return self._preempt_after((level, math.inf), holders)

    def _preempt_after(self, turn: tuple[int, float], holders: list[Sequence]) -> bool:
        """Preempt the last in turn of those that are served after this turn; False if none is."""
        victim = max(holders, key=lambda s: s.turn, default=None)
        if victim is None or victim.turn <= turn:
            return False
        self._preempt(victim)
        return True

    def _preempt_last(self) -> Sequence | None:
        """Preempt the last in turn of those that hold pages of the decode pool."""
        holders = list(self._components.decode.scheduler.running)
        if self._components.plan.shares_mesh:
            holders += [s for s in self._prefilled if s.prefill_pages] + self._components.prefill.scheduler.prefilling
        if not holders:
            return None
        victim = max(holders, key=lambda s: s.turn)
        self._preempt(victim)
        return victim

    def _preempt(self, victim: Sequence) -> None:
        """Take a sequence's pages back and queue it again. Its tokens are kept, and those of its pages that nobody needs meanwhile."""
        self._release(victim)
        victim.epoch += 1
        victim.num_computed = victim.num_in_flight = 0
        victim.state = SequenceState.WAITING
        self._components.prefill.scheduler.add(victim)
        self.stats.num_preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        """Give back whatever a sequence holds on either mesh."""
        if sequence.state is SequenceState.RUNNING:
            self._components.decode.leave(sequence)
        elif sequence in self._prefilled:
            self._prefilled.remove(sequence)
        self._components.prefill.scheduler.remove(sequence)

    def _take_first(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None, now: float) -> OutputDelta:
        """A sequence's prompt is in the cache: take the token sampled at its end."""
        if sequence.max_tokens == 0:
            return self._end(sequence, self._output.nothing(sequence))
        delta = self._output.token(sequence, token_id, logprob, now)
        if delta.finish_reason is not None:
            return self._end(sequence, delta)
        self._prefilled.append(sequence)
        self._prefilled.sort(key=lambda s: s.turn)
        return delta

    def _end(self, sequence: Sequence, delta: OutputDelta) -> OutputDelta:
        """Finish a sequence with its last delta."""
        assert delta.finish_reason is not None
        self._finish(sequence, delta.finish_reason)
        delta.device_usage = sequence.meter.read()
        return delta

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._release(sequence)
        sequence.state = SequenceState.FINISHED
        self._components.prefill.scheduler.queue.charge(sequence.context.tenant, sequence.num_output)
        unfinished = self._requests[sequence.request.request_id]
        unfinished.remove(sequence)
        if not unfinished:
            del self._requests[sequence.request.request_id]
        self.stats.finished[reason] = self.stats.finished.get(reason, 0) + 1

    def _update_gauges(self) -> None:
        stats, components = self.stats, self._components
        stats.num_waiting = components.prefill.scheduler.num_waiting
        stats.num_prefilling = len(components.prefill.scheduler.prefilling) + len(self._prefilled)
        stats.num_running = len(components.decode.scheduler.running)
        stats.prefill_pages_used, stats.decode_pages_used = components.prefill_manager.num_used, components.decode_manager.num_used
        stats.prefill_pages_cached, stats.decode_pages_cached = components.prefill_manager.num_cached, components.decode_manager.num_cached
        stats.peak_pages_used = max(stats.peak_pages_used, stats.decode_pages_used)
        if components.tiers is not None:
            stats.num_restored_tokens = components.tiers.num_tokens_restored
        stats.num_compilations = TOTAL.num_compilations
