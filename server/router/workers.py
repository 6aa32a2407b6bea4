"""Workers: those that are registered with this router, and what each has to do. No JAX."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
import grpc.aio

from server.cluster_stats import WorkerStats
from server.router.policy import WorkerView
from server.router.prefix_index import Holder, PrefixIndex
from server.workers import messages, worker_pb2_grpc
from server.workers import worker_pb2 as pb
from server.workers.credentials import Credentials
from server.workers.generate_stream import GenerateStream
from server.workers.work_under_way import WorkUnderWay

logger = logging.getLogger(__name__)

_CACHE_RETRY_SECONDS = 0.5
SILENT_SECONDS = 3.0  # without a word from a worker, after which it counts as lost


class KnownWorker:
    """A registered worker: its connection, its last load, and what this router has given it."""

    def __init__(self, info: pb.WorkerInfo, credentials: Credentials) -> None:
        self.info, self._channel = info, credentials.channel(info.address)
        self.stub = worker_pb2_grpc.WorkerStub(self._channel)
        self.stream = GenerateStream(partial(self.stub.GenerateMany, metadata=credentials.metadata))
        self.load = pb.Load()
        self.heard = asyncio.Event()
        self.given = WorkUnderWay()  # by this router

    def view(self, num_cached: int = 0, num_held: int = 0, num_elsewhere: int = 0) -> WorkerView:
        """With what other routers gave it, as far as it has told. `num_cached`, `num_elsewhere`: of the prompt in
        question, in tokens; `num_held`: blocks in its prefix cache."""
        info, given, load = self.info, self.given, self.load
        return WorkerView(
            info.worker_id,
            load.role or info.role,
            max(given.num_tokens, load.num_pending_tokens),
            max(given.num_sequences, load.num_sequences),
            info.max_batch_size,
            num_cached,
            load.prefill_tokens_per_second,
            load.bytes_per_second,
            num_held,
            num_elsewhere,
        )

    @property
    def page_address(self) -> str:
        """Where other workers fetch its pages."""
        return f"{self.info.address.rpartition(':')[0]}:{self.info.page_port}"

    def stats(self, num_cached_blocks: int) -> WorkerStats:
        info, load = self.info, self.load
        return WorkerStats(
            worker_id=info.worker_id,
            role=load.role or info.role,
            address=info.address,
            num_waiting=load.num_waiting,
            num_prefilling=load.num_prefilling,
            num_running=load.num_running,
            num_incoming=load.num_incoming,
            num_pending_tokens=load.num_pending_tokens,
            num_used_pages=load.num_used_pages,
            num_free_pages=load.num_free_pages,
            num_kept_handoffs=load.num_kept_handoffs,
            num_cached_blocks=num_cached_blocks,
            num_pages_received=load.num_pages_received,
            num_output_tokens=load.num_output_tokens,
            num_new_prompt_tokens=load.num_prompt_tokens - load.num_cached_tokens,
            max_batch_size=info.max_batch_size,
            num_bytes_pulled=load.num_bytes_pulled,
            num_wire_bytes_pulled=load.num_wire_bytes_pulled,
            pull_seconds=load.pull_seconds,
            prefill_tokens_per_second=load.prefill_tokens_per_second,
            pull_bytes_per_second=load.bytes_per_second,
        )

    async def close(self) -> None:
        self.stream.close("it fell silent")
        await self._channel.close()


class Workers(worker_pb2_grpc.RouterServicer):
    """The Router service. `changed` is set whenever a worker comes or goes."""

    def __init__(self, credentials: Credentials, tokenizer_digest: str) -> None:
        self._credentials, self._tokenizer_digest = credentials, tokenizer_digest
        self._known: dict[str, KnownWorker] = {}
        self.changed = asyncio.Event()
        self.prefixes = PrefixIndex()

    @property
    def all(self) -> list[KnownWorker]:
        """Those that can be asked."""
        return [worker for worker in self._known.values() if not worker.stream.is_lost]

    def get(self, worker_id: str) -> KnownWorker | None:
        return self._known.get(worker_id)

    @property
    def has_each_role(self) -> bool:
        """Whether somebody prefills and somebody decodes."""
        views = [worker.view() for worker in self.all]
        return any(view.can_prefill for view in views) and any(view.can_decode for view in views)

    async def Register(self, request: pb.WorkerInfo, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.Registered]:
        if difference := self._difference(request):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, difference)
        worker = KnownWorker(request, self._credentials)
        watching = asyncio.create_task(self._watch(worker))
        following = asyncio.create_task(self._follow_cache(worker))
        hearing = asyncio.create_task(worker.heard.wait())
        tasks: list[asyncio.Task[Any]] = [watching, following, hearing]
        try:
            await asyncio.wait((watching, hearing), return_when=asyncio.FIRST_COMPLETED)
            if not worker.heard.is_set():
                why = await watching
                logger.warning("a worker (%s) is there, but can't be reached at %s: %s", request.role, request.address, why)
                await context.abort(grpc.StatusCode.UNAVAILABLE, f"it can't reach this worker at {request.address}: {why}")
            self._admit(worker)
            yield pb.Registered()
            losing = asyncio.create_task(worker.stream.until_lost())
            tasks.append(losing)
            ended, _ = await asyncio.wait((watching, losing), return_when=asyncio.FIRST_COMPLETED)
            logger.info("worker %s: %s", request.worker_id[:8], await ended.pop())
        finally:
            for task in tasks:
                task.cancel()
            self._dismiss(worker)
            await worker.close()

    def _admit(self, worker: KnownWorker) -> None:
        request = worker.info
        before = self._known.get(request.worker_id)
        self._known[request.worker_id] = worker
        if before is not None:  # the same process, whose connection broke
            worker.given = before.given
        self._announce()
        logger.info("worker %s (%s) is here: %s", request.worker_id[:8], request.role, request.address)

    def _dismiss(self, worker: KnownWorker) -> None:
        worker_id = worker.info.worker_id
        if self._known.get(worker_id) is worker:
            del self._known[worker_id]
            self.prefixes.forget(worker_id)
            logger.warning("worker %s (%s) is gone", worker_id[:8], worker.info.role)
        self._announce()

    async def _watch(self, worker: KnownWorker) -> str:
        """Read its load until it falls silent; why it did."""
        call = worker.stub.WatchLoad(pb.LoadRequest(), metadata=self._credentials.metadata)
        loads = call.__aiter__()
        try:
            while True:
                load = await asyncio.wait_for(anext(loads), SILENT_SECONDS)
                if worker.heard.is_set() and load.role != worker.load.role:
                    logger.info("worker %s is %s from now on, it was %s", worker.info.worker_id[:8], load.role, worker.load.role)
                    self._announce()
                worker.load = load
                worker.heard.set()
        except TimeoutError:
            return f"it said nothing for {SILENT_SECONDS:g} s"
        except StopAsyncIteration:
            return "it ended"
        except grpc.aio.AioRpcError as error:
            return str(error.details())
        finally:
            call.cancel()

    async def _follow_cache(self, worker: KnownWorker) -> None:
        """Know what its prefix cache has, for as long as the worker is here."""
        worker_id = worker.info.worker_id
        while True:
            call = worker.stub.WatchCache(pb.CacheRequest(), metadata=self._credentials.metadata)
            last = {False: -1, True: -1}  # events of the devices, and of what is stored below them
            try:
                async for message in call:
                    change, holder = messages.read_cache(message), Holder(worker_id, message.is_stored)
                    if change.is_reset:
                        self.prefixes.replace(holder, change.inserted)
                    elif change.first == last[message.is_stored] + 1:
                        self.prefixes.discard(holder, change.evicted)
                        self.prefixes.add(holder, change.inserted)
                    else:
                        break  # something was missed: from the beginning again
                    last[message.is_stored] = change.last
            except grpc.aio.AioRpcError as error:
                logger.debug("worker %s tells nothing of its cache: %s", worker_id[:8], error.details())
            finally:
                call.cancel()
            await asyncio.sleep(_CACHE_RETRY_SECONDS)

    def _difference(self, info: pb.WorkerInfo) -> str | None:
        """Why this worker can't stand beside the others."""
        if info.tokenizer_digest != self._tokenizer_digest:
            return f"the worker's tokenizer ({info.tokenizer_digest}) is not the router's ({self._tokenizer_digest}): give both the same --model"
        for other in self.all:
            for name in ("version", "model_digest"):
                here, there = getattr(other.info, name), getattr(info, name)
                if here != there:
                    return f"the worker's {name} is {there}, that of {other.info.address} is {here}: a router's workers serve one model"
        return None

    def _announce(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()
