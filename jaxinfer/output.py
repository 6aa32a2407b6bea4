"""OutputBuilder: sampled tokens become text, log-probabilities and reasons to finish. Imports no JAX."""

from __future__ import annotations

import time
from typing import Any

from jaxinfer.request import FinishReason, OutputDelta, TokenLogprob
from jaxinfer.sequence import Sequence
from jaxinfer.stats import EngineStats
from jaxinfer.tokenizer import Tokenizer


class OutputBuilder:
    def __init__(self, tokenizer: Tokenizer, stats: EngineStats) -> None:
        self._tokenizer = tokenizer
        self._stats = stats

    def token(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None) -> OutputDelta:
        """Append a token to its sequence; says what to send and whether it was the last."""
        self._observe(sequence)
        sequence.token_ids.append(token_id)
        reason: FinishReason | None = None
        stop_reason: str | int | None = None
        text = ""
        if token_id in sequence.end_tokens:
            reason = FinishReason.STOP
            stop_reason = token_id if token_id in sequence.params.stop_token_ids else None
        else:
            text = sequence.detokenizer.add(token_id)
            if sequence.detokenizer.stopped is not None:
                reason, stop_reason = FinishReason.STOP, sequence.detokenizer.stopped
            elif sequence.num_output >= sequence.max_tokens:
                reason = FinishReason.LENGTH
        if reason is not None:
            text += sequence.detokenizer.flush()
        return OutputDelta(
            sequence.request.request_id,
            sequence.index,
            self._opening(sequence) + text,
            (token_id,),
            () if logprob is None else (logprob,),
            reason,
            stop_reason,
            **self._first_only(sequence),
        )

    def nothing(self, sequence: Sequence) -> OutputDelta:
        """The only delta of a sequence that was to generate no token."""
        text = self._opening(sequence)
        return OutputDelta(
            sequence.request.request_id, sequence.index, text, finish_reason=FinishReason.LENGTH, **self._first_only(sequence)
        )

    def _opening(self, sequence: Sequence) -> str:
        if not sequence.params.echo or sequence.is_started:
            return ""
        return self._tokenizer.decode(list(sequence.request.prompt_token_ids), skip_special_tokens=False)

    def _first_only(self, sequence: Sequence) -> dict[str, Any]:
        if sequence.is_started:
            return {}
        sequence.is_started = True
        scores = tuple(sequence.prompt_logprobs) if sequence.params.prompt_logprobs is not None else None
        return {"prompt_logprobs": scores, "cached_tokens": sequence.num_cached}

    def _observe(self, sequence: Sequence) -> None:
        now = time.monotonic()
        if sequence.last_token_time is None:
            self._stats.time_to_first_token.observe(now - sequence.request.arrival_time)
        else:
            self._stats.inter_token_latency.observe(now - sequence.last_token_time)
        sequence.last_token_time = now
        self._stats.num_output_tokens += 1
