"""The router in front of workers without a model, all in one process: where requests go, who may take part, what is
lost when a worker or a router is."""

from __future__ import annotations

import asyncio
import io
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import trustme
from rich.console import Console

from benchmarks.disaggregated import fake_worker
from benchmarks.disaggregated.fake_worker import FakeWorker
from jaxinfer.config import ConfigError
from jaxinfer.request import DEFAULT_CONTEXT, OutputDelta, RequestContext, SamplingParams
from jaxinfer.segments import Prompt
from jaxinfer.tokenizer import Tokenizer
from server.backend import Overloaded, Unavailable
from server.cli.top import table
from server.metrics import live_numbers, metrics_text
from server.router.policy import RoutingSettings
from server.router.router_backend import RouterBackend
from server.router.workers import Workers
from server.workers import worker_pb2 as pb
from server.workers.cluster_tls import ClusterTls
from server.workers.credentials import Credentials
from server.workers.worker import stay_registered

SECONDS = 20.0
LONG = Prompt.of_tokens(range(100, 400))


class SmallCluster:
    """Routers and fake workers in this event loop."""

    def __init__(self, tokenizer: Tokenizer, credentials: Credentials = Credentials(), num_routers: int = 1, **settings: Any) -> None:  # noqa: B008
        self.tokenizer, self.credentials, self.settings = tokenizer, credentials, settings
        self.ports = [free_port() for _ in range(num_routers)]
        self.routers: list[RouterBackend] = []
        self.workers: list[FakeWorker] = []
        self.registrations: list[asyncio.Task[None]] = []
        self._servers: list[grpc.aio.Server] = []

    async def __aenter__(self) -> SmallCluster:
        for port in self.ports:
            workers = Workers(self.credentials, self.tokenizer.digest)
            self.routers.append(RouterBackend(workers, self.tokenizer, self.credentials, ("127.0.0.1", port), **self.settings))
            await self.routers[-1].start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self.registrations:
            task.cancel()
        for server in self._servers:
            await server.stop(None)
        for router in self.routers:
            router.abort_all()
            await router.stop()

    async def add(self, role: str, credentials: Credentials | None = None, *, wait: bool = True, **how: Any) -> FakeWorker:
        credentials = credentials or self.credentials
        worker, server = await fake_worker.start(role, self.tokenizer.digest, credentials, **how)
        self.workers.append(worker)
        self._servers.append(server)
        self.registrations += [asyncio.create_task(stay_registered(f"127.0.0.1:{port}", worker.info, credentials)) for port in self.ports]
        if wait:
            await until(lambda: all(router._workers.get(worker.info.worker_id) for router in self.routers))
        return worker

    async def end(self, worker: FakeWorker) -> None:
        """As kill -9 does: its connections break."""
        await self._servers[self.workers.index(worker)].stop(None)

    def ask(
        self, prompt: Prompt = LONG, context: RequestContext = DEFAULT_CONTEXT, router: int = 0, num_tokens: int = 3, n: int = 1
    ) -> AsyncIterator[OutputDelta]:
        params = SamplingParams(max_tokens=num_tokens, n=n)
        return self.routers[router].generate("request", prompt, params, context)

    async def tokens(self, *arguments: Any, **keywords: Any) -> list[int]:
        return [token_id async for delta in self.ask(*arguments, **keywords) for token_id in delta.token_ids]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def until(is_true: Callable[[], object]) -> None:
    async with asyncio.timeout(SECONDS):
        while not is_true():  # noqa: ASYNC110 - of what other tasks do
            await asyncio.sleep(0.01)


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(**fixtures: Any) -> None:
        async def limited() -> None:
            async with asyncio.timeout(3 * SECONDS):
                await test(**fixtures)

        asyncio.run(limited())

    return run


EXPECTED = [1000, 1001, 1002]


