"""RouterBackend: requests to workers, each once answered whatever happens to a worker. No JAX.

Every sequence of a request is a call of its own to a decode worker, which has another one prefill it where that is
quicker. If a worker is lost, the sequence goes on elsewhere from the tokens that the client has: its seed was chosen
here, so they are the ones it would have got.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from jaxinfer.config import ConfigError
from jaxinfer.encode.text_batching import Embedded, TokenIds
from jaxinfer.engine.intake import RequestIntake
from jaxinfer.request import DEFAULT_CONTEXT, FinishReason, OutputDelta, RequestContext, RequestError, SamplingParams
from jaxinfer.segments import Prompt
from jaxinfer.stats import EngineStats
from jaxinfer.tokenizer import Tokenizer
from server.backend import Overloaded, Unavailable
from server.router.policy import Choice, choose
from server.router.workers import KnownWorker, Workers
from server.workers import messages, worker_pb2_grpc
from server.workers import worker_pb2 as pb
from server.workers.credentials import Credentials

logger = logging.getLogger(__name__)

_MOST_LOST = 8  # workers that a sequence may lose: then it is the sequence that kills them
_REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)


class WorkerLost(Exception):
    """A worker ended, or fell silent, before it had answered."""


class RouterBackend:
    """Belongs to the event loop. `address`: where workers register; `wait_seconds`: for a worker, where none is left;
    `max_queue_size`: sequences under way beyond what the workers decode at once, above which requests are refused."""

    def __init__(
        self,
        workers: Workers,
        tokenizer: Tokenizer,
        credentials: Credentials,
        address: tuple[str, int],
        *,
        wait_seconds: float = 10.0,
        max_queue_size: int = 1024,
    ) -> None:
        self._address = address
        self._server: grpc.aio.Server | None = None
        self._workers, self._tokenizer, self._credentials = workers, tokenizer, credentials
        self._wait_seconds, self._max_queue_size = wait_seconds, max_queue_size
        self._stats = EngineStats()
        self._num_under_way = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._is_stopping = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self.num_migrations = 0

    @property
    def _info(self) -> pb.WorkerInfo:
        """Any worker's: they serve one model. Raises `Unavailable` without one."""
        for worker in self._workers.all:
            return worker.info
        raise Unavailable("no worker is here")

    @property
    def max_model_len(self) -> int:
        return min((worker.info.max_model_len for worker in self._workers.all), default=0)

    @property
    def max_batch_size(self) -> int:
        return sum(worker.info.max_batch_size for worker in self._workers.all if worker.view().can_decode) or 1

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        return dict(json.loads(self._info.sampling_defaults))

    @property
    def text_reader(self) -> None:
        return None

    def validate(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> Prompt:
        """See `Backend`."""
        return RequestIntake(self._tokenizer, self._info.vocab_size, self.max_model_len, time.monotonic).validate(prompt_token_ids, params)

    async def generate(
        self, request_id: str, prompt: Prompt, params: SamplingParams, context: RequestContext = DEFAULT_CONTEXT
    ) -> AsyncGenerator[OutputDelta]:
        """See `Backend`."""
        if self._is_stopping:
            raise Unavailable("the server is shutting down")
        if self._num_under_way + params.n > self.max_batch_size + self._max_queue_size:
            raise Overloaded(1.0)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        self._num_under_way += params.n
        self._quiet.clear()
        self._stats.num_requests += 1
        self._stats.num_prompt_tokens += len(prompt)
        deltas: asyncio.Queue[OutputDelta | Exception] = asyncio.Queue()
        tasks = []
        try:
            for index in range(params.n):
                # The engine adds the index to the seed, modulo 2^64.
                own = replace(params, n=1, seed=(seed + index + 2**63) % 2**64 - 2**63)
                tasks.append(asyncio.create_task(self._into(deltas, self._sequence(request_id, index, prompt, own, context))))
            self._tasks.update(tasks)
            num_unfinished = params.n
            while num_unfinished:
                found = await deltas.get()
                if isinstance(found, Exception):
                    raise found
                num_unfinished -= found.finish_reason is not None
                yield found
        finally:
            for task in tasks:
                task.cancel()
                self._tasks.discard(task)
            self._num_under_way -= params.n
            if not self._num_under_way:
                self._quiet.set()

    @staticmethod
    async def _into(queue: asyncio.Queue[OutputDelta | Exception], deltas: AsyncGenerator[OutputDelta]) -> None:
        try:
            async with aclosing(deltas):
                async for delta in deltas:
                    queue.put_nowait(delta)
        except Exception as error:
            queue.put_nowait(error)
        except asyncio.CancelledError:
            queue.put_nowait(Unavailable("the server is shutting down"))  # nobody reads it where the client has left
            raise

    async def _sequence(
        self, request_id: str, index: int, prompt: Prompt, params: SamplingParams, context: RequestContext
    ) -> AsyncGenerator[OutputDelta]:
        """One sequence's deltas, by as many workers as it takes."""
        output: list[int] = []
        lost: list[str] = []
        while True:
            choice = await self._choose(len(prompt) + len(output), lost, params)
            try:
                async with aclosing(self._call(choice, f"{request_id}-{index}-{len(lost)}", prompt, params, context, output)) as deltas:
                    async for message in deltas:
                        delta = messages.read_delta(message, request_id, index)
                        output += delta.token_ids
                        self._stats.num_output_tokens += len(delta.token_ids)
                        if delta.finish_reason is FinishReason.ABORT:
                            raise WorkerLost("it ended the request")
                        yield delta
                        if delta.finish_reason is not None:
                            self._stats.finished[delta.finish_reason] = self._stats.finished.get(delta.finish_reason, 0) + 1
                            return
                raise WorkerLost("its answer has no end")
            except WorkerLost as error:
                lost.append(choice.decode)
                self.num_migrations += 1
                logger.warning("%s goes on elsewhere after %d tokens: worker %s: %s", request_id, len(output), choice.decode[:8], error)
                if len(lost) > _MOST_LOST:
                    raise Unavailable(f"{len(lost)} workers were lost while they answered this request") from error

    async def _choose(self, num_tokens: int, lost: Sequence[str], params: SamplingParams) -> Choice:
        """Waits for a worker where none is left. Raises `Unavailable` after a while."""
        deadline = time.monotonic() + self._wait_seconds
        may_move = params.max_tokens != 0
        while True:
            changed = self._workers.changed
            views = [worker.view() for worker in self._workers.all]
            choice = choose(views, num_tokens, lost, may_move=may_move) or choose(views, num_tokens, may_move=may_move)
            if choice is not None:
                return choice
            try:
                await asyncio.wait_for(changed.wait(), deadline - time.monotonic())
            except TimeoutError:
                raise Unavailable("no worker is left") from None

    async def _call(
        self, choice: Choice, call_id: str, prompt: Prompt, params: SamplingParams, context: RequestContext, output: Sequence[int]
    ) -> AsyncGenerator[pb.Delta]:
        """Ask a decode worker. Raises `WorkerLost`, or `RequestError` for what no worker would answer."""
        decode = self._workers.get(choice.decode)
        prefill = None if choice.prefill is None else self._workers.get(choice.prefill)
        if decode is None:
            raise WorkerLost("it is gone")
        if output:  # what only the first delta has was sent
            params = replace(params, echo=False, prompt_logprobs=None)
        asked = pb.GenerateRequest(
            request_id=call_id,
            prompt_token_ids=prompt.token_ids.tolist(),
            params=messages.params_text(params),
            context=messages.context_message(context),
            output_token_ids=output,
            prefill_address=None if prefill is None else prefill.info.address,
        )
        call = decode.stub.Generate(asked, metadata=self._credentials.metadata)
        added = _AddedLoad(prefill or decode, decode, len(prompt) + len(output))
        try:
            async for message in _until_lost(call, decode):
                added.has_begun()
                yield message
        except grpc.aio.AioRpcError as error:
            if error.code() in _REFUSED:
                raise _refusal(error) from error
            raise WorkerLost(f"{error.code().name}: {error.details()}") from error
        finally:
            added.end()
            call.cancel()

    async def embed(self, request_id: str, token_lists: Sequence[TokenIds], context: RequestContext = DEFAULT_CONTEXT) -> Embedded:
        """No worker of a router embeds yet."""
        raise Unavailable("a router's workers embed no texts")

    def stats(self) -> EngineStats:
        """Of all workers, as far as they tell."""
        stats, loads = self._stats, [worker.load for worker in self._workers.all]
        stats.num_waiting, stats.num_prefilling = sum(load.num_waiting for load in loads), sum(load.num_prefilling for load in loads)
        stats.num_running = sum(load.num_running for load in loads)
        return stats

    def is_ready(self) -> bool:
        return not self._is_stopping and self._workers.has_each_role

    def failure(self) -> str | None:
        return None

    def iteration_seconds(self) -> float:
        return 0.0

    async def start(self) -> None:
        """Let workers register. Raises `ConfigError` for a port in use."""
        host, port = self._address
        self._server = self._credentials.server()
        worker_pb2_grpc.add_RouterServicer_to_server(self._workers, self._server)
        try:
            self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise ConfigError(
                f"can't listen for workers on {host} port {port}; choose others with --workers-host and --workers-port"
            ) from error
        await self._server.start()

    def abort_all(self) -> None:
        """See `Backend`."""
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()

    async def stop(self) -> None:
        """See `Backend`."""
        self._is_stopping = True
        await self._quiet.wait()
        if self._server is not None:
            await self._server.stop(0.0)


class _AddedLoad:
    """What a sequence adds to its workers' loads until it has ended."""

    def __init__(self, prefill: KnownWorker, decode: KnownWorker, num_tokens: int) -> None:
        self._prefill, self._decode, self._num_tokens = prefill, decode, num_tokens
        prefill.num_tokens += num_tokens
        decode.num_sequences += 1

    def has_begun(self) -> None:
        """Its prompt is computed."""
        self._prefill.num_tokens -= self._num_tokens
        self._num_tokens = 0

    def end(self) -> None:
        self.has_begun()
        self._decode.num_sequences -= 1


async def _until_lost(call: Any, worker: KnownWorker) -> AsyncIterator[pb.Delta]:
    """A call's messages. Raises `WorkerLost` once the worker has fallen silent: a stopped process keeps its
    connections."""
    lost = asyncio.create_task(worker.lost.wait())
    answers = call.__aiter__()
    try:
        while True:
            following = asyncio.ensure_future(anext(answers))
            await asyncio.wait((following, lost), return_when=asyncio.FIRST_COMPLETED)
            if lost.done() or following.cancelled():  # its channel is closed then, which cancels what is under way
                following.cancel()
                raise WorkerLost("it fell silent")
            try:
                yield following.result()
            except StopAsyncIteration:
                return
    finally:
        lost.cancel()


def _refusal(error: grpc.aio.AioRpcError) -> Exception:
    try:
        told = json.loads(error.details() or "")
        return RequestError(told["message"], told["param"], told["code"])
    except (ValueError, KeyError, TypeError):
        return Unavailable(str(error.details()))
