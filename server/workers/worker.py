"""A worker's process: its engine behind gRPC, registered with each router for as long as both live."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import grpc
import grpc.aio
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import HealthServicer
from grpc_reflection.v1alpha import reflection

from jaxinfer.config import ConfigError
from jaxinfer.engine import Engine
from jaxinfer.engine.cached_pages import CachedPages
from jaxinfer.engine.fingerprint import fingerprint
from jaxinfer.engine_access import EngineClosedError
from jaxinfer.engine_loop import EngineLoop
from jaxinfer.engine_thread import EngineFailedError
from jaxinfer.kv_transfer.array_transfer import ArrayTransfer
from jaxinfer.kv_transfer.page_client import PageClient
from jaxinfer.kv_transfer.page_coding import LinkCoding
from jaxinfer.kv_transfer.page_server import PageServer
from jaxinfer.kv_transfer.transport_choice import Arrays, TransportChoice
from server.workers import worker_pb2 as pb
from server.workers import worker_pb2_grpc
from server.workers.credentials import Credentials
from server.workers.messages import geometry_text
from server.workers.pull_settings import PullSettings
from server.workers.service import WorkerService, version

logger = logging.getLogger(__name__)

_REFUSALS = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED)
_CERTIFICATE_ERRORS = ("CERTIFICATE_VERIFY_FAILED", "Hostname Verification Check failed")
_FAILURE_SECONDS = 0.1  # between looks
_DRAIN_SECONDS = 1.0  # until every router knows
_RETRY_SECONDS = 0.5  # between attempts to reach a router
_GRACE_SECONDS = 5.0  # for calls under way at the end


class WorkerAddress(NamedTuple):
    """`host`: this machine, as others reach it. Ports of calls and of pages; 0: any that is free."""

    host: str
    port: int = 0
    page_port: int = 0


class CachedForOthers:
    """What an engine's caches have, for the page server. See `CachedSource`."""

    def __init__(self, model: bytes, pages: CachedPages, loop: EngineLoop) -> None:
        self.model, self._pages, self._loop = model, pages, loop

    def read(self, keys: Sequence[bytes]) -> Iterator[np.ndarray]:
        """An engine that has ended, or is about to, has none."""
        with contextlib.suppress(EngineClosedError, EngineFailedError):
            yield from self._pages.read(keys, self._loop.call)


def describe(engine: Engine, role: str, address: str, page_port: int, model_digest: str) -> pb.WorkerInfo:
    """What routers and other workers know a worker by."""
    config = engine.config
    return pb.WorkerInfo(
        worker_id=uuid.uuid4().hex,
        address=address,
        role=role,
        version=version(),
        model=config.model.model,
        model_digest=model_digest,
        tokenizer_digest=engine.tokenizer.digest,
        page_geometry=geometry_text(engine.page_spec),
        page_port=page_port,
        max_model_len=engine.max_model_len,
        max_batch_size=config.schedule.max_batch_size,
        vocab_size=engine.vocab_size,
        sampling_defaults=json.dumps(dict(engine.sampling_defaults)),
        page_size=engine.page_spec.page_size,
        kv_bytes_per_token=engine.page_spec.page_bytes * engine.page_spec.num_groups // engine.page_spec.page_size,
    )


