"""`python -m benchmarks.replay`: a real service's trace against this server or any other with OpenAI's API.

Requests are sent at their times whatever became of those before (an open loop). The trace's lengths and times are
scaled to what the server can do, and prompts share tokens where the trace's prompts did. Writes JSON, a table
(Markdown) and a plot (PNG).
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import random
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.guidellm_replay import GUIDELLM, GuidellmError, replay_with_guidellm
from benchmarks.http_load import LoadOutcome, RequestRecord, base_url, open_loop, open_session
from benchmarks.machine import machine
from benchmarks.replay_plan import CalibrationError, Replay, decide
from benchmarks.replay_plot import draw
from benchmarks.replay_report import IdealHits, LatencyTarget, ideal_hits, markdown, rows, summarize, table
from benchmarks.replay_trace import pages_of
from benchmarks.serving import Server, ServerError
from benchmarks.worker import ROOT
from checkpoints.source import CheckpointError
from jaxinfer.planner.trace import TraceError

RESULTS = ROOT / "benchmarks/results"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", allow_abbrev=False, description=(__doc__ or "").splitlines()[0])
    flag = parser.add_argument
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="a running server; its key, where it wants one, in OPENAI_API_KEY")
    where.add_argument(
        "--serve", nargs="?", const="", metavar="FLAGS", help="start this engine's server with these flags: --serve='--max-batch-size 16'"
    )
    flag("--trace", type=Path, required=True, help="Mooncake's JSON lines, or Azure's CSV (TIMESTAMP,ContextTokens,GeneratedTokens)")
    flag("--model", help="name to ask for; the first one served if not given")
    flag("--max-model-len", type=int, help="the server's context in tokens, where it doesn't tell")
    flag(
        "--length-scale",
        type=Fraction,
        help="such as 1/32, made whole pages a block; what fits the server's context and speed if not given",
    )
    flag("--output-scale", type=Fraction, help="of output lengths, where it differs")
    flag("--rate", type=float, help="mean requests/s, by stretching or shrinking the trace's times")
    flag("--time-scale", type=float, help="the factor on the trace's times, in place of --rate")
    flag(
        "--load",
        type=float,
        default=0.7,
        help="where neither is given: the rate, as a share of what a short trial reaches (default: %(default)s)",
    )
    flag("--minutes", type=float, default=3.0, help="how long requests are sent, by their number (default: %(default)s)")
    flag("--num-requests", type=int, help="how many, in place of --minutes")
    flag(
        "--pick",
        choices=("sessions", "first"),
        default="sessions",
        help="whole conversations from all over the trace, or its beginning (default: %(default)s)",
    )
    flag("--target-ttft", type=float, default=2.0, help="seconds to the first token for a request to be good (default: %(default)s)")
    flag("--target-itl", type=float, default=0.2, help="seconds a token after it, on average (default: %(default)s)")
    flag("--page-size", type=int, default=16, help="tokens a page of the server's cache (default: %(default)s)")
    flag(
        "--token-ids",
        type=int,
        nargs=2,
        default=(1_000, 31_000),
        metavar=("LOW", "END"),
        help="prompts' tokens are from these (default: 1000 31000)",
    )
    flag(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="ask for exactly the trace's output lengths (default: on)"
    )
    flag("--trial-seconds", type=float, default=20.0, help="length of the trial (default: %(default)s)")
    flag("--patience", type=float, default=600.0, help="seconds for the last answers after the last request (default: %(default)s)")
    flag("--seed", type=int, help="of the prompts' tokens; new in every run if not given, so that no cache knows them")
    flag(
        "--guidellm",
        type=Path,
        default=GUIDELLM,
        help="then replays the same and its report is kept too (default: %(default)s, where it is)",
    )
    flag("--no-guidellm", dest="guidellm", action="store_const", const=None, help="only our own measurement")
    flag("--tokenizer", default="default", metavar="MODEL", help="whose tokenizer guidellm uses, as for `jaxinfer serve --model`")
    flag("--output", type=Path, help="where the JSON goes, .md and .png beside it; benchmarks/results/replay-<date>.json if not given")
    options = parser.parse_args(arguments)
    options.seed = random.randrange(2**31) if options.seed is None else options.seed
    return options


async def play(replay: Replay, session: aiohttp.ClientSession, patience: float, console: Console) -> list[RequestRecord]:
    """Sends all requests; returns records in their order."""
    records: list[RequestRecord] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[seen]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("replaying", total=replay.seconds or 1, seen="")
        start = time.perf_counter()

        async def show() -> None:
            while True:
                ended = [r for r in records if r.ended]
                refused = sum(r.outcome is LoadOutcome.REFUSED for r in ended)
                seen = f"{len(records)} of {len(replay.requests)} sent, {len(records) - len(ended)} under way, {refused} refused"
                progress.update(bar, completed=time.perf_counter() - start, seen=seen)
                await asyncio.sleep(0.5)

        showing = asyncio.create_task(show())
        try:
            await open_loop(session, replay.schedule(), records, patience)
        finally:
            showing.cancel()
    for record in records:
        record.ended = record.ended or time.perf_counter()
    return records


def per_request(records: Sequence[RequestRecord], ideal: Sequence[IdealHits]) -> dict[str, list[Any]]:
    """A column a figure, an entry a request; seconds to the tenth of a millisecond, times from the first one's."""
    start = records[0].due

    def seconds(value: float | None) -> float | None:
        return None if value is None else round(value, 4)

    return {
        "due": [seconds(r.due - start) for r in records],
        "lag": [seconds(r.sent - r.due) for r in records],
        "ttft": [seconds(r.ttft) for r in records],
        "end_to_end": [seconds(r.ended - r.due) for r in records],
        "inter_token_latencies": [[seconds(gap) for gap in r.gaps] for r in records],
        "outcome": [str(r.outcome) for r in records],
        "status": [r.status for r in records],
        "prompt_tokens": [r.prompt_tokens for r in records],
        "output_tokens": [r.output_tokens for r in records],
        "cached_tokens": [r.cached_tokens for r in records],
        "ideal_endless": [hits.endless for hits in ideal],
        "ideal_computed": [hits.computed for hits in ideal],
    }


