"""OutputBuilder: sampled tokens become text, log-probabilities and reasons to finish. Imports no JAX."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from jaxinfer.request import FinishReason, OutputDelta, TokenLogprob
from jaxinfer.sequence import Sequence
from jaxinfer.stats import EngineStats
from jaxinfer.tokenizer import Tokenizer


class OutputBuilder:
    def __init__(self, tokenizer: Tokenizer, stats: EngineStats) -> None:
        self._tokenizer = tokenizer
        self._stats = stats

    def token(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None, now: float) -> OutputDelta:
        """Append a token to its sequence; says what to send and whether it was the last. `now` is in seconds, time.monotonic()."""
        if sequence.last_token_time is None:
            self._stats.time_to_first_token.observe(now - sequence.request.arrival_time)
        sequence.last_token_time = now
        sequence.token_ids.append(token_id)
        text, reason, stop_reason = self._text(sequence, token_id)
        logprobs = () if logprob is None else (logprob,)
        if sequence.is_started:
            return OutputDelta(sequence.request.request_id, sequence.index, text, (token_id,), logprobs, reason, stop_reason)
        text = self._opening(sequence) + text
        return OutputDelta(
            sequence.request.request_id, sequence.index, text, (token_id,), logprobs, reason, stop_reason, *self._first_only(sequence)
        )

    def _text(self, sequence: Sequence, token_id: int) -> tuple[str, FinishReason | None, str | int | None]:
        detokenizer = sequence.detokenizer
        if token_id in sequence.end_tokens:
            return detokenizer.flush(), FinishReason.STOP, token_id if token_id in sequence.params.stop_token_ids else None
        text = detokenizer.add(token_id)
        if detokenizer.stopped is not None:
            return text, FinishReason.STOP, detokenizer.stopped
        if sequence.num_output >= sequence.max_tokens:
            return text + detokenizer.flush(), FinishReason.LENGTH, None
        return text, None, None

    def nothing(self, sequence: Sequence) -> OutputDelta:
        """The only delta of a sequence that was to generate no token."""
        text = self._opening(sequence)
        return OutputDelta(
            sequence.request.request_id, sequence.index, text, (), (), FinishReason.LENGTH, None, *self._first_only(sequence)
        )

    def _opening(self, sequence: Sequence) -> str:
        if not sequence.params.echo:
            return ""
        return self._tokenizer.decode(list(sequence.request.prompt_token_ids), skip_special_tokens=False)

    def _first_only(self, sequence: Sequence) -> tuple[tuple[TokenLogprob | None, ...] | None, int]:
        """A first delta's prompt log-probabilities and cached tokens."""
        sequence.is_started = True
        return tuple(sequence.prompt_logprobs) if sequence.params.prompt_logprobs is not None else None, sequence.num_cached

    def observe_gaps(self, sequences: Iterable[Sequence], now: float) -> None:
        """Count the times since the last tokens of sequences that have another; most of a batch have the same."""
        for last, count in Counter([s.last_token_time for s in sequences]).items():
            if last is not None:
                self._stats.inter_token_latency.observe(now - last, count)
