"""/v1/completions: one or many prompts in, as text or token ids, their continuations out, at once or as a stream of
chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from jaxinfer.request import OutputDelta, RequestContext, RequestError, SamplingParams, TokenLogprob
from jaxinfer.segments import Prompt
from server.openai.caller import UNKNOWN, Caller, request_identity, tier_of
from server.openai.logprobs import CompletionLogprobsWriter, TokenNames, prompt_logprobs_by_id
from server.openai.protocol import CompletionRequest
from server.openai.responses import Completion, CompletionChoice, CompletionLogprobs, Usage
from server.openai.service import Service, finished_by, new_id
from server.openai.stream import merge
from server.openai.text_work import size_of_grammar, work_on
from server.usage import RequestUsage

ENDPOINT = "/v1/completions"


@dataclass(frozen=True, slots=True)
class _Job:
    id: str
    created: int
    prompts: list[Prompt]
    params: SamplingParams
    context: RequestContext
    usage: RequestUsage
    body: CompletionRequest  # the answer's options


async def _prepare(service: Service, body: CompletionRequest, caller: Caller) -> _Job:
    context = caller.context(body)
    params = body.sampling_params(service.backend.sampling_defaults)
    if len(body.prompts) > service.config.max_prompts:
        raise RequestError(f"prompt has {len(body.prompts)} prompts: at most {service.config.max_prompts} in one request", "prompt")
    token_lists = await work_on(sum(map(len, body.prompts)), partial(_encode, service, body.prompts, params))
    prompts = await work_on(size_of_grammar(params), lambda: [service.validate("prompt", token_ids, params) for token_ids in token_lists])
    id = new_id("cmpl")
    usage = service.usage.measure(request_identity(caller, context, id, ENDPOINT, body.model), prompts, params.n)
    return _Job(id, int(time.time()), prompts, params, context, usage, body)


def _encode(service: Service, prompts: list[str] | list[list[int]], params: SamplingParams) -> list[list[int]]:
    limit = service.backend.max_model_len
    return [
        list(params.truncated(p, limit)) if isinstance(p, list) else service.encode("prompt", p, params, add_special_tokens=True)
        for p in prompts
    ]


class _ChoiceStream:
    """The state of one choice's stream: turns deltas into pieces of a CompletionChoice."""

    def __init__(self, service: Service, job: _Job, prompt_index: int, index: int) -> None:
        self.index = prompt_index * job.params.n + index
        self._prompt = job.prompts[prompt_index].token_ids
        self._wants_logprobs = job.params.logprobs is not None
        self._owes_prompt = bool(job.body.echo) and self._wants_logprobs
        self._tokenizer, self._num_prompt_logprobs = service.tokenizer, job.body.prompt_logprobs
        self._owes_prompt_ids = self._wants_ids = bool(job.body.return_token_ids)
        names = TokenNames(service.tokenizer, bool(job.body.return_tokens_as_token_ids))
        skipped = service.tokenizer.special_ids if job.params.skip_special_tokens else frozenset()
        self._writer = CompletionLogprobsWriter(names, job.params.logprobs or 0, skipped)

    def piece(self, delta: OutputDelta, prompt_logprobs: tuple[TokenLogprob | None, ...] | None) -> CompletionChoice:
        """What `delta` adds; the sequence's first piece has the echoed prompt's log-probabilities too."""
        token_ids: list[int] = []
        entries: list[TokenLogprob | None] = []
        if self._owes_prompt and prompt_logprobs is not None:
            self._owes_prompt = False
            token_ids += self._prompt.tolist()
            entries += prompt_logprobs
        if self._wants_logprobs:
            token_ids += delta.token_ids
            entries += delta.logprobs
        logprobs = self._writer.write(token_ids, entries) if token_ids else None
        choice = CompletionChoice(index=self.index, text=delta.text, logprobs=logprobs, finish_reason=finished_by(delta.finish_reason))
        if self._wants_ids:
            choice.token_ids = list(delta.token_ids)
        if self._owes_prompt_ids:
            choice.prompt_token_ids, self._owes_prompt_ids = self._prompt.tolist(), False
        if self._num_prompt_logprobs is not None and prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs_by_id(self._tokenizer, prompt_logprobs, self._num_prompt_logprobs)
            self._num_prompt_logprobs = None
        return choice


