"""The interface between the HTTP front and whatever generates tokens: an engine in this process, or a router to
many."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from jaxinfer.encode.text_batching import Embedded, TextReader, TokenIds
from jaxinfer.request import DEFAULT_CONTEXT, OutputDelta, RequestContext, SamplingParams
from jaxinfer.segments import Prompt
from jaxinfer.stats import EngineStats
from server.cluster_stats import ClusterStats


class Overloaded(Exception):
    """The queue is full; `retry_after` is in seconds."""

    def __init__(self, retry_after: float) -> None:
        super().__init__(f"the request queue is full; retry in {retry_after:.0f} s")
        self.retry_after = retry_after


class Unavailable(Exception):
    """The backend is stopping, or has failed: it accepts no more requests; the message says why. `retry_after`: seconds
    after which it may accept this one, where that is known."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


InFlight = Literal["pause", "finish"]


class WeightControl(Protocol):
    """The weights of an engine replaced, put to sleep and woken. `in_flight`: "finish" waits for the requests under way
    and holds new ones back; "pause" interrupts them, and they go on afterwards. Calls wait for each other; what the
    engine raises is raised."""

    async def sleep(self, level: int, in_flight: InFlight) -> None:
        """See `Engine.sleep`."""
        ...

    async def wake(self) -> None:
        """See `Engine.wake`."""
        ...

    async def update_weights(self, model: str, in_flight: InFlight) -> int:
        """See `Engine.update_weights`; returns the version."""
        ...


@dataclass(frozen=True, slots=True)
class ModelReport:
    """One of several models. `status`: awake, asleep, changing, or why it has failed. `stats`: its engine's, live."""

    status: str
    stats: EngineStats
    num_waiting: int  # requests that wait until it is awake
    num_wakes: int  # for requests, since the start
    num_sleeps: int  # to make room for others


class Backend(Protocol):
    """`generate` yields a request's deltas until each of its n sequences has a finish_reason. Its prompt is one that
    `validate` gave. Raises `Overloaded` when the queue is full and `Unavailable` once stopping, both before the first
    delta; `Unavailable` also later when the engine fails. Closing the iterator early (aclose, or cancelling
    the task that iterates) aborts the request and frees its pages."""

    @property
    def max_model_len(self) -> int:
        """Tokens, prompt plus output."""
        ...

    @property
    def max_batch_size(self) -> int:
        """Sequences decoded at once."""
        ...

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """Fields of `SamplingParams` that apply where a request doesn't set them."""
        ...

    @property
    def text_reader(self) -> TextReader | None:
        """Of the embedding model; None without one."""
        ...

    def validate(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> Prompt:
        """A prompt's token ids as `generate` takes them. Raises `RequestError` for a request that can never be served,
        and `TokenIdError` where that is for a token id."""
        ...

    def generate(
        self, request_id: str, prompt: Prompt, params: SamplingParams, context: RequestContext = DEFAULT_CONTEXT
    ) -> AsyncGenerator[OutputDelta]: ...

    async def embed(self, request_id: str, token_lists: Sequence[TokenIds], context: RequestContext = DEFAULT_CONTEXT) -> Embedded:
        """Embeddings of texts that `text_reader` has read. Raises `Overloaded` and `Unavailable` as `generate` does;
        cancelling the task that waits drops the request."""
        ...

    def stats(self) -> EngineStats: ...

    def cluster(self) -> ClusterStats | None:
        """A router's workers; None for an engine in this process."""
        ...

    def models(self) -> Mapping[str, ModelReport] | None:
        """Of several models in one process, by name, the first one first; None where one is served."""
        ...

    def weight_control(self) -> WeightControl | None:
        """What replaces the weights and puts them to sleep; None for a router."""
        ...

    def is_ready(self) -> bool: ...

    def failure(self) -> str | None:
        """Why nothing can be served until a restart; None while the backend works."""
        ...

    def iteration_seconds(self) -> float:
        """Seconds that the engine has spent in the current iteration; 0 while it is idle."""
        ...

    async def start(self) -> None: ...

    def abort_all(self) -> None:
        """Ends unfinished requests with `Unavailable`, and refuses new ones."""
        ...

    async def stop(self) -> None:
        """Refuses new requests, finishes those that are running, then returns."""
        ...
