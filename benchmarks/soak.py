"""`python -m benchmarks.soak --minutes N`: a server under overload, from clients that send errors and disconnect.

First it keeps as many requests active as the server accepts (closed loop): its capacity. Then requests alternate
between that rate and a multiple of it, whatever becomes of those before (open loop). In the end everything is answered
or refused, and the checks run. Exits with 1 when a check is not met.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import random
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console

from benchmarks import soak_checks as checks
from benchmarks.http_load import LoadOutcome, LoadRequest, RequestRecord, closed_loop, open_loop, open_session, send
from benchmarks.machine import machine
from benchmarks.replay_report import markdown, percentiles, table
from benchmarks.serving import Server, ServerError, served_model
from benchmarks.soak_checks import Phase, SoakCheck
from benchmarks.soak_monitor import ServerMonitor, ServerSample
from benchmarks.soak_plot import draw
from benchmarks.soak_traffic import COMPLETIONS, SentRequest, SoakTraffic
from benchmarks.worker import ROOT

RESULTS = ROOT / "benchmarks/results"
# Little memory and a short queue, so that preemption and refusals occur within minutes.
FLAGS = "--max-model-len 1024 --kv-memory 192MiB --max-queue-size 64 --max-body-size 1MiB"
MAX_BODY_BYTES = 2**20
FULL = 0.2  # share of the time in which the capacity is measured
ROUND_MINUTES = 2.5  # about the length of one round of capacity and overload
OVERLOADED = 0.6  # share of a round that is overload
Loads = Sequence[tuple[float, float]]  # load, as a multiple of the capacity, and seconds
VERDICTS = {True: "met", False: "NOT MET", None: "not judged"}
CONCURRENCY = 56  # of the closed loop: more than are decoded at once, fewer than may wait


@dataclass(frozen=True, slots=True)
class Result:
    pairs: list[tuple[SentRequest, RequestRecord]]
    phases: list[Phase]
    samples: list[ServerSample]
    checks: list[SoakCheck]
    metrics: dict[str, float]
    capacity: float  # requests/s
    num_missed: int  # samples that the server was too slow for


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", allow_abbrev=False, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="how long there is load (default: %(default)s)")
    parser.add_argument("--overload", type=float, default=3.0, help="the multiple of the capacity (default: %(default)s)")
    parser.add_argument("--serve", default=FLAGS, metavar="FLAGS", help="of `jaxinfer serve` (default: %(default)s)")
    parser.add_argument("--patience", type=float, default=180.0, help="seconds for the last answers (default: %(default)s)")
    parser.add_argument(
        "--token-ids", type=int, nargs=2, default=(1_000, 31_000), metavar=("LOW", "END"), help="prompts' tokens (default: 1000 31000)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is sent")
    parser.add_argument(
        "--output", type=Path, help="where the JSON goes, .md and .png beside it; benchmarks/results/soak-<date>.json if not given"
    )
    return parser.parse_args(arguments)


def plan(seconds: float, overload: float) -> tuple[float, list[tuple[float, float]]]:
    """Seconds of the closed loop, then load and seconds of each phase of the open one."""
    turns = max(1, round(seconds / 60 / ROUND_MINUTES))
    turn = (1 - FULL) * seconds / turns
    return FULL * seconds, [(1.0, (1 - OVERLOADED) * turn), (overload, OVERLOADED * turn)] * turns


class Sender:
    """Sends a traffic's requests and remembers them; the records come in the same order."""

    def __init__(self, supply: Iterator[SentRequest]) -> None:
        self._supply = supply
        self._sent: list[SentRequest] = []
        self._records: list[RequestRecord] = []

    def _next(self) -> LoadRequest:
        self._sent.append(next(self._supply))
        return self._sent[-1].request

    async def fill(self, session: aiohttp.ClientSession, seconds: float, patience: float) -> None:
        """Keeps `concurrency` requests active for `seconds`; then waits for those."""
        endless = iter(self._next, None)
        await closed_loop(session, endless, self._records, concurrency=CONCURRENCY, seconds=seconds, patience=patience)

    async def press(self, session: aiohttp.ClientSession, loads: Loads, capacity: float, patience: float, rng: random.Random) -> None:
        """Sends requests at random times (Poisson) at each load's multiple of the capacity; then waits for them."""

        def schedule() -> Iterator[tuple[float, LoadRequest]]:
            at = end = 0.0
            for load, seconds in loads:
                end += seconds
                while (at := at + rng.expovariate(load * capacity)) < end:
                    yield at, self._next()
                at = end

        await open_loop(session, schedule(), self._records, patience)

    def ended_per_second(self, seconds: float) -> float:
        """Of the last `seconds` seconds; refused requests cost the server nothing."""
        start = time.perf_counter() - seconds
        return sum(r.ended >= start and r.outcome is not LoadOutcome.REFUSED for r in self._records) / seconds

    @property
    def pairs(self) -> list[tuple[SentRequest, RequestRecord]]:
        return list(zip(self._sent, self._records, strict=True))