@in_a_loop
async def test_a_prompt_goes_where_its_prefix_is(tokenizer: Tokenizer) -> None:
    async with SmallCluster(tokenizer) as cluster:
        workers = [await cluster.add("both") for _ in range(4)]
        assert await cluster.tokens() == EXPECTED
        (first,) = [worker for worker in workers if worker.asked]
        await until(lambda: len(cluster.routers[0]._workers.prefixes))
        for length in (250, 300, 300):
            await cluster.tokens(Prompt.of_tokens(range(100, 100 + length)))
        assert [asked.num_new_tokens for asked in first.asked] == [300, 10, 12, 12]  # whole blocks of 16 are found
        await cluster.tokens(LONG, RequestContext(namespace="another tenant"))
        (stranger,) = [worker for worker in workers if worker.asked and worker is not first]  # one with an empty cache
        assert stranger.asked[0].num_new_tokens == 300, "nobody's prefixes are found by others"
        for worker in (first, stranger):
            for digest in list(worker.events._present):
                worker.events.evicted(digest)
        await until(lambda: not len(cluster.routers[0]._workers.prefixes))


@in_a_loop
async def test_what_a_busy_worker_has_another_fetches(tokenizer: Tokenizer) -> None:
    """One of the same page size; pages of other sizes are not asked for."""
    async with SmallCluster(tokenizer) as cluster:
        busy = await cluster.add("both", token_seconds=0.02)
        await cluster.tokens()
        await until(lambda: len(cluster.routers[0]._workers.prefixes))
        free, other = await cluster.add("both"), await cluster.add("decode", page_size=8)
        known = cluster.routers[0]._workers.get(busy.info.worker_id)
        assert known is not None
        known.info.page_port = 1234
        work = [known.given.begin(0, num_sequences=1) for _ in range(1000)]
        await cluster.tokens()
        (asked,) = free.asked
        assert asked.prefix_address == "127.0.0.1:1234"
        assert (asked.num_prefix_tokens, asked.num_new_tokens) == (288, 12)
        for part in work:
            part.end()
        await cluster.tokens()
        (last,) = busy.asked[1:] + free.asked[1:]
        assert not last.HasField("prefix_address") and not other.asked, "whoever has it fetches nothing"


@in_a_loop
async def test_a_session_stays_with_its_worker(tokenizer: Tokenizer) -> None:
    async with SmallCluster(tokenizer) as cluster:
        workers = [await cluster.add("both") for _ in range(3)]
        for number in range(6):
            await cluster.tokens(Prompt.of_tokens(range(number * 50, number * 50 + 40)), RequestContext(session="mine"))
        assert sorted(len(worker.asked) for worker in workers) == [0, 0, 6]


@in_a_loop
async def test_prefill_apart_names_the_worker_and_a_role_changes_without_a_break(tokenizer: Tokenizer) -> None:
    async with SmallCluster(tokenizer, routing=RoutingSettings(always_apart=True)) as cluster:
        prefill, decode = await cluster.add("prefill"), await cluster.add("decode", token_seconds=0.01)
        assert cluster.routers[0].is_ready()
        stream = cluster.ask(num_tokens=100)
        found = list((await anext(stream)).token_ids)
        assert decode.asked[0].prefill_address == prefill.info.address
        for worker, role in ((decode, "prefill"), (prefill, "decode")):
            async with cluster.credentials.channel(worker.info.address) as channel:
                await fake_worker.worker_pb2_grpc.WorkerStub(channel).SetRole(pb.RoleRequest(role=role))
        await until(
            lambda: (
                {worker.view().role for worker in cluster.routers[0]._workers.all if worker.info.address == prefill.info.address}
                == {"decode"}
            )
        )
        await asyncio.sleep(0.3)
        found += [token_id async for delta in stream for token_id in delta.token_ids]
        assert found == list(range(1000, 1100)) and cluster.routers[0].num_migrations == 0
        await cluster.tokens()
        assert prefill.asked[-1].prefill_address == decode.info.address


