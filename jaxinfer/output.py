"""OutputBuilder: sampled tokens become text, log-probabilities and reasons to finish. Imports no JAX."""

from __future__ import annotations

import math
from collections.abc import Iterable

from jaxinfer.config import ScheduleConfig
from jaxinfer.request import FinishReason, OutputDelta, TokenLogprob
from jaxinfer.sequence import Sequence
from jaxinfer.stats import EngineStats
from jaxinfer.tokenizer import Tokenizer


class OutputBuilder:
    def __init__(self, tokenizer: Tokenizer, stats: EngineStats, targets: ScheduleConfig) -> None:
        self._tokenizer = tokenizer
        self._stats = stats
        self._target_ttft = math.inf if targets.target_ttft is None else targets.target_ttft
        self._target_itl = math.inf if targets.target_itl is None else targets.target_itl

    def token(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None, now: float) -> OutputDelta:
        """Append a token to its sequence; says what to send and whether it was the last. `now` is in seconds, time.monotonic()."""
        if sequence.last_token_time is None:
            seconds = now - sequence.request.arrival_time
            self._stats.time_to_first_token.observe(seconds)
            self._stats.num_first_tokens_in_time += seconds <= self._target_ttft
        sequence.last_token_time = now
        sequence.token_ids.append(token_id)
        reason: FinishReason | None = None
        stop_reason: str | int | None = None
        detokenizer = sequence.detokenizer
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
        logprobs = () if logprob is None else (logprob,)
        delta = OutputDelta(sequence.request.request_id, sequence.index, text, (token_id,), logprobs, reason, stop_reason)
        if not sequence.is_started:
            self._open(sequence, delta)
        return delta

    def nothing(self, sequence: Sequence) -> OutputDelta:
        """The only delta of a sequence that was to generate no token."""
        delta = OutputDelta(sequence.request.request_id, sequence.index, finish_reason=FinishReason.LENGTH)
        self._open(sequence, delta)
        return delta

    def cut(self, sequence: Sequence, reason: FinishReason) -> OutputDelta:
        """The last delta of a sequence that is not to go on."""
        return OutputDelta(sequence.request.request_id, sequence.index, sequence.detokenizer.flush(), finish_reason=reason)

    def _open(self, sequence: Sequence, delta: OutputDelta) -> None:
        """Put into a first delta what only that has."""
        sequence.is_started = True
        delta.cached_tokens = sequence.num_cached
        delta.device_usage = sequence.meter.read()  # who goes away before the end is billed the prompt
        if sequence.params.prompt_logprobs is not None:
            delta.prompt_logprobs = tuple(sequence.prompt_logprobs)
        if sequence.params.echo:
            delta.text = self._tokenizer.decode(list(sequence.request.prompt_token_ids), skip_special_tokens=False) + delta.text

    def observe_gaps(self, sequences: Iterable[Sequence], now: float) -> None:
        """Count the times since the last tokens of sequences that have another; most neighbours in a batch have the same."""
        since, count = None, 0
        for sequence in sequences:
            last = sequence.last_token_time
            if last != since:
                self._observe_gap(since, count, now)
                since, count = last, 0
            count += 1
        self._observe_gap(since, count, now)

    def _observe_gap(self, since: float | None, count: int, now: float) -> None:
        if since is not None:
            self._stats.inter_token_latency.observe(now - since, count)
            self._stats.num_gaps_in_time += count * (now - since <= self._target_itl)
