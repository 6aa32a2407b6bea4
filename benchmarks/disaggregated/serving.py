"""Two workers of one core each beside one server of two cores: the gaps between tokens while long prompts arrive, and
what the hop costs a first token."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.disaggregated.cluster import WorkerCluster
from benchmarks.http_load import LoadOutcome, LoadRequest, RequestRecord, open_loop, open_session, send
from benchmarks.serving import Server, served_model

COMPLETIONS = "/v1/completions"
_EVENTS_SECONDS = 0.3  # after which routers know what a worker has, and a stream is under way
FLAGS = ("--kv-memory=1GiB", "--max-batch-size=8", "--decode-buckets=8")


@dataclass(frozen=True)
class GapsLoad:
    """Streams that decode all the time, and long prompts that arrive meanwhile. Tokens, seconds."""

    num_streams: int = 4
    stream_tokens: int = 64
    prompt_tokens: int = 500
    period: float = 2.0  # between two prompts
    seconds: float = 20.0
    chunk_size: int = 256  # of prefill: the most that a decode step waits for in one process


@dataclass
class ServedGaps:
    """Seconds, of one round."""

    gaps: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)  # of the long prompts
    num_tokens: int = 0

    def gap(self, share: float) -> float:
        return statistics.quantiles(self.gaps, n=100)[round(share * 100) - 1]


def prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(1_000, 31_000) for _ in range(num_tokens)]


def body(model: str, token_ids: list[int], num_tokens: int, **others: Any) -> LoadRequest:
    fields = {"model": model, "prompt": token_ids, "max_tokens": num_tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    return LoadRequest.of(COMPLETIONS, fields | others)


async def observe_gaps(url: str, model: str, load: GapsLoad, seed: int) -> ServedGaps:
    """The gaps of the streams while the prompts arrive."""
    rng, found = random.Random(seed), ServedGaps()
    records: list[RequestRecord] = []
    prompts = [(n * load.period, body(model, prompt(rng, load.prompt_tokens), 2)) for n in range(round(load.seconds / load.period))]
    async with open_session(url) as session:
        arriving = asyncio.create_task(open_loop(session, prompts, records))

        async def keep_streaming() -> None:
            while not arriving.done():
                record = await send(session, body(model, prompt(rng, 32), load.stream_tokens))
                check([record])
                found.gaps += record.gaps
                found.num_tokens += len(record.arrivals)

        await asyncio.gather(arriving, *(keep_streaming() for _ in range(load.num_streams)))
    check(records)
    found.ttft = [record.ttft for record in records if record.ttft is not None]
    return found


async def first_tokens(urls: Sequence[str], model: str, length: int, times: int, seed: int) -> list[list[float]]:
    """The times to the first token of prompts that come alone, by each router in turn: a list a router."""
    rng = random.Random(seed)
    found: list[list[float]] = [[] for _ in urls]
    for _ in range(times):
        for url, ttft in zip(urls, found, strict=True):
            async with open_session(url) as session:
                record = await send(session, body(model, prompt(rng, length), 2))
            check([record])
            assert record.ttft is not None
            ttft.append(record.ttft)
    return found


def check(records: Sequence[RequestRecord]) -> None:
    """Raises `RuntimeError` for an answer that is none: its time would mean nothing."""
    for record in records:
        if record.outcome is not LoadOutcome.ANSWERED:
            raise RuntimeError(f"a request was not answered: {record.outcome}, {record.message}")


def compare_gaps(rounds: int, load: GapsLoad, flags: Sequence[str] = FLAGS) -> str:
    """Alternately, the one that waits stopped. A line a round, and the median of the ratios."""
    flags = [*flags, f"--prefill-chunk-size={load.chunk_size}", f"--prefill-buckets={load.chunk_size}"]
    lines = [f"chunks of {load.chunk_size:4}{'one process of two cores':>58}{'two workers of a core each':>60}"]
    ratios: dict[float, list[float]] = {0.5: [], 0.9: [], 0.99: []}
    with Server(flags) as server, WorkerCluster([("prefill", 0), ("decode", 1)], flags, [["--prefill-apart=always"]]) as cluster:
        model = served_model(server.url)[0]
        for number in range(rounds + 1):
            cluster.pause()
            server.resume()
            one = asyncio.run(observe_gaps(server.url, model, load, seed=number))
            server.pause()
            cluster.resume()
            two = asyncio.run(observe_gaps(cluster.urls[0], model, load, seed=number))
            if number:  # the first warms up
                for share, found in ratios.items():
                    found.append(two.gap(share) / one.gap(share))
                cells = [
                    " ".join(f"p{100 * share:.0f} {1e3 * way.gap(share):5.1f}" for share in ratios)
                    + f" ms, first token {statistics.median(way.ttft):4.2f} s"
                    for way in (one, two)
                ]
                lines.append(f"round {number:8}{cells[0]:>58}{cells[1]:>60}")
    medians = ", ".join(f"p{100 * share:.0f} {statistics.median(found):.2f}" for share, found in ratios.items())
    lines.append(f"gaps, two workers / one process, medians of {rounds} rounds: {medians}")
    return "\n".join(lines)


def compare_first_tokens(lengths: Sequence[int], times: int, flags: Sequence[str] = FLAGS) -> str:
    """One worker does both, or another one prefills: two routers over the same workers, asked in turn."""
    flags = [*flags, "--prefill-chunk-size=64", "--prefill-buckets=16,64"]
    workers, routers = [("prefill", 0), ("both", 1)], [["--prefill-apart=auto"], ["--prefill-apart=always"]]
    lines = [f"{'prompt':>8}{'one worker':>14}{'two workers':>14}{'the hop, median of pairs':>28}"]
    with WorkerCluster(workers, flags, routers) as cluster:
        model = served_model(cluster.urls[0])[0]
        for length in lengths:
            asyncio.run(first_tokens(cluster.urls, model, length, 3, seed=1))
            alone, apart = asyncio.run(first_tokens(cluster.urls, model, length, times, seed=2))
            hop = statistics.median(two - one for one, two in zip(alone, apart, strict=True))
            lines.append(
                f"{length:8}{1e3 * statistics.median(alone):11.1f} ms{1e3 * statistics.median(apart):11.1f} ms{1e3 * hop:25.1f} ms"
            )
    return "\n".join(lines)


async def first_tokens_beside(url: str, model: str, length: int, times: int) -> tuple[list[float], list[float]]:
    """The times to the first token of prompts that one worker has cached, but not the one that has room for them, and
    of new ones in the same place. The first worker decodes meanwhile, and takes one sequence at a time."""
    rng, new, cached = random.Random(f"{length} {times}"), list[float](), list[float]()
    async with open_session(url) as session:
        for _ in range(times):
            known = prompt(rng, length)
            check([await send(session, body(model, known, 2))])
            await asyncio.sleep(_EVENTS_SECONDS)
            busy = asyncio.create_task(send(session, body(model, [*known, *prompt(rng, 4)], 200)))
            await asyncio.sleep(_EVENTS_SECONDS)
            for token_ids, ttft in ((prompt(rng, length), new), (known, cached)):
                record = await send(session, body(model, token_ids, 2, stream_options={"include_usage": True}))
                check([record])
                assert record.ttft is not None
                ttft.append(record.ttft)
                await asyncio.sleep(_EVENTS_SECONDS)
                if bool(record.cached_tokens) != (ttft is cached):
                    raise RuntimeError(f"{record.cached_tokens} tokens were cached: the pages were not fetched")
            if busy.done():
                raise RuntimeError("the sequence that was to keep the first worker busy has ended")
            check([await busy])
    return new, cached


def compare_fetches(lengths: Sequence[int], times: int, flags: Sequence[str] = FLAGS) -> str:
    """A worker computes a prompt, or fetches it from another one's cache."""
    flags = [*flags, "--max-batch-size=1", "--decode-buckets=1", "--prefill-chunk-size=64", "--prefill-buckets=16,64"]
    lines = [f"{'prompt':>8}{'computed':>14}{'fetched':>14}{'fetched / computed, median of pairs':>40}"]
    with WorkerCluster([("both", 0), ("both", 1)], flags) as cluster:
        model = served_model(cluster.urls[0])[0]
        for length in lengths:
            asyncio.run(first_tokens_beside(cluster.urls[0], model, length, 1))
            new, cached = asyncio.run(first_tokens_beside(cluster.urls[0], model, length, times))
            ratio = statistics.median(found / computed for computed, found in zip(new, cached, strict=True))
            lines.append(f"{length:8}{1e3 * statistics.median(new):11.1f} ms{1e3 * statistics.median(cached):11.1f} ms{ratio:40.2f}")
    return "\n".join(lines)
