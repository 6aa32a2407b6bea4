"""LLM: offline, blocking generation over an engine in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, overload

import numpy as np
from jaxtyping import Float, Float32
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.embedder import embed
from jaxinfer.encode.texts import Text
from jaxinfer.engine import Engine
from jaxinfer.plain_forward import PlainForward
from jaxinfer.request import RequestError, RequestOutput, SamplingParams

Prompt = str | Sequence[int]
Message = Mapping[str, Any]

_LONG_WORK = 16  # prompts from which a progress bar is shown unless asked otherwise


class LLM:
    """`LLM(model=..., kv_memory=..., ...)`: any setting of `EngineConfig` by its name, or a whole `config`.

    Blocks until the engine is ready. Raises `ConfigError`, `CheckpointError` or `UnsupportedModelError`. As a context manager it closes
    itself in the end, which only an LLM with `kv_disk` needs.
    """

    def __init__(self, model: str = "default", *, config: EngineConfig | None = None, **settings: Any) -> None:
        if config is not None and (settings or model != "default"):
            raise ConfigError("config is a whole configuration: give it alone, or settings by their names instead")
        self.engine = Engine(config or EngineConfig.of(model=model, **settings))
        self.tokenizer = self.engine.tokenizer
        self._num_calls = 0

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Save what the prefix cache keeps to `kv_disk`, if there is one, which takes some seconds at most. Nothing may be asked afterwards."""
        self.engine.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt (text or token ids); results in the prompts' order.

        `params` is one for all or one for each. `progress` shows a bar on stderr; None: for long work only. Raises `RequestError`
        for the first prompt that can't be served, before any is started.
        """
        several = _as_prompts(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(several)
        if len(each) != len(several):
            raise RequestError(f"{len(each)} sampling parameters for {len(several)} prompts: give one, or one for each", "params")
        token_lists = [self.tokenizer.encode(p, max_tokens=self.engine.max_model_len) if isinstance(p, str) else list(p) for p in several]
        for token_ids, of_prompt in zip(token_lists, each, strict=True):
            self.engine.validate(token_ids, of_prompt)
        outputs: dict[str, RequestOutput] = {}
        for prompt, token_ids, of_prompt in zip(several, token_lists, each, strict=True):
            request_id = f"generate-{self._num_calls}"
            self._num_calls += 1
            self.engine.add_request(request_id, token_ids, of_prompt)
            outputs[request_id] = RequestOutput.empty(request_id, prompt if isinstance(prompt, str) else None, token_ids, of_prompt)
        self._run(outputs, len(outputs) >= _LONG_WORK if progress is None else progress)
        return list(outputs.values())

    @overload
    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None, **template: Any) -> RequestOutput: ...

    @overload
    def chat(self, messages: Sequence[Sequence[Message]], params: SamplingParams | None = None, **template: Any) -> list[RequestOutput]: ...

    def chat(self, messages: Any, params: SamplingParams | None = None, **template: Any) -> RequestOutput | list[RequestOutput]:
        """Answer a conversation of {"role", "content"} messages, or several conversations, by the model's chat template.

        `template`: what `Tokenizer.render_chat` takes further, such as `tools`. Raises `RequestError` where there is no message,
        or the template refuses one.
        """
        if not messages:
            raise RequestError("messages is empty: give at least one message", "messages")
        is_one = isinstance(messages[0], Mapping)
        conversations = [messages] if is_one else messages
        texts = [self.tokenizer.render_chat(conversation, **template) for conversation in conversations]
        # The template writes the special tokens itself.
        token_lists = [self.tokenizer.encode(text, add_special_tokens=False, max_tokens=self.engine.max_model_len) for text in texts]
        outputs = self.generate(token_lists, params or SamplingParams(max_tokens=None))
        for output, text in zip(outputs, texts, strict=True):
            output.prompt = text
        return outputs[0] if is_one else outputs

    def embed(self, texts: Text | Sequence[Text], *, dimensions: int | None = None) -> Float32[np.ndarray, "N D"]:
        """A row for each text (or its token ids), by the `embedding_model`; of length 1 where that model's are. See `Embedder.embed`.

        Raises `RequestError` for a text that is empty or too long, and `ConfigError` for an LLM without an embedding model.
        """
        if self.engine.encode is None:
            raise ConfigError("this LLM has no embedding model: make it with embedding_model, such as LLM(embedding_model='minilm')")
        return embed(self.engine.encode, texts, dimensions)

    def logits(self, token_ids: Sequence[int]) -> Float[np.ndarray, "T V"]:
        """float32 scores over the vocabulary of what follows each token, from the plain forward pass: no cache, no batch.

        Compiles on the first use of a length (rounded up to a power of two).
        """
        self.engine.validate(token_ids, SamplingParams(max_tokens=0))
        return self._plain_forward.logits(list(token_ids))

    def logprobs(self, token_ids: Sequence[int]) -> Float[np.ndarray, " T"]:
        """Natural-log probability of each token given those before it, from the plain forward pass; NaN for the first."""
        logits = self.logits(token_ids)[:-1].astype(np.float64)
        shifted = logits - logits.max(axis=-1, keepdims=True)
        chosen = shifted[np.arange(len(logits)), list(token_ids)[1:]] - np.log(np.exp(shifted).sum(axis=-1))
        return np.concatenate([[np.nan], chosen]).astype(np.float32)

    @cached_property
    def _plain_forward(self) -> PlainForward:
        return self.engine.plain_forward()

    def _run(self, outputs: dict[str, RequestOutput], shows_progress: bool) -> None:
        finished = False
        try:
            with _progress(len(outputs), shows_progress) as advance:
                while not all(output.is_finished for output in outputs.values()):
                    for delta in self.engine.step():
                        output = outputs[delta.request_id]
                        output.add(delta)
                        if output.is_finished:
                            advance(len(delta.token_ids))
            finished = True
        finally:
            if not finished:  # interrupted: leave nothing behind in the engine
                for request_id in outputs:
                    self.engine.abort(request_id)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return [prompt.tolist() if isinstance(prompt, np.ndarray) else prompt for prompt in prompts]  # type: ignore[misc]


@contextmanager
def _progress(total: int, shown: bool) -> Iterator[Any]:
    """Gives a function to be called once for each finished request."""
    if not shown:
        yield lambda num_tokens: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda num_tokens: bar.advance(task)