async def soak(url: str, pid: int, options: argparse.Namespace, console: Console) -> Result:
    """The load and, after it, the checks; the server still runs."""
    model, max_model_len = await asyncio.to_thread(served_model, url)
    low, end = options.token_ids
    supply = iter(SoakTraffic(model, max_model_len or 1024, MAX_BODY_BYTES, (low, end), options.seed))
    body = {"model": model, "prompt": list(range(low, low + 40)), "max_tokens": 32, "temperature": 0, "ignore_eos": True}
    fixed = LoadRequest.of(COMPLETIONS, body)
    filling, pressing = Sender(supply), Sender(supply)
    async with open_session(url) as session:
        before = await send(session, fixed)
        watch = ServerMonitor(session, pid)
        first = await watch.sample()
        async with watch.monitoring():
            capacity, phases = await _load(session, watch, filling, pressing, options, console)
        await watch.until_idle(options.patience)
        after = await send(session, fixed)
        last = await watch.until_idle(options.patience)
    pairs = filling.pairs + pressing.pairs
    verdicts = [
        checks.memory_check(watch.samples, phases),
        checks.page_check(last),
        checks.answer_check(pairs, watch.metrics),
        checks.overload_check(watch.samples, phases, options.overload, os.cpu_count() or 1),
        checks.compilation_check(last),
        checks.same_answer_check(before, after),
        checks.handle_check(first, last),
    ]
    return Result(pairs, phases, watch.samples, verdicts, watch.metrics, capacity, watch.num_missed)


async def _load(
    session: aiohttp.ClientSession, watch: ServerMonitor, filling: Sender, pressing: Sender, options: argparse.Namespace, console: Console
) -> tuple[float, list[Phase]]:
    """The capacity in requests/s, and the phases, once everything has ended."""
    full, loads = plan(options.minutes * 60, options.overload)
    console.print(f"{full:.0f} s of as many requests as it takes", highlight=False)
    start = watch.now()
    phases = [Phase(None, start, start + full)]
    async with asyncio.TaskGroup() as group:
        # Its last requests may wait as long as those after them: a lower tier's do while there is more of the others
        # than fits.
        group.create_task(filling.fill(session, full, sum(seconds for _, seconds in loads) + options.patience))
        await asyncio.sleep(full)
        capacity = max(filling.ended_per_second((1 - checks.SETTLING) * full), 1 / full)
        console.print(f"{capacity:.2f} requests/s; then {_describe(loads)}", highlight=False)
        start = watch.now()
        for load, seconds in loads:
            phases.append(Phase(load, start, start + seconds))
            start += seconds
        await pressing.press(session, loads, capacity, options.patience, random.Random(options.seed))
    return capacity, phases


def _describe(loads: Loads) -> str:
    return ", ".join(f"{seconds:.0f} s at {load:g}x" for load, seconds in loads[:2]) + f", {len(loads) // 2} times"


def outcomes(pairs: Sequence[tuple[SentRequest, RequestRecord]]) -> dict[str, dict[str, int]]:
    """The number of each outcome by kind of request."""
    found: dict[str, Counter[str]] = {}
    for sent, record in pairs:
        found.setdefault(sent.kind, Counter())[f"{record.outcome}{f' {record.status}' if record.status not in (0, 200) else ''}"] += 1
    return {kind: dict(counts.most_common()) for kind, counts in sorted(found.items())}