async def _pieces(service: Service, job: _Job) -> AsyncGenerator[CompletionChoice]:
    """The pieces of all choices as they come, counted. Closing it aborts every prompt's request."""
    sequences = [[_ChoiceStream(service, job, p, i) for i in range(job.params.n)] for p in range(len(job.prompts))]
    prompt_logprobs: dict[int, tuple[TokenLogprob | None, ...]] = {}
    requests = [service.backend.generate(f"{job.id}-{p}", prompt, job.params, job.context) for p, prompt in enumerate(job.prompts)]
    with job.usage:
        async with aclosing(merge(requests)) as deltas:
            async for p, delta in deltas:
                job.usage.add(delta, p)
                if delta.prompt_logprobs is not None:
                    prompt_logprobs[p] = delta.prompt_logprobs  # once a request, for all its n sequences
                yield sequences[p][delta.index].piece(delta, prompt_logprobs.get(p))


async def respond(service: Service, body: CompletionRequest, caller: Caller = UNKNOWN) -> Completion:
    """The whole answer. Raises what `errors.from_exception` knows."""
    service = service.of_model(body.model)
    job = await _prepare(service, body, caller)
    texts: list[list[str]] = [[] for _ in range(len(job.prompts) * job.params.n)]
    choices = [CompletionChoice(index=i, text="", logprobs=_no_logprobs(job), finish_reason=None) for i in range(len(texts))]
    async with aclosing(_pieces(service, job)) as pieces:
        async for piece in pieces:
            choice = choices[piece.index]
            texts[piece.index].append(piece.text)
            choice.finish_reason = piece.finish_reason or choice.finish_reason
            choice.prompt_token_ids = choice.prompt_token_ids or piece.prompt_token_ids
            choice.prompt_logprobs = choice.prompt_logprobs or piece.prompt_logprobs
            if piece.token_ids is not None:
                choice.token_ids = [*(choice.token_ids or ()), *piece.token_ids]
            if choice.logprobs is not None and piece.logprobs is not None:
                _extend(choice.logprobs, piece.logprobs)
    for choice, parts in zip(choices, texts, strict=True):
        choice.text = "".join(parts)
    return Completion(
        id=job.id,
        object="text_completion",
        created=job.created,
        model=body.model,
        choices=choices,
        usage=Usage.of(job.usage),
        service_tier=tier_of(job.context),
    )


async def stream(service: Service, body: CompletionRequest, caller: Caller = UNKNOWN) -> AsyncGenerator[Completion]:
    """The answer in chunks, each with a piece of one choice; last the usage where requested."""
    service = service.of_model(body.model)
    job = await _prepare(service, body, caller)
    tier = tier_of(job.context)

    def chunk(choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        made = Completion(id=job.id, object="text_completion", created=job.created, model=body.model, choices=choices, service_tier=tier)
        if body.includes_usage:
            made.usage = Usage.of(job.usage) if body.includes_usage_so_far else usage
        return made

    async with aclosing(_pieces(service, job)) as pieces:
        async for piece in pieces:
            if piece.text or piece.logprobs or piece.finish_reason or piece.token_ids:
                yield chunk([piece])
    if body.includes_usage:
        yield chunk([], Usage.of(job.usage))


def _no_logprobs(job: _Job) -> CompletionLogprobs | None:
    if job.params.logprobs is None:
        return None
    return CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])


def _extend(logprobs: CompletionLogprobs, more: CompletionLogprobs) -> None:
    logprobs.tokens += more.tokens
    logprobs.token_logprobs += more.token_logprobs
    logprobs.top_logprobs += more.top_logprobs
    logprobs.text_offset += more.text_offset
