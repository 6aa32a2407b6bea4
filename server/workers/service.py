"""WorkerService: an engine behind gRPC. What it prefills others pull; what it decodes it may pull from others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from functools import partial
from importlib import metadata
from typing import Any

import grpc
import grpc.aio
import numpy as np

from jaxinfer.async_requests import AsyncRequests
from jaxinfer.engine import Engine
from jaxinfer.engine_loop import EngineLoop
from jaxinfer.engine_thread import NewRequest
from jaxinfer.kv_cache.block_keys import History
from jaxinfer.kv_transfer.geometry import geometry_fields, read_geometry
from jaxinfer.kv_transfer.kv_receiver import KVReceiver
from jaxinfer.kv_transfer.kv_sender import KVSender
from jaxinfer.kv_transfer.page_client import PageAddress, PageClient
from jaxinfer.kv_transfer.page_server import PageServer
from jaxinfer.kv_transfer.repaging import Repaging
from server.tracing import TraceSpan, begin, note_usage
from server.workers import messages, worker_pb2_grpc
from server.workers import worker_pb2 as pb
from server.workers.credentials import Credentials
from server.workers.generate_stream import serve_generate
from server.workers.heartbeats import until_silent, with_heartbeats
from server.workers.roles import DRAINING, ROLES
from server.workers.work_under_way import WorkUnderWay

_Start = Callable[[KVReceiver, Sequence[int]], None]
_Pull = Coroutine[Any, Any, None]

logger = logging.getLogger(__name__)

_LOAD_SECONDS = 0.1  # between looks at the load
_CACHE_SECONDS = 0.05  # between looks at what the prefix cache told
_CACHED_PAGE_SECONDS = 2.0  # that another worker may take for a page that it has
_HEARTBEAT_SECONDS = 1.0  # between signs of life of a prefill for another worker
_SILENT_SECONDS = 3.0  # without one, after which it is prefilled here
_LOAD_AT_LEAST = 1.0  # seconds between messages of it, though nothing has changed


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Belongs to the event loop that it is made in."""

    def __init__(
        self, engine: Engine, loop: EngineLoop, info: pb.WorkerInfo, pages: PageServer, credentials: Credentials, client: PageClient
    ) -> None:
        self.info = info
        self._engine, self._loop, self._pages, self._credentials = engine, loop, pages, credentials
        self._requests = AsyncRequests(loop)
        self._client = client
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._geometry = engine.page_spec
        self._work = WorkUnderWay()
        engine.cached_pages.connect(self._fetch_cached)

    async def Describe(self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext) -> pb.WorkerInfo:
        return self.info

    async def SetRole(self, request: pb.RoleRequest, context: grpc.aio.ServicerContext) -> pb.WorkerInfo:
        """From now on, or a tenth of a second later, routers give it another role's work; what it has begun it ends.
        Both programs are there: nothing is compiled."""
        if request.role not in ROLES:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"role is {request.role!r}: it is one of {', '.join(ROLES)}")
        self.info.role = request.role
        return self.info

    async def WatchLoad(self, request: pb.LoadRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.Load]:
        last, silent_for = None, 0.0
        while True:
            load = self._load()
            silent_for += _LOAD_SECONDS
            if load != last or silent_for >= _LOAD_AT_LEAST:
                last, silent_for = load, 0.0
                yield load
            await asyncio.sleep(_LOAD_SECONDS)

    async def WatchCache(self, request: pb.CacheRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.CacheChange]:
        last: dict[int, int] = {}
        while True:
            for level, events in enumerate(self._engine.cached_pages.events):
                if (change := events.since(last.get(level))) is not None:
                    last[level] = change.last
                    for message in messages.cache_messages(change, is_stored=level > 0):
                        yield message
            await asyncio.sleep(_CACHE_SECONDS)

    async def GenerateMany(
        self, requests: AsyncIterator[pb.GenerateRequests], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateEvents]:
        async with aclosing(serve_generate(requests, self._generate)) as events:
            async for message in events:
                yield message

    async def _generate(self, request: pb.GenerateRequest) -> AsyncGenerator[pb.Delta]:
        receiver, fetching = None, _Fetching()
        span = begin("decode", request.traceparent, request_id=request.request_id, prompt_tokens=len(request.prompt_token_ids))
        work = self._work.begin(0 if request.HasField("prefill_address") else request.num_new_tokens, num_sequences=1)
        if request.HasField("prefill_address"):
            receiver = KVReceiver(self._fetcher(request, fetching, span), self._geometry)
        try:
            new = await self._new_request(request.request_id, request.prompt_token_ids, request.params, request.context)
            new = NewRequest(new.request_id, new.prompt, new.params, new.context, receiver, tuple(request.output_token_ids))
            if receiver is None:
                self._expect(new, request)
            async with aclosing(self._requests.stream(new)) as deltas:
                async for delta in deltas:
                    work.has_prefilled()
                    if receiver is None:
                        work.measure(delta, len(new.prompt) + len(new.output_ids))
                    note_usage(span, delta)
                    yield messages.delta_message(delta)
        except Exception as error:
            span.end(error)
            raise
        finally:
            span.end()
            fetching.cancel()
            work.end()

    async def Prefill(self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.PrefillEvent]:
        async with aclosing(with_heartbeats(self._prefill(request, context), _HEARTBEAT_SECONDS)) as events:
            async for event in events:
                yield event

    async def _prefill(self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext) -> AsyncGenerator[pb.PrefillEvent]:
        if difference := self._difference(request):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, difference)
        asked, over, event_loop = read_geometry(json.loads(request.page_geometry)), asyncio.Event(), asyncio.get_running_loop()
        sender = KVSender(request.num_known, None if asked == self._geometry else Repaging(self._geometry, asked))

        def tell() -> None:  # in any thread
            event_loop.call_soon_threadsafe(over.set)

        sender.when_closed = tell
        self._pages.add(request.handoff_id, sender)
        work = self._work.begin(request.num_new_tokens)
        span = begin("prefill", request.traceparent, request_id=request.request_id, known_tokens=request.num_known)
        try:
            yield pb.PrefillEvent(offered=pb.Offered(page_port=self._pages.port))
            new = await self._new_request(
                f"{request.request_id}-{uuid.uuid4().hex[:8]}", request.prompt_token_ids, request.params, request.context
            )
            new = NewRequest(new.request_id, new.prompt, new.params, new.context, sender, tuple(request.output_token_ids))
            self._expect(new, request)
            async with aclosing(self._requests.stream(new)) as deltas:
                async for delta in deltas:
                    work.has_prefilled()
                    work.measure(delta, len(new.prompt) + len(new.output_ids))
                    note_usage(span, delta)
                    if delta.token_ids:
                        yield pb.PrefillEvent(first_token=messages.first_token_message(delta))
            await over.wait()  # the call lasts as long as the hand-off: whoever ends it ends both
        except Exception as error:
            span.end(error)
            await _abort(context, error)
        finally:
            span.end()
            self._pages.remove(request.handoff_id)
            work.end()

    def drain(self) -> None:
        """Routers give it nothing new from now on, or a tenth of a second later."""
        self.info.role = DRAINING

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for anything of it."""
        return not (self._work.num_sequences or self._work.num_tokens or self._pages.num_senders)

    def _expect(self, new: NewRequest, request: pb.GenerateRequest | pb.PrefillRequest) -> None:
        """Know which worker has the first tokens of a request that is computed here."""
        if request.HasField("prefix_address"):
            history = History([*new.prompt.token_ids.tolist(), *new.output_ids], new.prompt, new.context)
            self._engine.cached_pages.expect(history, request.num_prefix_tokens, request.prefix_address)

    def _fetch_cached(self, address: str, keys: Sequence[bytes], out: np.ndarray) -> int:
        """See `FetchPages`; in a thread of the tiers'."""
        host, _, port = address.rpartition(":")
        return self._client.fetch(host.strip("[]"), int(port), self.info.model_digest.encode(), keys, out, _CACHED_PAGE_SECONDS)

    def _difference(self, request: pb.PrefillRequest) -> str | None:
        """Why pages of this worker would mean something else to the one that asks."""
        pairs = [("version", self.info.version, request.version), ("model", self.info.model_digest, request.model_digest)]
        if request.version == self.info.version:  # else its geometry may be spelled in another way
            try:
                own, asked = geometry_fields(self._geometry), geometry_fields(read_geometry(json.loads(request.page_geometry)))
            except ValueError as error:
                return str(error)
            pairs += [(f"pages' {name}", str(own[name]), str(asked[name])) for name in own if name != "page_size"]
        for name, here, there in pairs:
            if here != there:
                return f"the workers' {name} differs: {here} where it is prefilled, {there} where it is decoded"
        return None

    async def _new_request(self, request_id: str, token_ids: Sequence[int], params: str, context: pb.Context) -> NewRequest:
        sampling = messages.read_params(params)
        validate = partial(self._engine.validate, list(token_ids), sampling)
        # A grammar that is new is compiled then.
        prompt = validate() if sampling.structured_outputs is None else await asyncio.to_thread(validate)
        return NewRequest(request_id, prompt, sampling, messages.read_context(context))

    def _fetcher(self, request: pb.GenerateRequest, fetching: _Fetching, span: TraceSpan) -> _Start:
        event_loop = asyncio.get_running_loop()

        def start(receiver: KVReceiver, places: Sequence[int]) -> None:  # in the engine's thread
            event_loop.call_soon_threadsafe(lambda: fetching.begin(self._fetch(request, receiver, places, span)))

        return start

    async def _fetch(self, request: pb.GenerateRequest, receiver: KVReceiver, places: Sequence[int], parent: TraceSpan) -> None:
        """Have another worker prefill the request, and pull its pages meanwhile."""
        span = begin("transfer", parent.traceparent, pages=len(places), bytes=len(places) * self._geometry.page_bytes)
        spec, handoff_id, address = self._geometry, uuid.uuid4().bytes, request.prefill_address
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        try:
            asked = pb.PrefillRequest(
                request_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                output_token_ids=request.output_token_ids,
                num_new_tokens=request.num_new_tokens,
                params=request.params,
                context=request.context,
                handoff_id=handoff_id,
                num_known=places[0] // spec.num_groups * spec.page_size if places else num_tokens,
                page_geometry=self.info.page_geometry,
                model_digest=self.info.model_digest,
                version=self.info.version,
                prefix_address=request.prefix_address if request.HasField("prefix_address") else None,
                num_prefix_tokens=request.num_prefix_tokens,
                traceparent=span.traceparent,
            )
            stub = worker_pb2_grpc.WorkerStub(self._channel(address))
            async for event in until_silent(stub.Prefill(asked, metadata=self._credentials.metadata), _SILENT_SECONDS):
                if event.HasField("offered"):
                    host = address.rpartition(":")[0].strip("[]")
                    self._client.pull(PageAddress(host, event.offered.page_port, handoff_id), receiver, places)
                elif event.HasField("first_token"):
                    receiver.end(messages.read_first_token(event.first_token))
            if receiver.first_token is None:
                receiver.fail("the prefill worker gave no token")
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            why = str(error.details()) if isinstance(error, grpc.aio.AioRpcError) else f"it said nothing for {_SILENT_SECONDS:g} s"
            logger.warning("prefill of %s by %s failed: %s; it is prefilled here", request.request_id, address, why)
            receiver.fail(why)
        except asyncio.CancelledError:
            receiver.fail("the request is over")
            raise
        finally:
            span.note(failure=receiver.failure)
            span.end()

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = self._credentials.channel(address)
        return self._channels[address]

    def _load(self) -> pb.Load:
        stats = self._engine.stats
        return pb.Load(
            num_waiting=stats.num_waiting,
            num_prefilling=stats.num_prefilling,
            num_running=stats.num_running,
            num_free_pages=max(0, stats.decode_pages - stats.decode_pages_used),
            num_cached_tokens=stats.num_cached_tokens,
            num_prompt_tokens=stats.num_prompt_tokens,
            num_output_tokens=stats.num_output_tokens,
            num_used_pages=stats.prefill_pages_used + (0 if self._engine.shares_mesh else stats.decode_pages_used),
            num_incoming=stats.num_incoming,
            num_kept_handoffs=self._pages.num_senders,
            num_pages_received=stats.num_pages_received,
            num_pending_tokens=self._work.num_tokens,
            num_sequences=self._work.num_sequences,
            prefill_tokens_per_second=self._work.tokens_per_second,
            bytes_per_second=self._client.bytes_per_second,
            num_bytes_pulled=self._client.num_bytes,
            num_wire_bytes_pulled=self._client.num_wire_bytes,
            pull_seconds=self._client.receive_seconds,
            role=self.info.role,
        )

    async def close(self) -> None:
        self._client.close()
        for channel in self._channels.values():
            await channel.close()


class _Fetching:
    """A request's fetch from another worker, which begins when it has pages here, and ends with the request."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None
        self._is_over = False

    def begin(self, work: _Pull) -> None:
        if self._is_over:
            work.close()
        else:
            self._task = asyncio.create_task(work)

    def cancel(self) -> None:
        self._is_over = True
        if self._task is not None:
            self._task.cancel()


async def _abort(context: grpc.aio.ServicerContext, error: Exception) -> None:
    """End a call with the error as a status that the router understands."""
    if not messages.is_refusal(error):
        with contextlib.suppress(asyncio.CancelledError):
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"{type(error).__name__}: {error}")
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, messages.refusal_text(error))


def version() -> str:
    return metadata.version("jaxinfer")
