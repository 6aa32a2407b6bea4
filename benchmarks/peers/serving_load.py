"""The engines' servers over HTTP: clients that each wait for their answer; throughput and latencies."""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.http_load import LoadOutcome, LoadRequest, RequestRecord, closed_loop, open_session
from benchmarks.machine import BackgroundLoad
from benchmarks.peers.measures import Measures
from benchmarks.peers.rates import rotate
from benchmarks.serving import Server
from jaxinfer.tokenizer import Tokenizer

PART = "served"
WORD = re.compile(r" [a-z]+")  # tokenizers split here, so that a word's token doesn't depend on its neighbours


@dataclass(frozen=True)
class ClientLoad:
    """`num_requests` in all, `clients` of them active at any time."""

    clients: int
    num_requests: int
    prompt_tokens: int
    new_tokens: int

    @property
    def label(self) -> str:
        return f"{self.clients} client{'s' if self.clients > 1 else ''}"

    def short(self) -> ClientLoad:
        return replace(self, num_requests=self.clients, new_tokens=min(self.new_tokens, 8))


@dataclass(frozen=True)
class RunningServer:
    """A running server, the model's name there, and further parameters of its requests."""

    server: Server
    model: str
    body: Mapping[str, Any]


def vocabulary_words(tokenizer: Tokenizer) -> list[str]:
    """Words of one token each: a text of n of them has n tokens in every engine."""
    return [text for i in range(tokenizer.vocab_size) if WORD.fullmatch(text := tokenizer.decode([i])) and tokenizer.encode(text) == [i]]


def random_texts(words: Sequence[str], load: ClientLoad, seed: int) -> list[str]:
    """A prompt for each request, new with each seed."""
    rng = random.Random(f"{load.clients} {seed}")
    return ["".join(rng.choice(words) for _ in range(load.prompt_tokens)) for _ in range(load.num_requests)]


def measure_served(
    servers: Mapping[str, RunningServer],
    loads: Sequence[ClientLoad],
    rounds: int,
    words: Sequence[str],
    measures: Measures,
    lost: dict[str, str],
    others: BackgroundLoad,
    say: Callable[[str], None],
) -> None:
    """An unrecorded short round, then the rounds. Every server is stopped (SIGSTOP) except the one that is measured.
    One that leaves a request unanswered is added to `lost`."""
    for number in range(rounds + 1):
        for load in loads:
            for name in rotate(list(servers), number):
                if name in lost:
                    continue
                say(f"{f'round {number} of {rounds}' if number else 'warming up'}: {load.label}, {name}'s server")
                others.look()
                records = _ask(servers[name], load if number else load.short(), words, number)
                if wrong := next((r for r in records if r.outcome is not LoadOutcome.ANSWERED), None):
                    lost[name] = f"served, {load.label}: {wrong.outcome} {wrong.status} {wrong.message}"
                elif number:
                    others.keep()
                    for label, unit, value, is_higher_better in figures(records):
                        measures.add(PART, f"{load.label}: {label}", unit, name, value, is_higher_better=is_higher_better)


def _ask(served: RunningServer, load: ClientLoad, words: Sequence[str], seed: int) -> list[RequestRecord]:
    about = {"model": served.model, "max_tokens": load.new_tokens, "temperature": 0, "stream": True}
    about |= {"stream_options": {"include_usage": True}, **served.body}
    requests = [LoadRequest.of("/v1/completions", {"prompt": text, **about}) for text in random_texts(words, load, seed)]
    records: list[RequestRecord] = []

    async def run() -> None:
        async with open_session(served.server.url) as session:
            await closed_loop(session, iter(requests), records, concurrency=load.clients, seconds=math.inf)

    served.server.resume()
    try:
        asyncio.run(run())
    finally:
        served.server.pause()
    return records


def figures(records: Sequence[RequestRecord]) -> list[tuple[str, str, float | None, bool]]:
    """Figures of answered requests: label, unit, value, and whether more is better. Where a server doesn't report the
    number of tokens, each event of its stream with text counts as one."""
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
