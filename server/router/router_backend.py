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
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, NamedTuple

import grpc
import grpc.aio

from jaxinfer.config import ConfigError
from jaxinfer.encode.text_batching import Embedded, TokenIds
from jaxinfer.engine.intake import RequestIntake
from jaxinfer.kv_cache.block_keys import History, block_keys, digests
from jaxinfer.request import DEFAULT_CONTEXT, FinishReason, OutputDelta, RequestContext, SamplingParams
from jaxinfer.segments import Prompt
from jaxinfer.stats import EngineStats
from jaxinfer.structured.grammars import Grammars
from jaxinfer.tokenizer import Tokenizer
from server.backend import Overloaded, Unavailable
from server.cluster_stats import ClusterStats
from server.logs import current_request
from server.router.policy import DEFAULT_ROUTING, Choice, RoutedRequest, RoutingSettings, choose
from server.router.workers import Workers
from server.tracing import begin
from server.workers import messages, worker_pb2_grpc
from server.workers import worker_pb2 as pb
from server.workers.credentials import Credentials
from server.workers.generate_stream import WorkerLost

logger = logging.getLogger(__name__)

_MOST_LOST = 8  # workers that a sequence may lose: then it is the sequence that kills them
_MOST_SESSIONS = 65536  # whose workers are remembered


class _Prefix(NamedTuple):
    """The most blocks of a prompt that a worker has, and who that is."""

    num_blocks: int
    worker_id: str


