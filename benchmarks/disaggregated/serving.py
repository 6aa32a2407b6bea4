"""Two workers of one core each beside one server of two cores: the gaps between tokens while long prompts arrive, and
what the hop costs a first token."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.disaggregated.cluster import WorkerCluster
from benchmarks.http_load import LoadOutcome, LoadRequest, RequestRecord, open_loop, open_session, send
from benchmarks.serving import Server, served_model

COMPLETIONS = "/v1/completions"
FLAGS = ("--kv-memory=1GiB", "--max-batch-size=8", "--decode-buckets=8", "--prefill-chunk-size=256", "--prefill-buckets=256")


@dataclass(frozen=True)
class GapsLoad:
    """Streams that decode all the time, and long prompts that arrive meanwhile. Tokens, seconds."""

    num_streams: int = 4
    stream_tokens: int = 200
    prompt_tokens: int = 1000
    period: float = 1.5  # between two prompts
    seconds: float = 30.0


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


def body(model: str, token_ids: list[int], num_tokens: int) -> LoadRequest:
    fields = {"model": model, "prompt": token_ids, "max_tokens": num_tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    return LoadRequest.of(COMPLETIONS, fields)


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


async def first_tokens(url: str, model: str, lengths: Sequence[int], times: int, seed: int) -> dict[int, float]:
    """The median time to the first token of a prompt that comes alone, by its length."""
    rng = random.Random(seed)
    found = {}
    async with open_session(url) as session:
        for length in lengths:
            records = [await send(session, body(model, prompt(rng, length), 2)) for _ in range(times)]
            check(records)
            found[length] = statistics.median(record.ttft for record in records if record.ttft is not None)
    return found


def check(records: Sequence[RequestRecord]) -> None:
    """Raises `RuntimeError` for an answer that is none: its time would mean nothing."""
    for record in records:
        if record.outcome is not LoadOutcome.ANSWERED:
            raise RuntimeError(f"a request was not answered: {record.outcome}, {record.message}")


def compare_gaps(rounds: int, load: GapsLoad, flags: Sequence[str] = FLAGS) -> str:
    """Alternately, the one that waits stopped. A line a round, and the median of the ratios."""
    lines = [f"{'':8}{'one process, two cores':>32}{'two workers, a core each':>34}{'ratio of p90':>14}"]
    ratios = []
    with Server(flags) as server, WorkerCluster([("prefill", 0), ("decode", 1)], flags, ["--prefill-apart=always"]) as cluster:
        model = served_model(server.url)[0]
        for number in range(rounds + 1):
            cluster.pause()
            server.resume()
            one = asyncio.run(observe_gaps(server.url, model, load, seed=number))
            server.pause()
            cluster.resume()
            two = asyncio.run(observe_gaps(cluster.url, model, load, seed=number))
            if number:  # the first warms up
                ratios.append(two.gap(0.9) / one.gap(0.9))
                cells = [
                    f"p50 {1e3 * way.gap(0.5):5.1f}  p90 {1e3 * way.gap(0.9):6.1f} ms, {way.num_tokens / load.seconds:4.0f} tok/s"
                    for way in (one, two)
                ]
                lines.append(f"round {number} {cells[0]:>32}{cells[1]:>34}{ratios[-1]:>14.2f}")
                times = [f"first token of a long prompt: {statistics.median(way.ttft):.2f} s" for way in (one, two)]
                lines.append(f"        {times[0]:>32}{times[1]:>34}")
    lines.append(f"p90 gap, two workers / one process: {statistics.median(ratios):.2f} (median of {rounds})")
    return "\n".join(lines)


def compare_first_tokens(lengths: Sequence[int], times: int, flags: Sequence[str] = FLAGS) -> str:
    """The same worker core computes the prompt; once it decodes too, once another worker does."""
    found: dict[str, dict[int, float]] = {}
    for name, workers in {"alone": [("both", 0)], "apart": [("prefill", 0), ("decode", 1)]}.items():
        with WorkerCluster(workers, flags, ["--prefill-apart=always"]) as cluster:
            model = served_model(cluster.url)[0]
            asyncio.run(first_tokens(cluster.url, model, lengths, 3, seed=1))
            found[name] = asyncio.run(first_tokens(cluster.url, model, lengths, times, seed=2))
            time.sleep(0.5)
    lines = [f"{'prompt':>8}{'one worker':>14}{'two workers':>14}{'the hop':>12}"]
    for length in lengths:
        alone, apart = (1e3 * found[name][length] for name in ("alone", "apart"))
        lines.append(f"{length:8}{alone:11.1f} ms{apart:11.1f} ms{apart - alone:9.1f} ms")
    return "\n".join(lines)
