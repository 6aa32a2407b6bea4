"""LLM: blocking generation over an engine in this process, from any number of threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
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
from jaxinfer.prompts import Message, Prompt
from jaxinfer.reference_forward import ReferenceForward
from jaxinfer.request import OutputDelta, RequestOutput, SamplingParams

_LONG_WORK = 16  # prompts from which a progress bar is shown unless asked otherwise


class LLM:
    """`LLM(model=..., kv_memory=..., ...)`: any setting of `EngineConfig` by its name, or a whole `config`.

    Blocks until the engine is ready. Raises `ConfigError`, `CheckpointError` or `UnsupportedModelError`. Every method is any thread's, and
    threads share the engine's batches. Ctrl+C ends the waiting: the call's requests are aborted, and the LLM stays usable. As a context
    manager it closes itself in the end. After that, and in a forked child, every call raises `EngineClosedError`, a `RequestError`; once a
    step has failed, `EngineFailedError`.
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
        """End what other threads wait for, by `EngineClosedError`; save what the prefix cache keeps to `kv_disk`, if there is one, which takes
        some seconds at most. Closing again is of no effect."""
        self.engine_loop.close()

    def get_default_sampling_params(self) -> SamplingParams:
        """What calls without `params` sample by: `SamplingParams()`, with what the model's `generation_config.json` says instead."""
        return self.reader.default_params()

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt (text or token ids); results in the prompts' order.

        `params` is one for all or one for each, `get_default_sampling_params()` if not given. `progress` shows a bar on stderr;
        None: for long work only. Raises `RequestError`
        for the first prompt that can't be served, before any is started.
        """
        generation = self.reader.read(prompts, params)
        return self._complete(generation, len(generation.requests) >= _LONG_WORK if progress is None else progress)

    @overload
    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None, **template: Any) -> RequestOutput: ...

    @overload
    def chat(self, messages: Sequence[Sequence[Message]], params: SamplingParams | None = None, **template: Any) -> list[RequestOutput]: ...

    def chat(self, messages: Any, params: SamplingParams | None = None, **template: Any) -> RequestOutput | list[RequestOutput]:
        """Answer a conversation of {"role", "content"} messages, or several conversations, by the model's chat template.

        `template`: what `Tokenizer.render_chat` takes further, such as `tools`. Raises `RequestError` where there is no message,
        or the template refuses one.
        """
        generation, is_one = self.reader.read_chat(messages, params, template)
        outputs = self._complete(generation, len(generation.requests) >= _LONG_WORK)
        return outputs[0] if is_one else outputs

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[OutputDelta]:
        """Continue one prompt: deltas as they come, each with the `text` and `token_ids` of a step, the last with a `finish_reason`.

        Starts with the first delta that is asked for. Closing the iterator early, also by leaving the loop over it, aborts the request.
        Raises `RequestError` at once for a prompt that can't be served.
        """
        return self.engine_loop.stream(self.reader.read_one(prompt, params))

    def stream_chat(self, messages: Sequence[Message], params: SamplingParams | None = None, **template: Any) -> Generator[OutputDelta]:
        """Answer a conversation as `chat` does, with deltas as of `stream`."""
        return self.engine_loop.stream(self.reader.read_conversation(messages, params, template))

    def embed(
        self, texts: Text | Iterable[Text], *, dimensions: int | None = None, truncate_prompt_tokens: int | None = None
    ) -> Float32[np.ndarray, "N D"]:
        """A row for each text (or its token ids), by the `embedding_model`; of length 1 where that model's are. See `Embedder.embed`.

        Raises `RequestError` for a text that is empty or too long, and `ConfigError` for an LLM without an embedding model.
        """
        return embed(self.engine_loop, self.text_reader(), texts, dimensions, truncate_prompt_tokens)

    def text_reader(self) -> TextReader:
        """The embedding model's. Raises `ConfigError` without one, and as any call after the end."""
        self.engine_loop.check()
        if self.engine.encode is None:
            raise ConfigError("this LLM has no embedding model: make it with embedding_model, such as LLM(embedding_model='minilm')")
        return self.engine.encode.reader

    def logits(self, token_ids: Sequence[int]) -> Float[np.ndarray, "T V"]:
        """float32 scores over the vocabulary of what follows each token, from the reference forward pass: no cache, no batch.

        Compiles on the first use of a length (rounded up to a power of two).
        """
        self.engine_loop.check()
        self.engine.validate(token_ids, SamplingParams(max_tokens=0))
        with self._making_reference_forward:
            if self._reference_forward is None:
                self._reference_forward = self.engine.reference_forward()
        run = self._reference_forward.prepare(list(token_ids))
        # Programs that exchange data over a mesh must all be launched by one thread; compiling and waiting is for the caller's.
        return np.asarray(self.engine_loop.call(run))[: len(token_ids)]

    def logprobs(self, token_ids: Sequence[int]) -> Float[np.ndarray, " T"]:
        """Natural-log probability of each token given those before it, from the reference forward pass; NaN for the first."""
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
            if not is_complete:  # interrupted, perhaps: leave nothing behind in the engine
                self.engine_loop.abort(generation.request_ids, wait=True)
        return generation.outputs


@contextmanager
def _progress(total: int, shown: bool) -> Iterator[Any]:
    """Gives a function to be called once for each finished request."""
    if not shown:
        yield lambda: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda: bar.advance(task)
