"""What a replay sends. Lengths and rate that nobody gave are chosen by what the server can do, found by trying for some seconds."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
from rich.console import Console

from benchmarks.http_load import Outcome, Record, Request, closed_loop, send
from benchmarks.replay_trace import Prompts, Scale, pick
from benchmarks.serving import ServerError, served_model
from jaxinfer.dry_run.trace import TraceError, TraceRequest, read_trace

LENGTHS = [1 / 2**n for n in range(8)]  # tried from the longest on
FITTING = 0.99  # share of the trace's requests that a chosen length must leave short enough
PROMPT_SECONDS = 0.5  # a chosen length's mean prompt is computed in that, alone
PROBE_TOKENS = 512
TRIED = 64  # requests that a trial takes turns with
CONCURRENCY = 32
MIN_ANSWERS = 3


class CalibrationError(RuntimeError):
    """The server didn't answer what it was tried with."""


@dataclass(frozen=True, slots=True)
class Asker:
    """Makes the requests of a replay."""

    model: str
    ignore_eos: bool

    def request(self, tokens: Sequence[int], max_tokens: int) -> Request:
        body: dict[str, Any] = {"model": self.model, "prompt": list(tokens), "max_tokens": max_tokens, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            body["ignore_eos"] = True  # beyond OpenAI's API; vLLM, SGLang and this server know it
        return Request("/v1/completions", json.dumps(body).encode())


@dataclass(frozen=True, slots=True)
class Replay:
    """What is sent, all of it decided."""

    asker: Asker
    prompts: Prompts
    requests: list[TraceRequest]
    num_too_long: int  # of the trace's requests, left out

    def schedule(self) -> Iterator[tuple[float, Request]]:
        first = self.requests[0].timestamp
        for r in self.requests:
            at = (r.timestamp - first) / 1e3 * self.prompts.scale.time
            yield at, self.asker.request(self.prompts.tokens(r).tolist(), self.prompts.scale.num_output(r))

    @property
    def seconds(self) -> float:
        return (self.requests[-1].timestamp - self.requests[0].timestamp) / 1e3 * self.prompts.scale.time


async def decide(options: argparse.Namespace, url: str, session: aiohttp.ClientSession, console: Console) -> Replay:
    """Read the trace, look at the server, try what isn't given. Raises `TraceError`, `ServerError`, `CalibrationError`."""
    trace = read_trace(options.trace)
    model, told = await asyncio.to_thread(served_model, url)
    max_model_len = options.max_model_len or told
    if not max_model_len:
        raise ServerError(f"{url} doesn't tell its context's length: give it with --max-model-len")
    low, end = options.token_ids
    asker = Asker(options.model or model, options.ignore_eos)
    trials = Prompts(Scale(options.page_size, 1.0), low, end, options.seed + 2**32)  # tokens that the replay doesn't have
    length = options.length_scale
    if length is None:
        rate = await prefill_rate(session, asker, trials, max_model_len)
        length = choose_length(trace, options.page_size, max_model_len, rate)
        console.print(f"{rate:,.0f} prompt tokens/s alone: lengths times 1/{1 / length:g}", highlight=False)
    scale = Scale.of(float(length), options.page_size, None if options.output_scale is None else float(options.output_scale))
    fitting = [r for r in trace if scale.fits(r, max_model_len)]
    if not fitting:
        raise TraceError(f"no request of the trace fits {max_model_len} tokens: give a smaller --length-scale")
    if options.time_scale is not None:
        last = fitting[0].timestamp + options.minutes * 60e3 / options.time_scale
        within = [r for r in fitting if r.timestamp <= last]
        requests, time_scale = pick(within, options.num_requests or len(within), options.pick), options.time_scale
    else:
        rate = options.rate or options.load * await _try(options, session, asker, replace(trials, scale=scale), fitting, console)
        requests = pick(fitting, options.num_requests or max(round(options.minutes * 60 * rate), 2), options.pick)
        span = (requests[-1].timestamp - requests[0].timestamp) / 1e3
        time_scale = (len(requests) - 1) / rate / span if span else 1.0
    scale = replace(scale, time=time_scale)
    return Replay(asker, replace(trials, scale=scale, salt=options.seed), requests, len(trace) - len(fitting))


async def _try(
    options: argparse.Namespace, session: aiohttp.ClientSession, asker: Asker, prompts: Prompts, trace: list[TraceRequest], console: Console
) -> float:
    with console.status(f"a trial of {options.trial_seconds:g} s: as many requests as it takes"):
        reached = await capacity(session, asker, prompts, pick(trace, TRIED, options.pick), options.trial_seconds)
    console.print(f"{reached:.2f} requests/s in a trial of {options.trial_seconds:g} s; {options.load:g} of it are sent", highlight=False)
    return reached


async def prefill_rate(session: aiohttp.ClientSession, asker: Asker, prompts: Prompts, max_model_len: int) -> float:
    """Prompt tokens a second, one prompt at a time. Raises `CalibrationError`."""
    length = min(PROBE_TOKENS, max_model_len - 1)
    seconds = []
    for number in range(3):
        tokens = Prompts(Scale(length, 1.0), prompts.low, prompts.high, prompts.salt).tokens(TraceRequest(0, 512, 1, (number,)))
        record = await send(session, asker.request(tokens.tolist(), 1))
        seconds.append(_checked(record).ended - record.sent)
    return length / statistics.median(seconds)


def choose_length(trace: Sequence[TraceRequest], page_size: int, max_model_len: int, prefill_rate: float) -> float:
    """The longest of `LENGTHS` that fits the server's context and speed; one page a block where none does."""
    mean = statistics.mean(request.input_length for request in trace)
    for length in LENGTHS:
        scale = Scale.of(length, page_size)
        is_fitting = sum(scale.fits(request, max_model_len) for request in trace) >= FITTING * len(trace)
        if is_fitting and mean * scale.length <= PROMPT_SECONDS * prefill_rate:
            return scale.length
    return Scale.of(0, page_size).length


async def capacity(
    session: aiohttp.ClientSession, asker: Asker, prompts: Prompts, requests: Sequence[TraceRequest], seconds: float
) -> float:
    """Requests a second when as many as fit are under way, from the first answer to the last. Raises `CalibrationError`."""
    fresh = (replace(prompts, salt=prompts.salt + again) for again in itertools.count())  # no round finds another's prompts cached
    endless = (asker.request(p.tokens(r).tolist(), p.scale.num_output(r)) for p in fresh for r in requests)
    records: list[Record] = []
    await closed_loop(session, endless, records, concurrency=CONCURRENCY, seconds=seconds, patience=0)
    ended = sorted(_checked(r).ended for r in records if r.outcome is not Outcome.UNFINISHED)
    if len(ended) < MIN_ANSWERS:
        raise CalibrationError(f"{len(ended)} requests were answered in {seconds:g} s: give --rate, or a smaller --length-scale")
    return (len(ended) - 1) / (ended[-1] - ended[0])


def _checked(record: Record) -> Record:
    if record.outcome is not Outcome.ANSWERED:
        raise CalibrationError(f"the server's answer to a first request: {record.outcome} ({record.status} {record.message})")
    return record
