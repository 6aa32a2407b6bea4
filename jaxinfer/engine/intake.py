"""RequestIntake: checks requests and makes them into sequences. Imports no JAX."""

from __future__ import annotations

import heapq
import secrets
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from functools import lru_cache, partial

from jaxinfer.engine.output import output_progress
from jaxinfer.request import RequestContext, RequestError, SamplingParams
from jaxinfer.sampling.bad_words import check_restrictions, needs_history, tokenize_bad_words
from jaxinfer.segments import Prompt, TokenSegment
from jaxinfer.sequence import Meter, PrefillProgress, Request, Sequence
from jaxinfer.structured.grammars import Grammar, Grammars
from jaxinfer.token_ids import checked_tokens
from jaxinfer.tokenizer import Tokenizer


class RequestIntake:
    """`vocab_size`: of the model's embeddings. Any thread may call `validate`."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, max_model_len: int, clock: Callable[[], float], grammars: Grammars | None = None
    ) -> None:
        self._tokenizer, self._max_model_len, self._clock = tokenizer, max_model_len, clock
        # Some checkpoints' tokenizers know more tokens than the model has embeddings for, some models have spare ones.
        self._vocab_size = min(tokenizer.vocab_size, vocab_size)
        self._num_arrived = 0
        self._grammars = grammars
        self._bad_words = lru_cache(maxsize=256)(partial(tokenize_bad_words, tokenizer, self._vocab_size))

    def validate(self, prompt: Tokens[int] | Prompt, params: SamplingParams) -> Prompt:
        """See `Engine.validate`."""
        given = prompt.token_ids if isinstance(prompt, Prompt) else prompt
        token_ids = params.truncated(given, self._max_model_len)
        length = len(token_ids)
        if not length:
            raise RequestError("the prompt is empty: give at least one token", "prompt")
        check_restrictions(params, self._bad_words(params.bad_words), self._end_tokens(params))
        if params.structured_outputs is not None:
            if self._grammars is None:
                raise RequestError("this engine has no structured outputs: start it without --no-structured-outputs", "structured_outputs")
            self._grammars.check(params.structured_outputs)
        longest = self._max_model_len - (params.max_tokens != 0)
        if length > longest:
            room = "" if longest == self._max_model_len else ", for the answer needs room for one"
            message = f"the prompt has {length} tokens: at most {longest} fit{room}; shorten the prompt"
            raise RequestError(message, "prompt", "context_length_exceeded")
        tokens = checked_tokens(token_ids, self._vocab_size, "prompt")
        for name, ids in params.token_lists():
            checked_tokens(list(ids), self._vocab_size, name)
        if not isinstance(prompt, Prompt):
            return Prompt((TokenSegment(tokens),))
        if length < len(given):
            message = f"truncate_prompt_tokens is {params.truncate_prompt_tokens}: only a list of token ids can be cut, leave it out"
            raise RequestError(message, "truncate_prompt_tokens")
        return prompt

    def sequences(
        self,
        request_id: str,
        prompt: Tokens[int] | Prompt,
        params: SamplingParams,
        context: RequestContext,
        output_ids: Tokens[int] = (),
    ) -> list[Sequence]:
        """A request's n sequences. `output_ids`: what another engine has answered of the only one. Raises
        `RequestError` if it can never be served. A `Prompt` was validated."""
        checked = prompt if isinstance(prompt, Prompt) else self.validate(prompt, params)
        request = Request(request_id, checked, params, self._clock(), context)
        end_tokens, bad_words, meter = self._end_tokens(params), self._bad_words(params.bad_words), Meter()
        room = self._max_model_len - len(checked)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        sequences: list[Sequence] = []
        for index in range(params.n):
            sequence = Sequence(
                request,
                index,
                self._num_arrived + index,
                (seed + index) % 2**64,
                end_tokens,
                room if params.max_tokens is None else min(params.max_tokens, room),
                output_progress(self._tokenizer, params, output_ids),
                checked.token_ids.tolist() + list(output_ids),
                meter,
                bad_words,
                needs_history(bad_words),
                grammar=self._follow(params, output_ids),
                prefill=PrefillProgress(sequences[0] if sequences else None),
            )
            sequences.append(sequence)
        self._num_arrived += params.n
        return sequences

    def _follow(self, params: SamplingParams, output_ids: Tokens[int]) -> Grammar | None:
        if params.structured_outputs is None:
            return None
        assert self._grammars is not None
        return self._grammars.follow(params.structured_outputs, output_ids)

    def _end_tokens(self, params: SamplingParams) -> frozenset[int]:
        return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(self._tokenizer.eos_token_ids))


class Deadlines:
    """Deadlines of requests, earliest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def add(self, request_id: str, deadline: float | None) -> None:
        if deadline is not None:
            heapq.heappush(self._heap, (deadline, request_id))

    def expired(self, now: float) -> list[tuple[float, str]]:
        """Remove and return (deadline, request id) of those that have passed. The request may have ended since, and
        another may have its id."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            found.append(heapq.heappop(self._heap))
        return found
