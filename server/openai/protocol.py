"""The requests of OpenAI's API (and vLLM's additions) as pydantic models: validated and documented.

Ranges are documented here and enforced by `SamplingParams`, whose messages name the field, the value and the range.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, Tag, ValidationInfo, model_validator

from jaxinfer.request import (
    MAX_LOGIT_BIAS,
    MAX_N,
    MAX_STOP,
    MAX_STOP_TOKENS,
    MAX_TOP_LOGPROBS,
    MIN_REPETITION_PENALTY,
    RequestError,
    SamplingParams,
)
from server.openai.errors import quoted
from server.openai.extensions import MAX_INT, SAMPLING_FIELDS, Extensions
from server.openai.messages import AnyMessage, Tool
from server.openai.parameter_policy import ParameterPolicy
from server.openai.strict import NonEmpty, StrictModel, describe, one_of
from server.openai.structured import StructuredFields
from server.openai.tool_choice import ToolChoice, check_tools
from server.openai.unsupported import CHAT, COMPLETION, EMBEDDING, HARMLESS_BUT_STRICT

MAX_INPUTS = 2048  # texts in one request, OpenAI's limit
MAX_MESSAGES = 2048  # OpenAI's limit
MAX_TOOLS = 128  # OpenAI's limit
MAX_TEMPLATE_KWARGS = 64

ServiceTier = Literal["auto", "default", "flex", "priority"]
TIERS: dict[str, int] = {"auto": 0, "default": 0, "flex": 10, "priority": -10}  # the priority of each; lower goes first


Stop = Annotated[
    Annotated[NonEmpty, Tag("<string>")] | Annotated[list[NonEmpty], Field(max_length=MAX_STOP, fail_fast=True), Tag("<strings>")],
    one_of("a string or a list of strings", str="<string>", list="<strings>", list_str="<strings>"),
]


class StreamOptions(StrictModel):
    place = "stream_options"

    include_usage: bool | None = describe(description="send a last chunk with the request's usage")
    continuous_usage_stats: bool | None = describe(description="with include_usage: the usage so far in each chunk too, as vLLM has it")
    include_obfuscation: bool | None = describe(description="accepted, without effect")


class SamplingBody(Extensions, StructuredFields):
    """Fields that chat and text completions share."""

    without_effect = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})

    model: str
    stream_options: StreamOptions | None = None
    max_tokens: int | None = describe(minimum=0, maximum=MAX_INT)
    temperature: float | None = describe(minimum=0, maximum=100)
    top_p: float | None = describe(exclusiveMinimum=0, maximum=1)
    n: int | None = describe(minimum=1, maximum=MAX_N)
    seed: int | None = describe(minimum=-(2**63), maximum=2**63 - 1)
    stop: Stop | None = None
    presence_penalty: float | None = describe(minimum=-2, maximum=2)
    frequency_penalty: float | None = describe(minimum=-2, maximum=2)
    logit_bias: dict[str, float] | None = describe(maxProperties=MAX_LOGIT_BIAS, propertyNames={"pattern": "^[0-9]+$"})
    # Beyond OpenAI's API, with vLLM's names.
    top_k: int | None = describe(minimum=-1, maximum=MAX_INT, description="sample among the k likeliest tokens; 0 or -1: all")
    min_p: float | None = describe(minimum=0, maximum=1, description="leave out tokens less likely than min_p times the likeliest")
    repetition_penalty: float | None = describe(
        minimum=MIN_REPETITION_PENALTY, maximum=100, description="over prompt and output tokens; 1: off"
    )
    min_tokens: int | None = describe(minimum=0, maximum=MAX_INT, description="tokens before which nothing may end the output")
    ignore_eos: bool | None = describe(description="go on after the end-of-sequence token")
    stop_token_ids: list[int] | None = describe(maxItems=MAX_STOP_TOKENS, description="tokens that end the output")
    priority: int | None = describe(minimum=-(2**31), maximum=MAX_INT, description="lower goes first; 0: as without, flex: 10")
    cache_salt: NonEmpty | None = describe(description="prompts are found in the prefix cache only by requests of the same salt")
    timeout: float | None = describe(exclusiveMinimum=0, description="seconds after which the request is given up")
    service_tier: ServiceTier | None = describe(description="flex: after the others; priority: before them; auto: default")
    # Information for the provider.
    user: Any = describe(description="without effect")
    metadata: Any = describe(description="without effect")
    safety_identifier: Any = describe(description="without effect")
    prompt_cache_key: Any = describe(description="without effect: prompts are cached by what they begin with")

    @model_validator(mode="after")
    def _check_stream_options(self, info: ValidationInfo) -> Self:
        if self.stream_options is not None and not self.stream:
            if not isinstance(info.context, ParameterPolicy) or info.context.is_strict:
                raise RequestError("stream_options is given without stream: set stream to true, or leave it out", "stream_options")
            info.context.ignore("", "stream_options")
        return self

    @model_validator(mode="after")
    def _check_turn(self) -> Self:
        if self.timeout is not None and self.timeout <= 0:
            raise RequestError(f"timeout is {self.timeout:g}: it must be a number of seconds above 0", "timeout")
        if self.priority is not None and self.service_tier in ("flex", "priority"):
            raise RequestError(f"priority is {self.priority} and service_tier is {self.service_tier!r}: give one of them", "priority")
        return self

    @property
    def asked_priority(self) -> int:
        return TIERS[self.service_tier or "default"] if self.priority is None else self.priority

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def includes_usage_so_far(self) -> bool:
        return self.includes_usage and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def _sampling(self, defaults: Mapping[str, Any], *, max_tokens: int | None, logprobs: int | None, **fields: Any) -> SamplingParams:
        """`SamplingParams` of the common fields and the given ones; a null leaves a field at its default, the model's
        where it has one."""
        fields |= {name: getattr(self, name) for name in _SAME_NAMES}
        fields["stop"] = (self.stop,) if isinstance(self.stop, str) else self.stop
        fields["top_k"] = 0 if self.top_k == -1 else self.top_k
        fields["logit_bias"] = self.logit_bias and {_token_id(token): bias for token, bias in self.logit_bias.items()}
        fields["structured_outputs"] = self.wanted_structure()
        given = {name: value for name, value in fields.items() if value is not None}
        return SamplingParams(**{**defaults, **given, "max_tokens": max_tokens, "logprobs": logprobs})


def _token_id(text: str) -> int:
    """A key of `logit_bias`: JSON's keys are strings."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 10):
        raise RequestError(f"logit_bias has the key {quoted(text)}: it must be a token id, written in digits", "logit_bias")
    return int(text)


