"""Sequence: one of a request's n continuations, as the host half follows it. Imports no JAX."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from jaxinfer.detokenizer import IncrementalDetokenizer
from jaxinfer.request import DeviceUsage, Request, RequestContext, SamplingParams, TokenLogprob


class SequenceState(enum.Enum):
    WAITING = enum.auto()  # for pages and a place in the batch
    PREFILLING = enum.auto()  # holds pages of the prefill mesh
    PREFILLED = enum.auto()  # its hand-off waits for pages of the decode mesh
    RUNNING = enum.auto()  # holds a slot and pages of the decode mesh
    FINISHED = enum.auto()


@dataclass(slots=True)
class Meter:
    """What a request has taken so far, its n sequences together."""

    queue_seconds: float = 0.0  # until its first tokens were computed
    prefill_seconds: float = 0.0  # its share of the device's time
    decode_seconds: float = 0.0

    def read(self) -> DeviceUsage:
        return DeviceUsage(self.queue_seconds, self.prefill_seconds, self.decode_seconds)


@dataclass(slots=True, eq=False)
class Sequence:
    request: Request
    index: int
    order: int  # of arrival: smaller is older
    seed: int
    end_tokens: frozenset[int]  # that end it once min_tokens are there
    max_tokens: int
    detokenizer: IncrementalDetokenizer
    token_ids: list[int]  # prompt and output
    meter: Meter = field(default_factory=Meter)
    leader: Sequence | None = None  # the request's first sequence, which computes the prompt for this one
    state: SequenceState = SequenceState.WAITING
    num_computed: int = 0  # tokens whose KV a prefill step was started for
    num_cached: int = 0  # prompt tokens whose pages were found when it was first admitted
    num_in_flight: int = 0  # tokens being sampled whose values the host has not read
    prefill_pages: list[int] = field(default_factory=list)
    decode_pages: list[int] = field(default_factory=list)
    slot: int = -1
    level: int | None = None  # of urgency, at which it was last admitted: lower goes first
    passed_over_seconds: float = 0.0  # that others were preferred to it, until it was last admitted
    epoch: int = 0  # counts preemptions: a step started in an earlier epoch has nothing to say any more
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    is_started: bool = False  # its first delta is out
    first_scheduled_time: float | None = None  # seconds, time.monotonic()
    last_token_time: float | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()  # as tokens
    needs_history: bool = False  # what they ban depends on tokens before the newest, which the host must have read
    num_prompt: int = field(init=False)
    max_total_tokens: int = field(init=False)  # prompt and output

    def __post_init__(self) -> None:
        self.num_prompt = len(self.request.prompt_token_ids)
        self.max_total_tokens = self.num_prompt + self.max_tokens

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def context(self) -> RequestContext:
        return self.request.context

    @property
    def turn(self) -> tuple[int, int]:
        """Admitted sequences are served in this order, and give way in the opposite one."""
        assert self.level is not None
        return self.level, self.order

    @property
    def needs_prompt_scores(self) -> bool:
        """Whether its prompt's log-probabilities are still to be computed."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def is_finished(self) -> bool:
        return self.state is SequenceState.FINISHED

    def can_decode_more(self) -> bool:
        """Whether another token may be sampled, counting those in flight."""
        return len(self.token_ids) + self.num_in_flight < self.max_total_tokens
