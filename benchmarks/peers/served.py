"""The engines' servers over HTTP: clients that each wait for their answer, throughput and latencies."""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.http_load import Outcome, Record, Request, closed_loop, connected
from benchmarks.machine import Others
from benchmarks.peers.measures import Measures
from benchmarks.peers.rates import rotated
from benchmarks.serving import Server
from jaxinfer.tokenizer import Tokenizer

PART = "served"
WORD = re.compile(r" [a-z]+")  # what a tokenizer splits at, so that a word's token stays one whatever stands beside it


@dataclass(frozen=True)
class Load:
    """`num_requests` in all, `clients` under way at any time."""

    clients: int
    num_requests: int
    prompt_tokens: int
    new_tokens: int

    @property
    def label(self) -> str:
        return f"{self.clients} client{'s' if self.clients > 1 else ''}"

    def short(self) -> Load:
        return replace(self, num_requests=self.clients, new_tokens=min(self.new_tokens, 8))


@dataclass(frozen=True)
class Served:
    """A running server, the model's name there, and what its requests have beside."""

    server: Server
    model: str
    body: Mapping[str, Any]


def words_of(tokenizer: Tokenizer) -> list[str]:
    """Words of one token each: a text of n of them is n tokens to every engine."""
    return [text for i in range(tokenizer.vocab_size) if WORD.fullmatch(text := tokenizer.decode([i])) and tokenizer.encode(text) == [i]]


def texts(words: Sequence[str], load: Load, seed: int) -> list[str]:
    """A prompt for each request, new with each seed."""
    rng = random.Random(f"{load.clients} {seed}")
    return ["".join(rng.choice(words) for _ in range(load.prompt_tokens)) for _ in range(load.num_requests)]


def measure_served(
    servers: Mapping[str, Served],
    loads: Sequence[Load],
    rounds: int,
    words: Sequence[str],
    measures: Measures,
    lost: dict[str, str],
    others: Others,
    say: Callable[[str], None],
) -> None:
    """An unrecorded short round, then the rounds; every server is stopped but the one that is asked. One that leaves a request
    unanswered goes to `lost`."""
    for number in range(rounds + 1):
        for load in loads:
            for name in rotated(list(servers), number):
                if name in lost:
                    continue
                say(f"{f'round {number} of {rounds}' if number else 'warming up'}: {load.label}, {name}'s server")
                others.look()
                records = _ask(servers[name], load if number else load.short(), words, number)
                if wrong := next((r for r in records if r.outcome is not Outcome.ANSWERED), None):
                    lost[name] = f"served, {load.label}: {wrong.outcome} {wrong.status} {wrong.message}"
                elif number:
                    others.keep()
                    for label, unit, value, is_higher_better in figures(records):
                        measures.add(PART, f"{load.label}: {label}", unit, name, value, is_higher_better=is_higher_better)


def _ask(served: Served, load: Load, words: Sequence[str], seed: int) -> list[Record]:
    about = {"model": served.model, "max_tokens": load.new_tokens, "temperature": 0, "stream": True}
    about |= {"stream_options": {"include_usage": True}, **served.body}
    requests = [Request.of("/v1/completions", {"prompt": text, **about}) for text in texts(words, load, seed)]
    records: list[Record] = []

    async def run() -> None:
        async with connected(served.server.url) as session:
            await closed_loop(session, iter(requests), records, concurrency=load.clients, seconds=math.inf)

    served.server.resume()
    try:
        asyncio.run(run())
    finally:
        served.server.pause()
    return records


def figures(records: Sequence[Record]) -> list[tuple[str, str, float | None, bool]]:
    """Of answered requests: label, unit, value, and whether more of it is better. Where a server doesn't tell how many tokens came, each
    event of its stream that brought text counts as one."""
    for record in records:
        record.output_tokens = record.output_tokens or len(record.arrivals)
    seconds = max(r.ended for r in records) - min(r.sent for r in records)
    ttft = [r.ttft for r in records if r.ttft is not None]
    gaps = [r.time_per_token for r in records if r.time_per_token is not None]
    return [
        ("output", "tokens/s", sum(r.output_tokens or 0 for r in records) / seconds, True),
        ("time to first token, median", "s", _percentile(ttft, 50), False),
        ("time to first token, p99", "s", _percentile(ttft, 99), False),
        ("time per token after it, median", "s", _percentile(gaps, 50), False),
    ]


def _percentile(values: Sequence[float], percent: int) -> float | None:
    return float(np.percentile(values, percent)) if values else None
