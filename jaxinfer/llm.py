"""LLM: blocking generation over an engine in this process, from any number of threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, overload

import numpy as np
from jaxtyping import Float, Float32
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.embedder import embed
from jaxinfer.encode.text_batching import Text, TextReader
from jaxinfer.engine import Engine
from jaxinfer.engine_loop import EngineLoop
from jaxinfer.generation import Generation, RequestReader
from jaxinfer.listeners import Failed
from jaxinfer.local_checkpoint import local_checkpoint
from jaxinfer.prompts import Message, PromptInput
from jaxinfer.reference_forward import ReferenceForward
from jaxinfer.request import OutputDelta, RequestOutput, SamplingParams

_LONG_WORK = 16  # number of prompts from which a progress bar is shown by default


class LLM:
    """`LLM(model=..., kv_memory=..., ...)`: any setting of `EngineConfig` by name, or a whole `config`.

    The constructor blocks until the engine is ready. Raises `ConfigError`, `CheckpointError` or
    `UnsupportedModelError`. Any thread may call any method; threads share the engine's batches. Ctrl+C interrupts the
    wait and aborts the call's requests; the LLM stays usable. As a context manager it closes on exit. After that, and
    in a forked process, every call raises `EngineClosedError`, a `RequestError`; after a failed step,
    `EngineFailedError`.
    """

    def __init__(self, model: str = "default", *, config: EngineConfig | None = None, **settings: Any) -> None:
        if config is not None and (settings or model != "default"):
            raise ConfigError("config is a whole configuration: give it alone, or settings by their names instead")
        self.engine = Engine(config or EngineConfig.of(model=model, **settings))
        self.tokenizer = self.engine.tokenizer
        self.engine_loop = EngineLoop(self.engine)
        self.reader = RequestReader(self.engine, self.engine_loop)
        self._reference_forward: ReferenceForward | None = None
        self._making_reference_forward = threading.Lock()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Fail unfinished calls of other threads with `EngineClosedError`; save the prefix cache to `kv_disk`, if there
        is one, which takes seconds at most. A second call does nothing."""
        self.engine_loop.close()

    def update_params(self, params: Mapping[str, Any]) -> int:
        """Serve other weights of the same model, given as arrays. See `Engine.update_params`."""
        return self.engine_loop.call(lambda: self.engine.update_params(params), is_long=True)

    def update_weights(self, model: str) -> int:
        """Serve other weights of the same model, from a checkpoint. See `Engine.update_weights`."""
        path = local_checkpoint(model)
        return self.engine_loop.call(lambda: self.engine.update_weights(path), is_long=True)

    def sleep(self, level: int = 1) -> None:
        """Give the devices' memory back for a while. See `Engine.sleep`."""
        self.engine_loop.call(lambda: self.engine.sleep(level), is_long=True)

    def wake(self) -> None:
        """End `sleep`."""
        self.engine_loop.call(self.engine.wake, is_long=True)

    def get_default_sampling_params(self) -> SamplingParams:
        """The default of `params`: `SamplingParams()` with the model's `generation_config.json` applied."""
        return self.reader.default_params()

    def generate(
        self,
        prompts: PromptInput | Iterable[PromptInput],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt (text or token ids); results in the order of prompts.

        `params`: one for all prompts, or one for each; default `get_default_sampling_params()`. `progress`: whether to
        show a bar on stderr; None: for long work only. Raises `RequestError` for the first prompt that can't be
        served, before any is started.
        """
        generation = self.reader.read(prompts, params)
        return self._complete(generation, len(generation.requests) >= _LONG_WORK if progress is None else progress)

    @overload
    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None, **template: Any) -> RequestOutput: ...

    @overload
    def chat(self, messages: Sequence[Sequence[Message]], params: SamplingParams | None = None, **template: Any) -> list[RequestOutput]: ...

    def chat(self, messages: Any, params: SamplingParams | None = None, **template: Any) -> RequestOutput | list[RequestOutput]:
        """Answer a conversation of {"role", "content"} messages, or several conversations, with the chat template.

        `template`: further arguments of `Tokenizer.render_chat`, such as `tools`. Raises `RequestError` if there is no
        message, or if the template refuses one.
        """
        generation, is_one = self.reader.read_chat(messages, params, template)
        outputs = self._complete(generation, len(generation.requests) >= _LONG_WORK)
        return outputs[0] if is_one else outputs

    def stream(self, prompt: PromptInput, params: SamplingParams | None = None) -> Generator[OutputDelta]:
        """Continue one prompt; yields deltas as they come, with the `text` and `token_ids` of a step each. The last has
        a `finish_reason`.

        Starts when the first delta is requested. Closing the iterator early, also by leaving the loop over it, aborts
        the request. Raises `RequestError` at once for a prompt that can't be served.
        """
        return self.engine_loop.stream(self.reader.read_one(prompt, params))

    def stream_chat(self, messages: Sequence[Message], params: SamplingParams | None = None, **template: Any) -> Generator[OutputDelta]:
        """Answer a conversation as `chat` does; yields deltas as `stream` does."""
        return self.engine_loop.stream(self.reader.read_conversation(messages, params, template))

    def embed(
        self, texts: Text | Iterable[Text], *, dimensions: int | None = None, truncate_prompt_tokens: int | None = None
    ) -> Float32[np.ndarray, "N D"]:
        """An embedding a row, in the order of texts (or token ids), by `embedding_model`. See `Embedder.embed`.

        Raises `RequestError` for a text that is empty or too long, and `ConfigError` without an embedding model.
        """
        return embed(self.engine_loop, self.text_reader(), texts, dimensions, truncate_prompt_tokens)

    def text_reader(self) -> TextReader:
        """The embedding model's reader of texts. Raises `ConfigError` without such a model, and if the LLM is
        closed."""
        self.engine_loop.check()
        if self.engine.encode is None:
            raise ConfigError("this LLM has no embedding model: make it with embedding_model, such as LLM(embedding_model='minilm')")
        return self.engine.encode.reader

    def logits(self, token_ids: Sequence[int]) -> Float[np.ndarray, "T V"]:
        """float32 logits of the next token after each token, by the reference forward pass: no cache, no batching.

        Compiles on first use of a length (rounded up to a power of two).
        """
        self.engine_loop.check()
        prompt = self.engine.validate(token_ids, SamplingParams(max_tokens=0))
        with self._making_reference_forward:
            if self._reference_forward is None:
                self._reference_forward = self.engine.reference_forward()
        run = self._reference_forward.prepare(prompt.token_ids)
        # One thread must launch all programs with collectives; the caller's compiles and waits.
        return np.asarray(self.engine_loop.call(run))[: len(token_ids)]

    def logprobs(self, token_ids: Sequence[int]) -> Float[np.ndarray, " T"]:
        """Natural-log probability of each token given its predecessors, by the reference forward pass; NaN for the
        first."""
        logits = self.logits(token_ids)[:-1].astype(np.float64)
        shifted = logits - logits.max(axis=-1, keepdims=True)
        chosen = shifted[np.arange(len(logits)), list(token_ids)[1:]] - np.log(np.exp(shifted).sum(axis=-1))
        return np.concatenate([[np.nan], chosen]).astype(np.float32)

    def _complete(self, generation: Generation, shows_progress: bool) -> list[RequestOutput]:
        ended: queue.SimpleQueue[RequestOutput | Failed] = queue.SimpleQueue()
        generation.on_end = ended.put
        is_complete = False
        try:
            with _progress(len(generation.requests), shows_progress) as advance:
                self.engine_loop.submit(generation.requests, generation)
                for _ in generation.requests:
                    end = ended.get()
                    if isinstance(end, Failed):
                        raise end.error
                    advance()
            is_complete = True
        finally:
            if not is_complete:  # interrupted, say: abort what is unfinished
                self.engine_loop.abort(generation.request_ids, wait=True)
        return generation.outputs


@contextmanager
def _progress(total: int, shown: bool) -> Iterator[Any]:
    """Yields a function to call once for each finished request."""
    if not shown:
        yield lambda: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda: bar.advance(task)