async def run(options: argparse.Namespace, url: str, console: Console) -> dict[str, Any]:
    """Replays, reports and writes; returns the summary."""
    async with open_session(url) as session:
        replay = await decide(options, url, session, console)
        cpu = time.process_time()
        records = await play(replay, session, options.patience, console)
        cpu = time.process_time() - cpu
    scale, target = replay.prompts.scale, LatencyTarget(options.target_ttft, options.target_itl)
    ideal = ideal_hits(records, [list(pages_of(replay.prompts.tokens(r), options.page_size)) for r in replay.requests], options.page_size)
    summary = summarize(records, ideal, target)
    summary["client_cpu_share"] = cpu / summary["seconds"]
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    output = (options.output or RESULTS / f"replay-{date}.json").with_suffix(".json")
    output.parent.mkdir(parents=True, exist_ok=True)
    peers = second_opinion(options, url, replay, output.with_suffix(".guidellm.json"), console)
    about = f"{len(records)} requests, lengths x 1/{1 / scale.length:g}, times x {scale.time:.3g}; {replay.request_builder.model}"
    settings = {
        "trace": options.trace.name,
        "model": replay.request_builder.model,
        "server": f"jaxinfer serve {options.serve}".strip() if options.serve is not None else "by its address",
        "scale": asdict(scale) | {"length": scale.length},
        "requests_too_long_left_out": replay.num_too_long,
        **{name: getattr(options, name) for name in ("pick", "seed", "page_size", "ignore_eos", "load", "rate", "time_scale")},
    }
    result = {"date": date, "client": machine(), "settings": settings, "summary": summary, **peers, "requests": per_request(records, ideal)}
    output.write_text(json.dumps(result) + "\n", encoding="utf-8")
    heads, lines = ("", "benchmarks.replay", *peers), rows(summary, *peers.values())
    console.print(table(f"{options.trace.stem}: {about}", lines, heads))
    text = f"{options.trace.stem}: {about} ({date})\n\n{markdown(table('', lines, heads))}"
    output.with_suffix(".md").write_text(text, encoding="utf-8")
    draw(output.with_suffix(".png"), f"Replay of {options.trace.stem}", about, records, ideal, target)
    console.print(f"written to {output}, .md and .png", highlight=False, soft_wrap=True)
    return summary


def second_opinion(options: argparse.Namespace, url: str, replay: Replay, output: Path, console: Console) -> dict[str, dict[str, Any]]:
    """guidellm's figures of the same requests, under its name. Nothing where it is missing or fails, which is
    reported."""
    if options.guidellm is None:
        return {}
    try:
        with console.status("guidellm replays the same"):
            return {"guidellm": replay_with_guidellm(options.guidellm, url, replay, options.tokenizer, output, options.patience)}
    except (GuidellmError, CheckpointError) as error:
        console.print(f"guidellm: absent ({error})", markup=False, highlight=False)
        return {}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    console = Console()
    with ExitStack() as stack:
        try:
            url = base_url(options.url) if options.url else stack.enter_context(Server(shlex.split(options.serve))).url
            summary = asyncio.run(run(options, url, console))
        except (TraceError, ServerError, CalibrationError, OSError) as error:
            sys.exit(f"replay: error: {error}")
    if not summary["answered"]:
        sys.exit("replay: error: not one request was answered; the JSON's `errors` has the reasons")


if __name__ == "__main__":
    main()
