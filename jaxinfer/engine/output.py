"""OutputBuilder: sampled tokens become text, log-probabilities and finish reasons. Imports no JAX."""

from __future__ import annotations

import math
from collections.abc import Iterable

from jaxinfer.config import ScheduleConfig
from jaxinfer.request import FinishReason, OutputDelta, SamplingParams, TokenLogprob
from jaxinfer.sequence import OutputProgress, Sequence
from jaxinfer.stats import EngineStats
from jaxinfer.tokenizer import Tokenizer
from jaxinfer.tokenizer.detokenizer import IncrementalDetokenizer


def output_progress(tokenizer: Tokenizer, params: SamplingParams, output_ids: Iterable[int] = ()) -> OutputProgress:
    """A sequence's output state. `output_ids`: tokens whose text was sent elsewhere already; the text continues."""
    detokenizer = IncrementalDetokenizer(
        tokenizer,
        params.stop,
        params.skip_special_tokens,
        params.min_tokens,
        params.include_stop_str_in_output,
        params.kept_special_tokens,
    )
    is_started = False
    for token_id in output_ids:
        detokenizer.add(token_id)
        is_started = True
    return OutputProgress(detokenizer, is_started)


class OutputBuilder:
    def __init__(self, tokenizer: Tokenizer, stats: EngineStats, targets: ScheduleConfig) -> None:
        self._tokenizer = tokenizer
        self._stats = stats
        self._target_ttft = math.inf if targets.target_ttft is None else targets.target_ttft
        self._target_itl = math.inf if targets.target_itl is None else targets.target_itl

    def token(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None, now: float) -> OutputDelta:
        """Append a token to its sequence; returns the delta, with a finish reason if it was the last. `now`: seconds,
        time.monotonic()."""
        if sequence.output.last_token_time is None:
            seconds = now - sequence.request.arrival_time
            self._stats.time_to_first_token.observe(seconds)
            self._stats.num_first_tokens_in_time += seconds <= self._target_ttft
        sequence.output.last_token_time = now
        sequence.token_ids.append(token_id)
        reason: FinishReason | None = None
        stop_reason: str | int | None = None
        detokenizer, grammar = sequence.output.detokenizer, sequence.grammar
        if grammar is not None:
            grammar.accept((token_id,))
        if token_id in sequence.end_tokens:
            text = detokenizer.add(token_id) if sequence.params.include_stop_str_in_output else ""
            text, reason = text + detokenizer.flush(), FinishReason.STOP
            stop_reason = token_id if token_id in sequence.params.stop_token_ids else None
        else:
            text = detokenizer.add(token_id)
            if detokenizer.stopped is not None:
                reason, stop_reason = FinishReason.STOP, detokenizer.stopped
            elif len(sequence.token_ids) >= sequence.max_total_tokens:
                text, reason = text + detokenizer.flush(), FinishReason.LENGTH
            elif grammar is not None and grammar.is_over:
                text, reason = text + detokenizer.flush(), FinishReason.STOP if grammar.error is None else FinishReason.LENGTH
        logprobs = () if logprob is None else (logprob,)
        delta = OutputDelta(sequence.request.request_id, sequence.index, text, (token_id,), logprobs, reason, stop_reason)
        if not sequence.output.is_started:
            self._open(sequence, delta)
        return delta

    def roll_back(self, sequence: Sequence) -> None:
        """Its last tokens were taken back (`DecodeRole.roll_back`): its text goes on after those that are left. What
        was sent of the others stays sent."""
        output_ids = sequence.token_ids[sequence.num_prompt :]
        sequence.output.detokenizer = output_progress(self._tokenizer, sequence.params, output_ids).detokenizer

    def nothing(self, sequence: Sequence) -> OutputDelta:
        """The only delta of a sequence with `max_tokens` 0."""
        delta = OutputDelta(sequence.request.request_id, sequence.index, finish_reason=FinishReason.LENGTH)
        self._open(sequence, delta)
        return delta

    def cut(self, sequence: Sequence, reason: FinishReason) -> OutputDelta:
        """The last delta of a sequence that is ended early."""
        return OutputDelta(sequence.request.request_id, sequence.index, sequence.output.detokenizer.flush(), finish_reason=reason)

    def _open(self, sequence: Sequence, delta: OutputDelta) -> None:
        """Add to a first delta what only the first has: cached tokens, echo, prompt log-probabilities."""
        sequence.output.is_started = True
        delta.cached_tokens = sequence.prefill.num_cached
        delta.device_usage = sequence.meter.read()  # a client that disconnects early is billed the prompt
        if sequence.params.prompt_logprobs is not None:
            delta.prompt_logprobs = tuple(sequence.prefill.prompt_logprobs)
        if sequence.params.echo:
            delta.text = self._tokenizer.decode(sequence.prompt.token_ids.tolist(), skip_special_tokens=False) + delta.text

    def observe_gaps(self, sequences: Iterable[Sequence], now: float) -> None:
        """Observe inter-token latencies. Neighbours in a batch mostly have the same, so equal ones are counted
        together."""
        since, count = None, 0
        for sequence in sequences:
            last = sequence.output.last_token_time
            if last != since:
                self._observe_gap(since, count, now)
                since, count = last, 0
            count += 1
        self._observe_gap(since, count, now)

    def _observe_gap(self, since: float | None, count: int, now: float) -> None:
        if since is not None:
            self._stats.inter_token_latency.observe(now - since, count)
            self._stats.num_gaps_in_time += count * (now - since <= self._target_itl)
