"""Requests, sampling parameters and outputs, as all parts of the engine use them. Imports no JAX."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Protocol, Self, TypeVar

MAX_TOP_LOGPROBS = 20  # alternatives a step can report; the compiled programs return this many, OpenAI's limit too
MAX_LOGIT_BIAS = 300  # entries of `logit_bias`, OpenAI's limit
MAX_STOP = 16  # entries of `stop`
MAX_STOP_CHARACTERS = 1000  # of each
MAX_STOP_TOKENS = 32  # entries of `stop_token_ids`
MAX_BAD_WORDS = 100  # entries of `bad_words`
MAX_BAD_WORD = 200  # characters of one
MIN_REPETITION_PENALTY = 1e-30  # scores divided by it stay within float32
MAX_GRAMMAR = 1_000_000  # characters of a schema, a regular expression, a grammar, or all choices together
MAX_N = 128  # sequences of one request, OpenAI's limit


class _Sliceable(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Self: ...


TokenIds = TypeVar("TokenIds", bound=_Sliceable)  # a list, or an array, which the command line has no time to import


MODEL_ASLEEP = "model_asleep"  # the code of such a RequestError


class RequestError(ValueError):
    """A request that can't be served as asked. `param` names the field at fault, for OpenAI's error form."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


def _number(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or value > high or value < low or (open_low and value == low):
        raise RequestError(
            f"{name} is {value!r}: it must be a number {'above' if open_low else 'from'} {low:g} {'and at most' if open_low else 'to'} {high:g}",
            name,
        )


def _integer(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise RequestError(f"{name} is {value!r}: it must be an integer from {low} to {high}", name)


class FinishReason(enum.StrEnum):
    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens or the context length was reached
    ABORT = "abort"
    TIMEOUT = "timeout"  # its deadline passed
    HANDED_OVER = "handed_over"  # prefilled here: another engine goes on, and tells the client


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """What an answer's text is held to: one of these. Checked on construction; grammars are compiled by the engine."""

    json_schema: str | None = None  # its text; a mapping is written as one
    json_object: bool = False  # any JSON object
    regex: str | None = None  # of the whole answer, in Rust's syntax
    choice: tuple[str, ...] = ()  # one of these texts
    grammar: str | None = None  # in Lark's syntax, as llguidance reads it; the rule `start` is the answer

    def __post_init__(self) -> None:
        if isinstance(self.json_schema, Mapping | bool):
            try:
                object.__setattr__(self, "json_schema", json.dumps(self.json_schema))
            except (RecursionError, TypeError, ValueError) as error:
                raise RequestError(f"structured outputs: json_schema is no JSON: {error}", "structured_outputs") from error
        if isinstance(self.choice, str) or not isinstance(self.choice, Iterable):
            raise RequestError(f"choice is {self.choice!r}: it must be a list of texts", "structured_outputs")
        object.__setattr__(self, "choice", tuple(self.choice))
        given = [field.name for field in fields(self) if getattr(self, field.name) not in (None, False, ())]
        if len(given) != 1:
            raise RequestError(
                f"structured outputs have {' and '.join(given) or 'nothing'}: give one of {', '.join(f.name for f in fields(self))}",
                "structured_outputs",
            )
        texts = self.choice if self.choice else (() if self.json_object else (getattr(self, given[0]),))
        if any(not isinstance(text, str) or not text for text in texts):
            raise RequestError(f"structured outputs: {given[0]} must be text that is not empty", "structured_outputs")
        if (size := sum(map(len, texts))) > MAX_GRAMMAR:
            raise RequestError(
                f"structured outputs: {given[0]} has {size:,} characters: at most {MAX_GRAMMAR:,}; send a smaller one", "structured_outputs"
            )

    @property
    def kind(self) -> str:
        """Which one it is, in words."""
        return next(field.name for field in fields(self) if getattr(self, field.name)).replace("_", " ")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are sampled. Checked on construction: `RequestError` names the field, its value and the
    range.

    Order on the device: penalties, logit_bias, grammar, temperature, min_p, top_k, top_p. Log-probabilities are of the
    model's own distribution, before any of these, so that they equal a reference forward pass.
    """

    temperature: float = 1.0  # 0: greedy, the exact argmax
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None  # None: a random one for each request
    repetition_penalty: float = 1.0  # over prompt and output tokens (CTRL, arXiv:1909.05858)
    presence_penalty: float = 0.0  # over output tokens, as OpenAI defines it
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = 16  # clamped to the context left by the prompt; None: all of it
    min_tokens: int = 0  # until then no end-of-sequence or stop token is sampled, and no stop string ends the text
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None  # None: off; k: of the sampled token and of the k likeliest
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    echo: bool = False  # the text starts with the prompt's
    allowed_token_ids: tuple[int, ...] | None = None  # no other token is sampled; None: all are allowed
    bad_words: tuple[str, ...] = ()  # whose tokens never follow each other in the output, with or without a space first
    logprob_token_ids: tuple[int, ...] = ()  # log-probabilities of these instead of the likeliest
    skip_special_tokens: bool = True  # leave them out of the text
    kept_special_tokens: tuple[int, ...] = ()  # but for these: markers that a reader of the text needs
    include_stop_str_in_output: bool = False  # the text ends with the stop string, or the stop token's text
    structured_outputs: StructuredOutputs | None = None  # what the answer's text is held to
    truncate_prompt_tokens: int | None = None  # keep that many last ones; -1: as many as fit beside max_tokens

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if not isinstance(value, Iterable):
                raise RequestError(f"{name} is {value!r}: it must be a list", name)
            object.__setattr__(self, name, tuple(value))
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias is {self.logit_bias!r}: it must map token ids to numbers", "logit_bias")
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 100.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        _integer("n", self.n, 1, MAX_N)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_TOP_LOGPROBS)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}: it must not be over max_tokens ({self.max_tokens})", "min_tokens")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(f"logit_bias has {len(self.logit_bias)} entries: at most {MAX_LOGIT_BIAS}", "logit_bias")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, 2**31 - 1)
            _number("logit_bias", bias, -100.0, 100.0)
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise RequestError(f"stop_token_ids has {len(self.stop_token_ids)} entries: at most {MAX_STOP_TOKENS}", "stop_token_ids")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, 2**31 - 1)
        if len(self.stop) > MAX_STOP:
            raise RequestError(f"stop has {len(self.stop)} entries: at most {MAX_STOP}", "stop")
        if longest := max((len(s) for s in self.stop if isinstance(s, str) and len(s) > MAX_STOP_CHARACTERS), default=0):
            raise RequestError(f"stop has a string of {longest} characters: at most {MAX_STOP_CHARACTERS}", "stop")
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise RequestError(f"stop is {list(self.stop)!r}: each stop string must be a non-empty string", "stop")
        self._check_restrictions()

    def _check_restrictions(self) -> None:
        if isinstance(self.structured_outputs, Mapping):
            object.__setattr__(self, "structured_outputs", StructuredOutputs(**self.structured_outputs))
        if self.structured_outputs is not None and self.allowed_token_ids is not None:
            raise RequestError("structured_outputs and allowed_token_ids don't go together: give one", "allowed_token_ids")
        lists = {"allowed_token_ids": MAX_LOGIT_BIAS, "logprob_token_ids": MAX_TOP_LOGPROBS, "kept_special_tokens": MAX_LOGIT_BIAS}
        for name, most in lists.items():
            value = getattr(self, name)
            if value is None and name == "allowed_token_ids":
                continue
            if not isinstance(value, Iterable):
                raise RequestError(f"{name} is {value!r}: it must be a list of token ids", name)
            value = tuple(value)
            if len(value) > most:
                raise RequestError(f"{name} has {len(value)} entries: at most {most}", name)
            for token in value:
                _integer(name, token, 0, 2**31 - 1)
            object.__setattr__(self, name, tuple(dict.fromkeys(value)))
        if self.allowed_token_ids == ():
            raise RequestError("allowed_token_ids is empty: give at least one token id, or leave it out", "allowed_token_ids")
        if self.logprob_token_ids:  # they take the place of the likeliest
            object.__setattr__(self, "logprobs", len(self.logprob_token_ids))
        if isinstance(self.bad_words, str) or not isinstance(self.bad_words, Iterable):
            raise RequestError(f"bad_words is {self.bad_words!r}: it must be a list of words", "bad_words")
        words = tuple(self.bad_words)
        if any(not isinstance(word, str) or not word.strip() for word in words):
            raise RequestError("bad_words has an entry that is no word: each must be a string that is not blank", "bad_words")
        object.__setattr__(self, "bad_words", words)
        if len(words) > MAX_BAD_WORDS or any(len(word) > MAX_BAD_WORD for word in words):
            message = f"bad_words has {len(words)} words, the longest of {max(map(len, words))} characters: at most {MAX_BAD_WORDS} of {MAX_BAD_WORD}"
            raise RequestError(message, "bad_words")
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens != -1:
            _integer("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, 2**31 - 1)

    def token_lists(self) -> tuple[tuple[str, Iterable[int]], ...]:
        """The fields that hold token ids, with their names."""
        names = ("logit_bias", "stop_token_ids", "allowed_token_ids", "logprob_token_ids")
        return tuple((name, getattr(self, name) or ()) for name in names)

    def truncated(self, prompt_token_ids: TokenIds, max_model_len: int) -> TokenIds:
        """What is left of a prompt by `truncate_prompt_tokens`: its last tokens, in a context of that many."""
        num_kept = self.truncate_prompt_tokens
        if num_kept == -1:
            # Of an answer that may fill the whole context, one token.
            num_output = 1 if self.max_tokens is None or self.max_tokens >= max_model_len else self.max_tokens
            num_kept = max_model_len - num_output
        return prompt_token_ids if num_kept is None or len(prompt_token_ids) <= num_kept else prompt_token_ids[-num_kept:]


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Tenant, priority and deadline of a request: they decide when it runs, never which tokens it gets."""

    tenant: str = ""  # whose share of the engine it uses, such as an API key's name
    namespace: str = ""  # cached prefixes are shared within it only
    session: str | None = None  # a conversation, whose pages are evicted after others
    priority: int = 0  # lower goes first, as in vLLM
    deadline: float | None = None  # seconds, time.monotonic(), when it is aborted

    def __post_init__(self) -> None:
        _integer("priority", self.priority, -(2**31), 2**31 - 1)


DEFAULT_CONTEXT = RequestContext()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one token, and the step's likeliest alternatives (token id, log-probability), best
    first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None  # of a prompt token among the step's 20 likeliest, from 1; None beyond


@dataclass(frozen=True, slots=True)
class DeviceUsage:
    """Seconds of a request so far, for its n sequences together: in the queue, and its share of device time by
    phase."""

    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float


@dataclass(slots=True)  # not frozen: one is made for each token, which would take three times as long
class OutputDelta:
    """What one engine step added to one sequence of a request. `text` never ends inside a character or a possible stop
    string."""

    request_id: str
    index: int  # which of the request's n sequences
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each of token_ids where asked for
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or token that ended it
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = (
        None  # once, on a sequence's first delta where asked for; the first token has none
    )
    cached_tokens: int = 0  # prompt tokens whose KV was cached; on the first delta
    device_usage: DeviceUsage | None = None  # on each sequence's last delta


@dataclass(slots=True)
class CompletionOutput:
    """One finished sequence."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class RequestOutput:
    """A request's whole output: the prompt and its n sequences."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int = 0
    device_usage: DeviceUsage | None = None

    @classmethod
    def empty(cls, request_id: str, prompt: str | None, prompt_token_ids: list[int], params: SamplingParams) -> RequestOutput:
        outputs = [CompletionOutput(i, logprobs=None if params.logprobs is None else []) for i in range(params.n)]
        return cls(request_id, prompt, prompt_token_ids, outputs)

    def add(self, delta: OutputDelta) -> None:
        """Append one step's delta."""
        output = self.outputs[delta.index]
        output.text += delta.text
        output.token_ids.extend(delta.token_ids)
        if output.logprobs is not None:
            output.logprobs.extend(delta.logprobs)
        if delta.prompt_logprobs is not None and self.prompt_logprobs is None:
            self.prompt_logprobs = list(delta.prompt_logprobs)
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        if delta.device_usage is not None:
            self.device_usage = delta.device_usage  # the latest includes earlier ones
        if delta.finish_reason is not None:
            output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason

    @property
    def is_finished(self) -> bool:
        return all(o.finish_reason is not None for o in self.outputs)