@in_a_loop
async def test_a_stream_goes_on_from_the_tokens_that_the_client_has(tokenizer: Tokenizer) -> None:
    async with SmallCluster(tokenizer) as cluster:
        first, second = await cluster.add("both", token_seconds=0.01), await cluster.add("both", token_seconds=0.01)
        stream = cluster.ask(num_tokens=60)
        found = [token_id for _ in range(20) for token_id in (await anext(stream)).token_ids]
        worker, other = (first, second) if first.asked else (second, first)
        await cluster.end(worker)
        found += [token_id async for delta in stream for token_id in delta.token_ids]
        assert found == list(range(1000, 1060))
        assert list(other.asked[0].output_token_ids) == found[: len(other.asked[0].output_token_ids)]
        assert 20 <= len(other.asked[0].output_token_ids) < 60
        await until(lambda: len(cluster.routers[0]._workers.all) == 1)


@in_a_loop
async def test_two_routers_share_workers_and_one_may_end(tokenizer: Tokenizer) -> None:
    async with SmallCluster(tokenizer, num_routers=2) as cluster:
        await cluster.add("both", token_seconds=0.01)
        streams = [cluster.ask(router=number, num_tokens=50) for number in range(2)]
        found = [list((await anext(stream)).token_ids) for stream in streams]
        await cluster.routers[1]._server.stop(None)  # type: ignore[union-attr]
        await streams[1].aclose()  # type: ignore[attr-defined]
        found[0] += [token_id async for delta in streams[0] for token_id in delta.token_ids]
        assert found[0] == list(range(1000, 1050))
        assert await cluster.tokens() == EXPECTED


@in_a_loop
async def test_too_much_and_too_few(tokenizer: Tokenizer) -> None:
    async with SmallCluster(tokenizer, max_queue_size=1, wait_seconds=0.2) as cluster:
        with pytest.raises(Unavailable, match="no worker is left"):
            await cluster.tokens()
        await cluster.add("both", delay=0.3)
        with pytest.raises(Overloaded):
            await cluster.tokens(n=66)  # 64 places and one to wait
        assert len(await cluster.tokens(n=65)) == 65 * 3
        await cluster.end(cluster.workers[0])
        with pytest.raises(Unavailable, match="no worker is left"):
            await cluster.tokens()


@in_a_loop
async def test_what_is_known_of_the_workers_is_shown(tokenizer: Tokenizer) -> None:
    async with SmallCluster(tokenizer) as cluster:
        first, second = await cluster.add("prefill"), await cluster.add("both")
        await cluster.tokens()
        found = cluster.routers[0].cluster()
        assert {(worker.address, worker.role) for worker in found.workers} == {
            (first.info.address, "prefill"),
            (second.info.address, "both"),
        }
        assert sum(found.num_routed.values()) == 1 and found.num_migrations == 0
        stats = cluster.routers[0].stats()
        text = metrics_text(stats, {}, {}, None, found)[0].decode()
        assert f'jaxinfer_worker_running_sequences{{role="both",worker="{second.info.address}"}} 0.0' in text
        assert "jaxinfer_migrated_sequences_total 0.0" in text and "jaxinfer_routed_sequences_total{reason=" in text
        console = Console(width=160, record=True, file=io.StringIO())
        numbers = live_numbers(stats, found)
        console.print(table(numbers, numbers, 1.0))
        shown = console.export_text()
        assert first.info.address in shown and "migrations 0" in shown
        console.print(table(live_numbers(stats), live_numbers(stats), 1.0))
        assert "this server" in console.export_text()