def by_tier(pairs: Sequence[tuple[SentRequest, RequestRecord]]) -> dict[str, dict[str, Any]]:
    """Streams by the requested service tier: how many were sent and refused, and the time to first token of those
    answered, in seconds."""
    found: dict[str, list[RequestRecord]] = {}
    for sent, record in pairs:
        if sent.kind in ("stream", "chat stream"):
            found.setdefault(sent.tier or "default", []).append(record)
    return {
        tier: {
            "sent": len(records),
            "refused": sum(r.outcome is LoadOutcome.REFUSED for r in records),
            "ttft": percentiles([r.ttft for r in records if r.outcome is LoadOutcome.ANSWERED and r.ttft is not None]),
        }
        for tier, records in sorted(found.items())
    }


def as_json(result: Result, options: argparse.Namespace, date: str) -> dict[str, Any]:
    return {
        "date": date,
        "machine": machine(),
        "settings": {"minutes": options.minutes, "overload": options.overload, "serve": options.serve, "seed": options.seed},
        "checks": [asdict(check) for check in result.checks],
        "capacity_requests_per_second": result.capacity,
        "output_tokens_per_second": checks.medians(result.samples, result.phases, lambda s: s.output_tokens),
        "phases": [asdict(p) | {"name": p.name} | _rates(result.samples, p) for p in result.phases],
        "outcomes": outcomes(result.pairs),
        "wrong": [{"kind": s.kind, **_ended(s, r)} for s, r in result.pairs if not s.is_right(r)][:20],
        "by_tier": by_tier(result.pairs),
        "samples_missed": result.num_missed,
        "samples": {f.name: [round(getattr(s, f.name), 3) for s in result.samples] for f in fields(ServerSample)},
        "metrics": {name: value for name, value in result.metrics.items() if "_bucket" not in name},
    }


def _rates(samples: Sequence[ServerSample], phase: Phase) -> dict[str, float | None]:
    return {
        "output_tokens_per_second": checks.throughput(samples, phase),
        "prompt_tokens_per_second": checks.rate(samples, phase, lambda s: s.prompt_tokens),
        "server_cores": checks.rate(samples, phase, lambda s: s.server_cpu),
        "other_cores": checks.rate(samples, phase, lambda s: s.other_cpu),
    }


def _ended(sent: SentRequest, record: RequestRecord) -> dict[str, Any]:
    body = sent.request.body[:200].decode(errors="replace")
    return {"body": body, "outcome": record.outcome, "status": record.status, "code": record.code, "message": record.message}


def write(result: Result, options: argparse.Namespace, console: Console) -> None:
    """Prints the table, and writes the files."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    output = (options.output or RESULTS / f"soak-{date}.json").with_suffix(".json")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(as_json(result, options, date)) + "\n", encoding="utf-8")
    title = f"{options.minutes:g} minutes, {len(result.pairs):,} requests, {result.capacity:.1f}/s of them at full load"
    lines = [(c.name, VERDICTS[c.is_met], c.figure, c.limit) for c in result.checks]
    heads = ("", "", "measured", "must be")
    console.print(table(title, lines, heads))
    output.with_suffix(".md").write_text(f"{title} ({date})\n\n{markdown(table('', lines, heads))}", encoding="utf-8")
    draw(output.with_suffix(".png"), title, result.phases, result.samples, [r for _, r in result.pairs])
    console.print(f"written to {output}, .md and .png", highlight=False, soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    console = Console()
    try:
        console.print("starting the server", highlight=False)
        with Server(shlex.split(options.serve)) as server:
            result = asyncio.run(soak(server.url, server.pid, options, console))
            result.checks.append(checks.end_check(server.end()))
            result.checks.append(checks.log_check(server.log()))
    except (ServerError, OSError, aiohttp.ClientError) as error:
        sys.exit(f"soak: error: {error}")
    write(result, options, console)
    sys.exit(1 if any(check.is_met is False for check in result.checks) else 0)


if __name__ == "__main__":
    main()