_SAME_NAMES = (
    *("temperature", "top_p", "n", "seed", "presence_penalty", "frequency_penalty"),
    *("min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids"),
    *SAMPLING_FIELDS,
)


class ChatRequest(SamplingBody):
    unsupported = CHAT
    unsupported_if_strict = HARMLESS_BUT_STRICT

    messages: list[AnyMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = describe(
        description="shown to the model by its chat template, or else in the system message"
    )
    tool_choice: ToolChoice | None = describe(
        description="auto by default; none: tools are not shown; required and a named function are held to by a grammar"
    )
    parallel_tool_calls: bool | None = describe(description="false: an answer has one call at most; more are left out")
    enable_thinking: bool | None = describe(description="for templates that read it (or thinking); without effect on others")
    reasoning_effort: NonEmpty | None = describe(description="for templates that read it; without effect on others")
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_KWARGS)] | None = describe(
        description="variables of the model's chat template: enable_thinking, ..."
    )
    max_tokens: int | None = describe(minimum=1, maximum=MAX_INT, description="by default what the context holds")
    max_completion_tokens: int | None = describe(minimum=1, maximum=MAX_INT, description="the newer name of max_tokens")
    logprobs: bool | None = None
    top_logprobs: int | None = describe(minimum=0, maximum=MAX_TOP_LOGPROBS)
    add_generation_prompt: bool | None = describe(description="whether the prompt ends where an answer begins; true by default")
    continue_final_message: bool | None = describe(description="the answer continues the last message; none begins")
    echo: bool | None = describe(description="the answer's text begins with the last message's, if the assistant has said that")

    @model_validator(mode="before")
    @classmethod
    def _leave_out_tools_not_to_be_called(cls, data: Any) -> Any:
        is_none = isinstance(data, dict) and data.get("tool_choice") == "none"
        return {name: value for name, value in data.items() if name != "tools"} if is_none else data

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        check_tools(self.tools or (), self.tool_choice)
        return self

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt are both true: they exclude each other, leave one of them out"
            raise RequestError(message, "continue_final_message")
        if self.top_logprobs and not self.logprobs:
            raise RequestError(f"top_logprobs is {self.top_logprobs} without logprobs: set logprobs to true as well", "top_logprobs")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise RequestError(f"top_logprobs is {self.top_logprobs}: it must be an integer from 0 to {MAX_TOP_LOGPROBS}", "top_logprobs")
        for name in ("max_tokens", "max_completion_tokens"):
            if (value := getattr(self, name)) is not None and not 1 <= value <= MAX_INT:
                raise RequestError(f"{name} is {value}: it must be at least 1 and at most {MAX_INT}", name)
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise RequestError(
                f"max_tokens is {self.max_tokens} and max_completion_tokens is {self.max_completion_tokens}: give one of them", "max_tokens"
            )
        return self

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The sampling parameters, with the model's `defaults` for fields that the request omits. Raises `RequestError`
        for a value out of its range."""
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        max_tokens = defaults.get("max_tokens") if max_tokens is None else max_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self._sampling(defaults, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=self.prompt_logprobs)


def _one_each(prompt: Any) -> Any:
    """A `PromptInput` as a list of texts, or of lists of token ids."""
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


TokenIdList = Annotated[list[Annotated[int, Field(ge=0, le=MAX_INT)]], Field(min_length=1, fail_fast=True)]
PromptInput = Annotated[
    Annotated[NonEmpty, Tag("<string>")]
    | Annotated[list[NonEmpty], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True), Tag("<strings>")]
    | Annotated[TokenIdList, Tag("<tokens>")]
    | Annotated[list[TokenIdList], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True), Tag("<token lists>")],
    one_of(
        "a string, a list of strings, a list of token ids or a list of such lists",
        str="<string>",
        list="<strings>",
        list_str="<strings>",
        list_int="<tokens>",
        list_list="<token lists>",
    ),
]


class EmbeddingRequest(StrictModel):
    unsupported = EMBEDDING
    without_effect = frozenset({"user"})

    model: str
    input: PromptInput
    encoding_format: Literal["float", "base64"] | None = describe(description="base64: of little-endian float32; float by default")
    dimensions: int | None = describe(minimum=1, description="that many of each embedding, brought to length 1 again; at most the model's")
    truncate_prompt_tokens: int | None = describe(minimum=-1, description="cut longer texts to so many tokens; -1: what the model takes")
    truncation_side: Literal["left", "right"] | None = describe(description="which end of a longer text is cut off; right by default")
    user: Any = describe(description="without effect")

    @property
    def inputs(self) -> list[str] | list[list[int]]:
        """One entry a text: itself, or its token ids."""
        return _one_each(self.input)


class CompletionRequest(SamplingBody):
    unsupported = COMPLETION

    prompt: PromptInput
    echo: bool | None = None
    logprobs: int | None = describe(minimum=0, maximum=MAX_TOP_LOGPROBS)
    best_of: int | None = describe(minimum=1, maximum=MAX_N, description="only the value of n is supported")

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError(
                f"best_of is {self.best_of}: only the value of n ({self.n or 1}) is supported", "best_of", "unsupported_parameter"
            )
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise RequestError("max_tokens is 0: it must be at least 1, or echo be true to score the prompt", "max_tokens")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One entry a prompt: its text, or its token ids."""
        return _one_each(self.prompt)

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The sampling parameters, with the model's `defaults` for fields that the request omits. Raises `RequestError`
        for a value out of its range."""
        max_tokens = defaults.get("max_tokens", SamplingParams().max_tokens) if self.max_tokens is None else self.max_tokens
        asked = [number for number in (self.prompt_logprobs, self.logprobs if self.echo else None) if number is not None]
        prompt_logprobs = max(asked, default=None)
        return self._sampling(defaults, max_tokens=max_tokens, logprobs=self.logprobs, echo=self.echo, prompt_logprobs=prompt_logprobs)
