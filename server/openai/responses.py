"""The answers of OpenAI's API as pydantic models. Stream chunks are written without the fields that were not set.

A null is written only where OpenAI's schema has one: typed clients accept no other.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, Field

from server.usage import RequestUsage, device_seconds

FinishedBy = Literal["stop", "length"]
ChatFinishedBy = Literal["stop", "length", "tool_calls"]

T = TypeVar("T")
OrAbsent = Annotated[T | None, Field(exclude_if=lambda value: value is None)]


class CachedTokens(BaseModel):
    cached_tokens: int


class DeviceSeconds(BaseModel):
    """Beyond OpenAI's API: a request's waiting time, and its share of device time in each phase. Null where the engine
    did not report it."""

    queue_seconds: float | None
    prefill_seconds: float | None
    decode_seconds: float | None


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    jaxinfer: DeviceSeconds

    @classmethod
    def of(cls, usage: RequestUsage, num_unsent: int = 0) -> Usage:
        """A request's usage so far, without the output tokens that are not sent yet."""
        num_output = usage.output_tokens - num_unsent
        return cls(
            prompt_tokens=usage.input_tokens,
            completion_tokens=num_output,
            total_tokens=usage.input_tokens + num_output,
            prompt_tokens_details=CachedTokens(cached_tokens=usage.cached_input_tokens),
            jaxinfer=DeviceSeconds(**device_seconds(usage.device)),
        )


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprob]
    refusal: None = None


class PromptLogprob(BaseModel):
    """`rank` counts from 1; null where it is past those that a step reports."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # of each token, by token id; null for the first


class WrittenFunction(BaseModel):
    name: str
    arguments: str  # JSON text; none where the answer broke off in it


class WrittenToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: WrittenFunction


class AssistantMessage(BaseModel):
    """`content` is null beside tool calls without a word. `reasoning_content`, beyond OpenAI's API: what the model
    thought before."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: OrAbsent[str] = None
    tool_calls: OrAbsent[list[WrittenToolCall]] = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishedBy
    token_ids: OrAbsent[list[int]] = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: str | None = None  # of the request's priority; null for a priority between the tiers
    prompt_token_ids: OrAbsent[list[int]] = None
    prompt_logprobs: OrAbsent[PromptLogprobs] = None


class FunctionCallDelta(BaseModel):
    name: str | None = None
    arguments: str


class ToolCallDelta(BaseModel):
    """A call's first has its id, type and name, the others more of its arguments."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCallDelta


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishedBy | None
    token_ids: OrAbsent[list[int]] = None


class ChatChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    service_tier: str | None = None
    usage: Usage | None = None  # set, to null, in each chunk of a stream that ends with the usage
    prompt_token_ids: OrAbsent[list[int]] = None  # on the first chunk


class CompletionLogprobs(BaseModel):
    """`text_offset` counts characters of the choice's text. The first token of an echoed prompt has no
    log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishedBy | None
    token_ids: OrAbsent[list[int]] = None
    prompt_token_ids: OrAbsent[list[int]] = None  # of a stream, on the choice's first chunk
    prompt_logprobs: OrAbsent[PromptLogprobs] = None


class Completion(BaseModel):
    """Also a chunk of a stream, whose choices' finish_reason is null until the last, and whose usage comes at the
    end."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    service_tier: OrAbsent[str] = None
    usage: Usage | None = None


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int
    jaxinfer: DeviceSeconds

    @classmethod
    def of(cls, usage: RequestUsage) -> EmbeddingUsage:
        """A request's usage."""
        return cls(
            prompt_tokens=usage.input_tokens, total_tokens=usage.input_tokens, jaxinfer=DeviceSeconds(**device_seconds(usage.device))
        )


class EmbeddingObject(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str  # or base64 of little-endian float32


class EmbeddingList(BaseModel):
    object: Literal["list"] = "list"
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jaxinfer"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class Health(BaseModel):
    status: str
    models: OrAbsent[dict[str, str]] = None  # of several: awake, asleep, changing, or why one has failed


class WeightState(BaseModel):
    version: int  # of the weights that are served: 1 until they are replaced
    is_asleep: bool


class Version(BaseModel):
    version: str


class ServerLoad(BaseModel):
    server_load: int  # requests under way
