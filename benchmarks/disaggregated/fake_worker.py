"""Workers without a model: they answer at once, and know what a prefix cache would. For the router's own time, and its
tests.

`python -m benchmarks.disaggregated.fake_worker --router HOST:PORT --number 4 --model default`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc.aio

from checkpoints.hub import open_source, resolve
from jaxinfer.kv_cache.block_keys import block_keys, digests
from jaxinfer.kv_cache.events import CacheEvents
from jaxinfer.request import RequestContext
from jaxinfer.segments import Prompt
from jaxinfer.tokenizer import Tokenizer
from server.workers import messages, worker_pb2_grpc
from server.workers import worker_pb2 as pb
from server.workers.credentials import Credentials
from server.workers.generate_stream import serve_generate
from server.workers.service import version

PAGE_SIZE = 16
VOCABULARY = 49_152


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """Each token of an answer is a word, `token_seconds` after the one before. `delay`: before the first."""

    def __init__(self, info: pb.WorkerInfo, *, delay: float = 0.0, token_seconds: float = 0.0) -> None:
        self.info, self._delay, self._token_seconds = info, delay, token_seconds
        self.events = CacheEvents()
        self.asked: list[pb.GenerateRequest] = []  # the last thousand

    async def WatchLoad(self, request: pb.LoadRequest, context: Any) -> AsyncIterator[pb.Load]:
        while True:
            yield pb.Load(role=self.info.role, prefill_tokens_per_second=1e4)
            await asyncio.sleep(0.1)

    async def WatchCache(self, request: pb.CacheRequest, context: Any) -> AsyncIterator[pb.CacheChange]:
        last = None
        while True:
            if (change := self.events.since(last)) is not None:
                last = change.last
                for message in messages.cache_messages(change, is_stored=False):
                    yield message
            await asyncio.sleep(0.02)

    async def SetRole(self, request: pb.RoleRequest, context: Any) -> pb.WorkerInfo:
        self.info.role = request.role
        return self.info

    async def GenerateMany(self, requests: AsyncIterator[pb.GenerateRequests], context: Any) -> AsyncIterator[pb.GenerateEvents]:
        async with aclosing(serve_generate(requests, self._generate)) as events:
            async for message in events:
                yield message

    async def _generate(self, request: pb.GenerateRequest) -> AsyncGenerator[pb.Delta]:
        self.asked = [*self.asked[-999:], request]
        num_tokens = json.loads(request.params).get("max_tokens", 16)
        if self._delay:
            await asyncio.sleep(self._delay)
        for digest in self._digests(request):
            self.events.inserted(digest)
        for number in range(len(request.output_token_ids), num_tokens):
            is_last = number == num_tokens - 1
            yield pb.Delta(text=" word", token_ids=[1000 + number], finish_reason="length" if is_last else None)
            if self._token_seconds:
                await asyncio.sleep(self._token_seconds)

    @staticmethod
    def _digests(request: pb.GenerateRequest) -> list[bytes]:
        prompt = Prompt.of_tokens(request.prompt_token_ids)
        history = _Tokens(prompt)
        return digests(request.context.namespace, block_keys(history, PAGE_SIZE, len(prompt) // PAGE_SIZE))


class _Tokens:
    """See `TokenHistory`."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt, self.token_ids, self.context = prompt, prompt.token_ids.tolist(), RequestContext()


async def start(
    role: str, tokenizer_digest: str, credentials: Credentials, host: str = "127.0.0.1", page_size: int = PAGE_SIZE, **how: float
) -> tuple[FakeWorker, grpc.aio.Server]:
    """A fake worker that listens."""
    server = credentials.server()
    port = credentials.listen(server, f"{host}:0")
    info = pb.WorkerInfo(
        worker_id=uuid.uuid4().hex,
        address=f"{host}:{port}",
        role=role,
        version=version(),
        model="fake",
        model_digest="fake",
        tokenizer_digest=tokenizer_digest,
        max_model_len=8192,
        max_batch_size=64,
        vocab_size=VOCABULARY,
        sampling_defaults="{}",
        page_size=page_size,
    )
    worker = FakeWorker(info, **how)
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
    await server.start()
    return worker, server


async def run(router: str, number: int, model: str) -> None:
    """Until it is killed."""
    from server.workers.worker import stay_registered

    credentials = Credentials()
    digest = Tokenizer.from_source(open_source(resolve(model))).digest
    workers = [await start("both", digest, credentials) for _ in range(number)]
    await asyncio.gather(*(stay_registered(router, worker.info, credentials) for worker, _ in workers))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--router", required=True, metavar="HOST:PORT")
    parser.add_argument("--number", type=int, default=4)
    parser.add_argument("--model", default="default", type=lambda text: text if text == "default" else str(Path(text)))
    given = parser.parse_args()
    asyncio.run(run(given.router, given.number, given.model))
