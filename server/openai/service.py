"""What the handlers of both APIs share of a model: its backend, its tokenizer, and the checks of every prompt."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxinfer.encode.text_batching import TextReader
from jaxinfer.request import FinishReason, RequestError, SamplingParams
from jaxinfer.segments import Prompt
from jaxinfer.token_ids import TokenIdError
from jaxinfer.tokenizer import TextTooLong, Tokenizer
from server.backend import Backend, Unavailable
from server.config import ServerConfig
from server.logs import note_model
from server.openai.answer_syntax import AnswerSyntax
from server.openai.errors import ApiError
from server.openai.responses import FinishedBy, Model
from server.usage import UsageMeter


@dataclass(frozen=True, slots=True)
class Service:
    backend: Backend
    tokenizer: Tokenizer
    config: ServerConfig
    created: int  # Unix time at which serving of the model began
    usage: UsageMeter = field(default_factory=UsageMeter)
    syntax: AnswerSyntax = field(init=False)
    others: tuple[Service, ...] = ()  # of the models beside it, each with names of its own in its `config`

    def __post_init__(self) -> None:
        object.__setattr__(self, "syntax", AnswerSyntax.of(self.tokenizer, self.config))

    def of_model(self, name: str) -> Service:
        """The service of the model with this name: this one, or one beside it. Raises `ApiError` 404 for a model that
        isn't served."""
        for service in (self, *self.others):
            if name in service.config.model_names:
                note_model(service.config.model_name if self.others else None)
                return service
        raise _no_model(name, "served here is", [name for service in (self, *self.others) for name in service.config.model_names])

    def embedding_reader(self, name: str) -> TextReader:
        """The text reader of the embedding model with this name. Raises `ApiError` 404 where it, or any at all, isn't
        served."""
        reader = self.backend.text_reader
        if reader is None:
            message = "this server makes no embeddings: start it with --embedding-model, such as --embedding-model minilm"
            raise ApiError(404, message, code="embeddings_disabled")
        if name not in self.config.embedding_names:
            raise _no_model(name, "embeddings here are made by", self.config.embedding_names)
        return reader

    def models(self) -> list[Model]:
        """Each name of each model."""
        listed = [
            Model(id=name, created=service.created, max_model_len=service.backend.max_model_len)
            for service in (self, *self.others)
            for name in service.config.model_names
        ]
        if (reader := self.backend.text_reader) is not None:
            listed += [Model(id=name, created=self.created, max_model_len=reader.max_tokens) for name in self.config.embedding_names]
        return listed

    def model(self, name: str) -> Model:
        """The model with this name. Raises `ApiError` 404 if there is none."""
        for model in self.models():
            if model.id == name:
                return model
        raise _no_model(name, "served here is", [model.id for model in self.models()])

    def encode(self, param: str, text: str, params: SamplingParams, *, add_special_tokens: bool) -> list[int]:
        """The text's token ids. Slow for long texts: see `work_on`. Raises `RequestError` naming the field for what the
        model can't take."""
        limit = self.backend.max_model_len
        try:
            return self.tokenizer.encode_prompt(text, params, limit, add_special_tokens=add_special_tokens)
        except TextTooLong as error:
            message = f"the model's context is {limit} tokens, {param} has {error.measure}: shorten {param}"
            raise RequestError(message, param, "context_length_exceeded") from None

    def validate(self, param: str, prompt: Sequence[int], params: SamplingParams) -> Prompt:
        """The prompt as the backend takes it. Raises `RequestError` naming the field for a prompt or token ids that the
        model can't take. The engine clamps `max_tokens` to the room that is left."""
        limit = self.backend.max_model_len
        if not prompt:
            raise RequestError(f"{param} is empty: give at least one token", param)
        room = limit - len(prompt)
        if room < (0 if params.max_tokens == 0 else 1):
            message = f"the model's context is {limit} tokens, {param} has {len(prompt)} and the answer needs room: shorten {param}"
            raise RequestError(message, param, "context_length_exceeded")
        try:
            return self.backend.validate(prompt, params)
        except TokenIdError as error:
            name = param if error.name == "prompt" else error.name
            raise RequestError(f"{name} has the token id {error.token_id}: the model's go from 0 to {error.vocab_size - 1}", name) from None


def _no_model(name: str, served_as: str, served: Sequence[str]) -> ApiError:
    message = f"the model {name[:200]!r} does not exist: {served_as} {', '.join(served)}"
    return ApiError(404, message, param="model", code="model_not_found")


def new_id(prefix: str) -> str:
    """Such as 'chatcmpl-0f...'."""
    return f"{prefix}-{uuid.uuid4().hex}"


def finished_by(reason: FinishReason | None) -> FinishedBy | None:
    """The finish reason in the API's terms. Raises `ApiError` 408 for a request that timed out and `Unavailable` for
    one that the backend aborted, which the API has no reason for."""
    if reason is FinishReason.TIMEOUT:
        message = "the request's timeout passed before it was finished: give it more seconds, or ask for less"
        # The client's library would retry, in vain.
        raise ApiError(408, message, code="timeout", type="timeout", headers={"x-should-retry": "false"})
    if reason is FinishReason.ABORT:
        raise Unavailable("the request was aborted by the server")
    if reason is None:
        return None
    return "stop" if reason is FinishReason.STOP else "length"