_NO_PREFIX = _Prefix(0, "")


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
        routing: RoutingSettings = DEFAULT_ROUTING,
        wait_seconds: float = 10.0,
        max_queue_size: int = 1024,
    ) -> None:
        self._address = address
        self._server: grpc.aio.Server | None = None
        self._workers, self._tokenizer, self._credentials = workers, tokenizer, credentials
        self._routing = routing
        self._wait_seconds, self._max_queue_size = wait_seconds, max_queue_size
        self._stats = EngineStats()
        self._num_under_way = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._is_stopping = False
        self._grammars: Grammars | None = None  # from the first request on that needs them
        self._favourites = _Recent(_MOST_SESSIONS)
        self.num_migrations = 0
        self.num_routed: Counter[str] = Counter()  # sequences, by why they went where they went

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
        vocab_size = self._info.vocab_size
        if params.structured_outputs is not None and self._grammars is None:
            self._grammars = Grammars(self._tokenizer, vocab_size)
        intake = RequestIntake(self._tokenizer, vocab_size, self.max_model_len, time.monotonic, self._grammars)
        return intake.validate(prompt_token_ids, params)

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
        # The engine adds the index to the seed, modulo 2^64.
        each = [replace(params, n=1, seed=(seed + index + 2**63) % 2**64 - 2**63) for index in range(params.n)]
        sequences = [self._sequence(request_id, index, prompt, own, context) for index, own in enumerate(each)]
        try:
            async with aclosing(sequences[0] if params.n == 1 else self._merged(sequences)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self._num_under_way -= params.n
            if not self._num_under_way:
                self._quiet.set()

    async def _merged(self, sequences: Sequence[AsyncGenerator[OutputDelta]]) -> AsyncGenerator[OutputDelta]:
        """Several sequences' deltas as they come."""
        merged: asyncio.Queue[OutputDelta | Exception] = asyncio.Queue()
        tasks = [asyncio.create_task(self._into(merged, sequence)) for sequence in sequences]
        try:
            num_unfinished = len(tasks)
            while num_unfinished:
                found = await merged.get()
                if isinstance(found, Exception):
                    raise found
                num_unfinished -= found.finish_reason is not None
                yield found
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @staticmethod
    async def _into(queue: asyncio.Queue[OutputDelta | Exception], deltas: AsyncGenerator[OutputDelta]) -> None:
        try:
            async with aclosing(deltas):
                async for delta in deltas:
                    queue.put_nowait(delta)
        except Exception as error:
            queue.put_nowait(error)

    async def _sequence(
        self, request_id: str, index: int, prompt: Prompt, params: SamplingParams, context: RequestContext
    ) -> AsyncGenerator[OutputDelta]:
        """One sequence's deltas, by as many workers as it takes."""
        output: list[int] = []
        lost: list[str] = []
        told_at = time.monotonic()  # when it came, then its last token
        while True:
            by_size = self._digests(prompt, output, context)
            choice, prefix = await self._choose(len(prompt) + len(output), by_size, lost, params, context)
            call_id = f"{request_id}-{index}-{len(lost)}"
            computes = self._workers.get(choice.computed_by)
            digests = [] if computes is None else by_size.get(computes.info.page_size, [])
            self._workers.prefixes.expect(choice.computed_by, digests)
            try:
                async with aclosing(self._call(choice, prefix, call_id, prompt, params, context, output)) as deltas:
                    async for message in deltas:
                        delta = messages.read_delta(message, request_id, index)
                        if delta.token_ids:
                            now = time.monotonic()
                            (self._stats.inter_token_latency if output else self._stats.time_to_first_token).observe(now - told_at)
                            told_at = now
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
            finally:
                self._workers.prefixes.settle(choice.computed_by, digests)

    def _digests(self, prompt: Prompt, output: Sequence[int], context: RequestContext) -> dict[int, list[bytes]]:
        """What names the blocks that a worker would have to have, for each size of a page that any has."""
        history = History([*prompt.token_ids.tolist(), *output], prompt, context)
        return {
            page_size: digests(context.namespace, block_keys(history, page_size, len(history.token_ids) // page_size))
            for page_size in {worker.info.page_size for worker in self._workers.all}
        }

    async def _choose(
        self, num_tokens: int, digests: Mapping[int, Sequence[bytes]], lost: Sequence[str], params: SamplingParams, context: RequestContext
    ) -> tuple[Choice, _Prefix]:
        """Also who has what the worker is to fetch, if it is. Waits for a worker where none is left. Raises
        `Unavailable` after a while."""
        deadline = time.monotonic() + self._wait_seconds
        session = None if context.session is None else (context.namespace, context.session)
        while True:
            changed, workers = self._workers.changed, self._workers.all
            prefixes = self._workers.prefixes
            num_cached: dict[str, int] = {}  # blocks
            longest: dict[int, _Prefix] = {}  # by page size: pages of another one are fetched by hand-offs only
            for page_size, of_size in digests.items():
                worker_ids = [worker.info.worker_id for worker in workers if worker.info.page_size == page_size]
                num_cached |= prefixes.match(of_size, worker_ids)
                if any(num_cached.values()):
                    held = prefixes.match(of_size, worker_ids, with_expected=False)
                    longest[page_size] = max(_Prefix(count, worker_id) for worker_id, count in held.items())
            views = [
                worker.view(
                    num_cached.get(worker_id, 0) * page_size,
                    prefixes.num_held(worker_id),
                    longest.get(page_size, _NO_PREFIX).num_blocks * page_size,
                )
                for worker in workers
                for worker_id, page_size in ((worker.info.worker_id, worker.info.page_size),)
            ]
            bytes_per_token = max((worker.info.kv_bytes_per_token for worker in workers), default=0)
            routed = RoutedRequest(num_tokens, bytes_per_token, session and self._favourites.get(session), may_move=params.max_tokens != 0)
            choice = choose(views, routed, lost, self._routing) or choose(views, routed, settings=self._routing)
            if choice is not None:
                if session is not None:
                    self._favourites[session] = choice.computed_by
                self.num_routed[choice.reason] += 1
                computes = self._workers.get(choice.computed_by)
                prefix = _NO_PREFIX if computes is None or not choice.is_fetched else longest[computes.info.page_size]
                return choice, prefix
            try:
                await asyncio.wait_for(changed.wait(), deadline - time.monotonic())
            except TimeoutError:
                raise Unavailable("no worker is left") from None

    async def _call(
        self,
        choice: Choice,
        prefix: _Prefix,
        call_id: str,
        prompt: Prompt,
        params: SamplingParams,
        context: RequestContext,
        output: Sequence[int],
    ) -> AsyncGenerator[pb.Delta]:
        """Ask a decode worker. Raises `WorkerLost`, or `RequestError` for what no worker would answer."""
        decode = self._workers.get(choice.decode)
        prefill = None if choice.prefill is None else self._workers.get(choice.prefill)
        has_prefix = self._workers.get(prefix.worker_id)
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
            num_new_tokens=choice.num_new_tokens,
            prefix_address=None if has_prefix is None else has_prefix.page_address,
            num_prefix_tokens=0 if has_prefix is None else prefix.num_blocks * has_prefix.info.page_size,
        )
        current = current_request.get()
        span = begin(
            "router",
            "" if current is None else current.traceparent,
            request_id=call_id,
            decode=decode.info.address,
            prefill=None if prefill is None else prefill.info.address,
            reason=choice.reason,
            expected_seconds=choice.seconds,
            tokens_before=len(output),
        )
        asked.traceparent = span.traceparent
        work = [(prefill or decode).given.begin(choice.num_new_tokens), decode.given.begin(0, num_sequences=1)]
        try:
            async with aclosing(decode.stream.generate(asked)) as deltas:
                async for message in deltas:
                    work[0].has_prefilled()
                    yield message
        except WorkerLost as error:
            span.end(error)
            if self._is_stopping:
                raise Unavailable("the server is shutting down") from error
            raise
        finally:
            span.end()
            for part in work:
                part.end()

    async def embed(self, request_id: str, token_lists: Sequence[TokenIds], context: RequestContext = DEFAULT_CONTEXT) -> Embedded:
        """No worker of a router embeds yet."""
        raise Unavailable("a router's workers embed no texts")

    def stats(self) -> EngineStats:
        """Of all workers, as far as they tell."""
        stats, loads = self._stats, [worker.load for worker in self._workers.all]
        stats.num_waiting, stats.num_prefilling = sum(load.num_waiting for load in loads), sum(load.num_prefilling for load in loads)
        stats.num_running = sum(load.num_running for load in loads)
        return stats

    def cluster(self) -> ClusterStats:
        """See `Backend`."""
        known = [worker.stats(self._workers.prefixes.num_held(worker.info.worker_id)) for worker in self._workers.all]
        return ClusterStats(tuple(known), self.num_migrations, dict(self.num_routed))

    def models(self) -> None:
        return None

    def weight_control(self) -> None:
        return None

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
            self._credentials.listen(self._server, f"{host}:{port}")
        except RuntimeError as error:
            raise ConfigError(
                f"can't listen for workers on {host} port {port}; choose others with --workers-host and --workers-port"
            ) from error
        await self._server.start()

    def abort_all(self) -> None:
        """See `Backend`."""
        self._is_stopping = True
        for worker in self._workers.all:
            worker.stream.close("the router is shutting down")

    async def stop(self) -> None:
        """See `Backend`."""
        self._is_stopping = True
        await self._quiet.wait()
        if self._server is not None:
            await self._server.stop(0.0)


class _Recent(OrderedDict[tuple[str, str], str]):
    """The last worker of each session, of so many sessions."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, session: tuple[str, str], worker_id: str) -> None:
        super().__setitem__(session, worker_id)
        self.move_to_end(session)
        if len(self) > self._most:
            self.popitem(last=False)