@in_a_loop
async def test_who_is_refused(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    async with SmallCluster(tokenizer, Credentials("secret")) as cluster:
        await cluster.add("both")

        async def refused(worker: FakeWorker, credentials: Credentials = cluster.credentials) -> str:
            with pytest.raises(ConfigError) as caught:
                await stay_registered(f"127.0.0.1:{cluster.ports[0]}", worker.info, credentials)
            return str(caught.value)

        assert "wrong token" in await refused(cluster.workers[0], Credentials("guess"))
        for field, value, said in (
            ("model_digest", "another", "model_digest"),
            ("version", "0.0", "version"),
            ("tokenizer_digest", "another", "same --model"),
        ):
            stranger, server = await fake_worker.start("both", tokenizer.digest, cluster.credentials)
            setattr(stranger.info, field, value)
            assert said in await refused(stranger)
            await server.stop(None)
        # One that can't be reached: it is told, again and again, and gets no request.
        hidden = FakeWorker(pb.WorkerInfo(worker_id="hidden", tokenizer_digest=tokenizer.digest))
        hidden.info.MergeFrom(cluster.workers[0].info)
        hidden.info.worker_id, hidden.info.address = "hidden", f"127.0.0.1:{free_port()}"
        task = asyncio.create_task(stay_registered(f"127.0.0.1:{cluster.ports[0]}", hidden.info, cluster.credentials))
        await until(lambda: "can't reach this worker at" in caplog.text)
        assert len(cluster.routers[0]._workers.all) == 1
        task.cancel()


@asynccontextmanager
async def tls_cluster(tokenizer: Tokenizer, tls: ClusterTls) -> AsyncIterator[SmallCluster]:
    async with SmallCluster(tokenizer, Credentials("", tls)) as cluster:
        yield cluster


def pair(authority: trustme.CA, folder: Path, name: str, trusted: trustme.CA | None = None) -> ClusterTls:
    folder.mkdir(exist_ok=True)
    issued = authority.issue_cert(name)
    paths = [str(folder / part) for part in ("certificate.pem", "key.pem", "authority.pem")]
    issued.cert_chain_pems[0].write_to_path(paths[0])
    issued.private_key_pem.write_to_path(paths[1])
    (trusted or authority).cert_pem.write_to_path(paths[2])
    return ClusterTls(*paths)


@in_a_loop
async def test_certificates_on_both_sides(tokenizer: Tokenizer, tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    async with tls_cluster(tokenizer, pair(authority, tmp_path / "all", "127.0.0.1")) as cluster:
        await cluster.add("both")
        assert await cluster.tokens() == EXPECTED
        router = f"127.0.0.1:{cluster.ports[0]}"

        async def outcome(tls: ClusterTls | None) -> Awaitable[None] | None:
            async with asyncio.timeout(1.0):
                return await stay_registered(router, cluster.workers[0].info, Credentials("", tls))

        other = pair(stranger, tmp_path / "other", "127.0.0.1")
        with pytest.raises(ConfigError, match="don't trust each other"):  # its own authority only
            await outcome(other)
        for wrong in (None, pair(stranger, tmp_path / "shown", "127.0.0.1", trusted=authority)):
            with pytest.raises(TimeoutError):  # the router closes: nothing tells why
                await outcome(wrong)
        assert len(cluster.routers[0]._workers.all) == 1
    async with tls_cluster(tokenizer, pair(authority, tmp_path / "named", "router.example")) as cluster:
        with pytest.raises(ConfigError, match="don't trust each other"):
            await stay_registered(f"127.0.0.1:{cluster.ports[0]}", pb.WorkerInfo(), cluster.credentials)


def test_files_that_are_no_pair(tmp_path: Path) -> None:
    first = pair(trustme.CA(), tmp_path / "first", "127.0.0.1")
    second = pair(trustme.CA(), tmp_path / "second", "127.0.0.1")
    with pytest.raises(ConfigError, match="the key that of the certificate"):
        ClusterTls(first.certificate, second.key, first.authority)
    with pytest.raises(ConfigError, match="cluster_key is 'nowhere', which can't be read"):
        ClusterTls(first.certificate, "nowhere", first.authority)
