"""The requests of a replay. Lengths and rate that are not given follow from what the server can do, measured for some
seconds."""

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

from benchmarks.http_load import LoadOutcome, LoadRequest, RequestRecord, closed_loop, send
from benchmarks.replay_trace import Prompts, Scale, pick
from benchmarks.serving import ServerError, served_model
from jaxinfer.planner.trace import TraceError, TraceRequest, read_trace

LENGTHS = [1 / 2**n for n in range(8)]  # tried from the longest on
FITTING = 0.99  # share of the trace's requests that must fit with a chosen length
PROMPT_SECONDS = 0.5  # time to compute a chosen length's mean prompt, alone
PROBE_TOKENS = 512
TRIED = 64  # requests that a trial cycles through
CONCURRENCY = 32
MIN_ANSWERS = 3


class CalibrationError(RuntimeError):
    """The server didn't answer the trial requests."""


@dataclass(frozen=True, slots=True)
class RequestBuilder:
    """Builds the requests of a replay."""

    model: str
    ignore_eos: bool

    def request(self, tokens: Sequence[int], max_tokens: int) -> LoadRequest:
        body: dict[str, Any] = {"model": self.model, "prompt": list(tokens), "max_tokens": max_tokens, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            body["ignore_eos"] = True  # beyond OpenAI's API; vLLM, SGLang and this server support it
        return LoadRequest("/v1/completions", json.dumps(body).encode())


@dataclass(frozen=True, slots=True)
class Replay:
    """The requests to send, fully determined."""

    request_builder: RequestBuilder
    prompts: Prompts
    requests: list[TraceRequest]
    num_too_long: int  # of the trace's requests, left out

    def schedule(self) -> Iterator[tuple[float, LoadRequest]]:
        first = self.requests[0].timestamp
        for r in self.requests:
            at = (r.timestamp - first) / 1e3 * self.prompts.scale.time
            yield at, self.request_builder.request(self.prompts.tokens(r).tolist(), self.prompts.scale.num_output(r))

    @property
    def seconds(self) -> float:
        return (self.requests[-1].timestamp - self.requests[0].timestamp) / 1e3 * self.prompts.scale.time


async def decide(options: argparse.Namespace, url: str, session: aiohttp.ClientSession, console: Console) -> Replay:
    """Reads the trace, asks the server for its limits, and measures what isn't given. Raises `TraceError`,
    `ServerError`, `CalibrationError`."""
    trace = read_trace(options.trace)
    model, told = await asyncio.to_thread(served_model, url)
    max_model_len = options.max_model_len or told
    if not max_model_len:
        raise ServerError(f"{url} doesn't tell its context's length: give it with --max-model-len")
    low, end = options.token_ids
    request_builder = RequestBuilder(options.model or model, options.ignore_eos)
    # tokens that the replay doesn't have
    trials = Prompts(Scale(options.page_size, 1.0), low, end, options.seed + 2**32)
    length = options.length_scale
    if length is None:
        rate = await prefill_rate(session, request_builder, trials, max_model_len)
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
        rate = options.rate or options.load * await _try(options, session, request_builder, replace(trials, scale=scale), fitting, console)
        requests = pick(fitting, options.num_requests or max(round(options.minutes * 60 * rate), 2), options.pick)
        span = (requests[-1].timestamp - requests[0].timestamp) / 1e3
        time_scale = (len(requests) - 1) / rate / span if span else 1.0
    scale = replace(scale, time=time_scale)
    return Replay(request_builder, replace(trials, scale=scale, salt=options.seed), requests, len(trace) - len(fitting))


async def _try(
    options: argparse.Namespace,
    session: aiohttp.ClientSession,
    request_builder: RequestBuilder,
    prompts: Prompts,
    trace: list[TraceRequest],
    console: Console,
) -> float:
    with console.status(f"a trial of {options.trial_seconds:g} s: as many requests as it takes"):
        reached = await capacity(session, request_builder, prompts, pick(trace, TRIED, options.pick), options.trial_seconds)
    console.print(f"{reached:.2f} requests/s in a trial of {options.trial_seconds:g} s; {options.load:g} of it are sent", highlight=False)
    return reached


async def prefill_rate(session: aiohttp.ClientSession, request_builder: RequestBuilder, prompts: Prompts, max_model_len: int) -> float:
    """Prompt tokens a second, one prompt at a time. Raises `CalibrationError`."""
    length = min(PROBE_TOKENS, max_model_len - 1)
    seconds = []
    for number in range(3):
        tokens = Prompts(Scale(length, 1.0), prompts.low, prompts.high, prompts.salt).tokens(TraceRequest(0, 512, 1, (number,)))
        record = await send(session, request_builder.request(tokens.tolist(), 1))
        seconds.append(_require_success(record).ended - record.sent)
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
    session: aiohttp.ClientSession, request_builder: RequestBuilder, prompts: Prompts, requests: Sequence[TraceRequest], seconds: float
) -> float:
    """Requests a second when as many as fit are active, from the first answer to the last. Raises
    `CalibrationError`."""
    # no round finds another's prompts cached
    fresh = (replace(prompts, salt=prompts.salt + again) for again in itertools.count())
    endless = (request_builder.request(p.tokens(r).tolist(), p.scale.num_output(r)) for p in fresh for r in requests)
    records: list[RequestRecord] = []
    await closed_loop(session, endless, records, concurrency=CONCURRENCY, seconds=seconds, patience=0)
    ended = sorted(_require_success(r).ended for r in records if r.outcome is not LoadOutcome.UNFINISHED)
    if len(ended) < MIN_ANSWERS:
        raise CalibrationError(f"{len(ended)} requests were answered in {seconds:g} s: give --rate, or a smaller --length-scale")
    return (len(ended) - 1) / (ended[-1] - ended[0])


def _require_success(record: RequestRecord) -> RequestRecord:
    if record.outcome is not LoadOutcome.ANSWERED:
        raise CalibrationError(f"the server's answer to a first request: {record.outcome} ({record.status} {record.message})")
    return record