async def serve(
    engine: Engine,
    role: str,
    address: WorkerAddress,
    routers: Sequence[str],
    credentials: Credentials,
    stop: asyncio.Event,
    drain: asyncio.Event,
    ready: Callable[[str], None],
    pulls: PullSettings = PullSettings(),  # noqa: B008 (it is frozen)
) -> None:
    """Serves until `stop`, then ends what is under way; or from `drain` on nothing new, until nothing is left. `ready`
    is told the address once it listens.

    Raises `ConfigError` where a router refuses it, for an address that can't be listened on, and
    for coding that its pages can't have; the engine's error once it has one."""
    loop = EngineLoop(engine)
    digest, bytes_per_value = fingerprint(engine), engine.page_spec.bytes_per_value
    try:
        coding = LinkCoding(pulls.compression, bytes_per_value)
    except ValueError as error:
        raise ConfigError(f"kv_compression is on: {error}") from error
    arrays = _arrays(pulls, address.host)
    pages = _listen_for_pages(address, credentials, CachedForOthers(digest.encode(), engine.cached_pages, loop), bytes_per_value, arrays)
    server = credentials.server()
    try:
        port = credentials.listen(server, f"{address.host}:{address.port}")
    except RuntimeError as error:
        pages.close()
        raise ConfigError(f"can't listen on {address.host} port {address.port}: choose others with --host and --port") from error
    _add_standard_services(server)
    info = describe(engine, role, f"{address.host}:{port}", pages.port, digest)
    client = PageClient(
        token=credentials.token, tls=credentials.page_client_tls, coding=coding, arrays=arrays, choice=TransportChoice(pulls.transport)
    )
    service = WorkerService(engine, loop, info, pages, credentials, client)
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
    await server.start()
    ready(info.address)
    registrations = [asyncio.create_task(stay_registered(router, info, credentials)) for router in routers]
    ends = [asyncio.create_task(stop.wait()), asyncio.create_task(_until_failed(loop)), *registrations]
    ends.append(asyncio.create_task(_until_drained(drain, service)))
    try:
        ended, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            await task  # all but `stop` end by an error only
    finally:
        for task in ends:
            task.cancel()
        await server.stop(_GRACE_SECONDS)
        await service.close()
        pages.close()
        await asyncio.to_thread(loop.close, _GRACE_SECONDS)


async def _until_failed(loop: EngineLoop) -> None:
    """Raises the engine's error, after which it serves nothing: who is gone is asked no more, who fails would be."""
    while loop.failure is None:  # noqa: ASYNC110 - it is set in another thread
        await asyncio.sleep(_FAILURE_SECONDS)
    raise loop.failure


async def _until_drained(drain: asyncio.Event, service: WorkerService) -> None:
    await drain.wait()
    service.drain()
    await asyncio.sleep(_DRAIN_SECONDS)
    while not service.is_idle:  # noqa: ASYNC110 - of what other tasks and threads do
        await asyncio.sleep(_FAILURE_SECONDS)


def _arrays(pulls: PullSettings, host: str) -> Arrays | None:
    """None where pages come and go over the socket only."""
    if not pulls.may_take_arrays:
        return None
    try:
        return ArrayTransfer(host)
    except OSError as error:
        if pulls.transport == "jax":
            raise ConfigError(f"kv_transport is jax: {error}") from error
        logger.warning("%s: pages come and go over the socket only", error)
        return None


def _listen_for_pages(
    address: WorkerAddress, credentials: Credentials, cached: CachedForOthers, bytes_per_value: int, arrays: Arrays | None
) -> PageServer:
    token, tls, port = credentials.token, credentials.page_server_tls, address.page_port
    try:
        return PageServer(address.host, port, token=token, tls=tls, cached=cached, bytes_per_value=bytes_per_value, arrays=arrays)
    except OSError as error:
        raise ConfigError(f"can't listen on {address.host} port {address.page_port}: choose others with --host and --page-port") from error


def _add_standard_services(server: grpc.aio.Server) -> None:
    """Health (grpc.health.v1) and reflection, as tools expect them."""
    names = [service.full_name for service in pb.DESCRIPTOR.services_by_name.values() if service.name == "Worker"]
    health = HealthServicer()
    for name in ("", *names):
        health.set(name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    reflection.enable_server_reflection(
        [*names, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME], server
    )


async def stay_registered(router: str, info: pb.WorkerInfo, credentials: Credentials) -> None:
    """Register again whenever the router has gone. Raises `ConfigError` where it refuses."""
    last_told = None
    async with credentials.channel(router) as channel:
        stub = worker_pb2_grpc.RouterStub(channel)
        while True:
            call = stub.Register(info, metadata=credentials.metadata)
            try:
                async for _ in call:
                    last_told = None
            except grpc.aio.AioRpcError as error:
                if error.code() in _REFUSALS:
                    raise ConfigError(f"router {router} refuses this worker: {error.details()}") from error
                if any(text in str(error.details()) for text in _CERTIFICATE_ERRORS):
                    raise ConfigError(f"router {router} and this worker don't trust each other: {error.details()}") from error
                if error.details() != last_told:
                    last_told = error.details()
                    logger.warning("router %s: %s; trying again", router, last_told)
            finally:
                call.cancel()
            await asyncio.sleep(_RETRY_SECONDS)
