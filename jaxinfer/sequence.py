"""Sequence: one of a request's n continuations, and what each part of the engine keeps of it. Imports no JAX.

`Sequence` itself is the request's part, which crosses from role to role in a `HandOff`. `PrefillProgress`,
`DecodeSlot` and `OutputProgress` are records of one prefill role, one decode role and one engine. They never leave
them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from jaxinfer.request import DEFAULT_CONTEXT, DeviceUsage, RequestContext, SamplingParams, TokenLogprob
from jaxinfer.segments import Prompt
from jaxinfer.structured.grammars import Grammar
from jaxinfer.tokenizer.detokenizer import IncrementalDetokenizer


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to continue it."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    arrival_time: float  # seconds, time.monotonic()
    context: RequestContext = DEFAULT_CONTEXT


class SequenceState(enum.Enum):
    """Where a sequence stands in this engine."""

    WAITING = enum.auto()  # for pages and a place in the batch
    PREFILLING = enum.auto()  # holds pages of the prefill mesh
    PREFILLED = enum.auto()  # its hand-off waits for pages of the decode mesh
    RUNNING = enum.auto()  # holds a slot and pages of the decode mesh
    PAUSED = enum.auto()  # holds nothing, while the engine's weights are changed
    FINISHED = enum.auto()


@dataclass(slots=True)
class Meter:
    """What a request has taken so far, its n sequences together."""

    queue_seconds: float = 0.0  # until its first tokens were computed
    prefill_seconds: float = 0.0  # its share of the device's time
    decode_seconds: float = 0.0

    def read(self) -> DeviceUsage:
        return DeviceUsage(self.queue_seconds, self.prefill_seconds, self.decode_seconds)


@dataclass(slots=True)
class PrefillProgress:
    """What a prefill role keeps of a sequence."""

    leader: Sequence | None = None  # the request's first sequence, which computes the prompt for this one
    pages: list[int] = field(default_factory=list)  # the page table on the prefill mesh
    num_computed: int = 0  # tokens whose KV a prefill step was started for
    num_cached: int = 0  # prompt tokens whose pages were found when it was first admitted
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    first_scheduled_time: float | None = None  # seconds, time.monotonic()


@dataclass(slots=True)
class DecodeSlot:
    """What a decode role keeps of a sequence."""

    slot: int = -1  # -1: it does not run
    pages: list[int] = field(default_factory=list)  # the page table on the decode mesh
    num_in_flight: int = 0  # tokens being sampled whose values the host has not read


@dataclass(slots=True)
class OutputProgress:
    """What the engine that answers keeps of a sequence."""

    detokenizer: IncrementalDetokenizer
    is_started: bool = False  # its first delta is out
    last_token_time: float | None = None  # seconds, time.monotonic()


@dataclass(slots=True, eq=False)
class Sequence:
    request: Request
    index: int
    order: int  # of arrival: smaller is older
    seed: int
    end_tokens: frozenset[int]  # that end it once min_tokens are there
    max_tokens: int
    output: OutputProgress
    token_ids: list[int]  # prompt and output
    meter: Meter = field(default_factory=Meter)
    bad_words: tuple[tuple[int, ...], ...] = ()  # as tokens
    needs_history: bool = False  # what they ban depends on tokens before the newest, which the host must have read
    level: int | None = None  # of urgency, at which it was last admitted: lower goes first
    passed_over_seconds: float = 0.0  # that others were preferred to it, until it was last admitted
    grammar: Grammar | None = None  # what its output is held to, after the tokens that it has
    state: SequenceState = SequenceState.WAITING
    epoch: int = 0  # counts preemptions and roll-backs: results of steps of an earlier epoch are ignored
    prefill: PrefillProgress = field(default_factory=PrefillProgress)
    decode: DecodeSlot = field(default_factory=DecodeSlot)
    num_prompt: int = field(init=False)
    max_total_tokens: int = field(init=False)  # prompt and output

    def __post_init__(self) -> None:
        self.num_prompt = len(self.request.prompt)
        self.max_total_tokens = self.num_prompt + self.max_tokens

    @property
    def prompt(self) -> Prompt:
        return self.request.prompt

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def context(self) -> RequestContext:
        return self.request.context

    @property
    def scheduling_order(self) -> tuple[int, int]:
        """Admitted sequences are served in this order, and preempted in the opposite one."""
        assert self.level is not None
        return self.level, self.order

    @property
    def needs_prompt_scores(self) -> bool:
        """Whether its prompt's log-probabilities are still to be computed."""
        return self.params.prompt_logprobs is not None and len(self.prefill.prompt_logprobs) < self.num_prompt

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    def restart(self) -> None:
        """It left whatever role it was in: results of steps under way are ignored from now on. Its tokens are kept."""
        self.epoch += 1
        self.prefill.num_computed = self.decode.num_in_flight = 0
        self.state = SequenceState.WAITING

    def roll_back(self, num_tokens: int) -> None:
        """Forget the last tokens of its output, and what is in flight after them. Where it runs is unchanged."""
        assert 0 < num_tokens <= self.num_output, (num_tokens, self.num_output)
        del self.token_ids[-num_tokens:]
        if self.grammar is not None:
            self.grammar.roll_back(num_tokens)
        self.epoch += 1
        self.decode.num_in_flight = 0
