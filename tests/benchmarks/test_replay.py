"""What a replay reports, and a whole replay against a server of a few lines."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import web
from matplotlib.figure import Figure

from benchmarks import replay, replay_plot
from benchmarks.http_load import LoadOutcome, RequestRecord
from benchmarks.replay_plan import choose_length
from benchmarks.replay_report import IdealHits, LatencyTarget, hit_ratio_so_far, ideal_hits, rows, summarize
from jaxinfer.planner.trace import TraceRequest, read_trace
from tests.benchmarks.scripted_server import Handler, answering, chunk, stream, usage

TRACE = Path(__file__).parent / "tiny_trace.jsonl"
PAGE = 16


def record(due: float, *arrivals: float, outcome=LoadOutcome.ANSWERED, prompt=100, cached: int | None = 0, status=200) -> RequestRecord:
    ended = arrivals[-1] if arrivals else due + 0.1
    tokens = {"prompt_tokens": prompt, "output_tokens": len(arrivals), "cached_tokens": cached}
    return RequestRecord(due, due, ended, list(arrivals), outcome, status, **tokens)


# Ideal caches


def test_an_endless_cache_finds_every_page_that_came_before():
    records = [record(0, 1), record(2, 3), record(4, 5)]
    pages = [[b"a", b"b"], [b"a", b"b", b"c"], [b"a", b"x"]]
    assert ideal_hits(records, pages, PAGE) == [IdealHits(0, 0), IdealHits(32, 32), IdealHits(16, 16)]


def test_what_is_still_being_computed_is_not_there_yet():
    records = [record(0, 10), record(1, 2), record(5, 6)]
    pages = [[b"a", b"b"], [b"a"], [b"a", b"b"]]
    # The third finds the page that the second computed; the first, which has both, is not through.
    assert ideal_hits(records, pages, PAGE)[1:] == [IdealHits(16, 0), IdealHits(32, 16)]


def test_a_refused_prompt_is_in_no_cache():
    records = [record(0, outcome=LoadOutcome.REFUSED), record(1, 2)]
    assert ideal_hits(records, [[b"a"], [b"a"]], PAGE)[1] == IdealHits(0, 0)


def test_hit_ratios_are_of_the_answered_prompts():
    records = [record(0, 1, cached=0), record(1, outcome=LoadOutcome.REFUSED, cached=None), record(2, 3, prompt=300, cached=80)]
    ideal = [IdealHits(0, 0), IdealHits(96, 96), IdealHits(200, 120)]
    cache = summarize(records, ideal, LatencyTarget(1, 1))["cache"]
    assert (cache["prompt_tokens"], cache["cached_tokens"]) == (400, 80)
    assert (cache["hit_ratio"], cache["ideal_endless"], cache["ideal_computed"]) == (0.2, 0.5, 0.3)
    assert hit_ratio_so_far(records, ideal) == [(0, 0.0, 0.0, 0.0), (2, 0.2, 0.5, 0.3)]


def test_lines_that_coincide_are_all_seen_and_named_with_where_they_end():
    """As those of a trace without common prompts do: all at 0."""
    axes = Figure().subplots()
    records = [record(0, 1, prompt=100, cached=0), record(2, 3, prompt=100, cached=50)]
    replay_plot._hits(axes, records, [IdealHits(0, 0), IdealHits(50, 50)])
    below, middle, top = axes.get_lines()
    assert list(below.get_ydata()) == list(middle.get_ydata()) == list(top.get_ydata()) == [0, 0.25]
    assert below.get_linewidth() > middle.get_linewidth() + 2 > top.get_linewidth() + 4
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["endless 25%", "computed by then 25%", "server 25%"]


def test_a_server_that_does_not_tell_has_no_hit_ratio():
    summary = summarize([record(0, 1, cached=None), record(1, 2, cached=0)], [IdealHits(0, 0)] * 2, LatencyTarget(1, 1))
    assert summary["cache"]["hit_ratio"] is None
    assert dict(rows(summary))["prompt tokens found in the cache"] == "not told"


# Latencies and goodput


def test_latencies_are_of_all_tokens_and_rates_of_the_whole_time():
    records = [record(0, 1.0, 1.1, 1.5), record(1, 4.0, 4.2), record(2, outcome=LoadOutcome.REFUSED, status=429)]
    summary = summarize(records, [IdealHits(0, 0)] * 3, LatencyTarget(10, 10))
    assert summary["ttft"]["p50"] == pytest.approx(2.0)
    assert summary["ttft"]["p99"] == pytest.approx(2.98)
    assert summary["inter_token_latency"]["p50"] == pytest.approx(0.2)  # of 0.1, 0.4 and 0.2
    assert summary["time_per_token"]["mean"] == pytest.approx((0.25 + 0.2) / 2)
    assert summary["end_to_end"]["mean"] == pytest.approx((1.5 + 3.2) / 2)
    assert summary["seconds"] == pytest.approx(4.2)
    assert summary["output_tokens_per_second"] == pytest.approx(5 / 4.2)
    assert summary["offered_requests_per_second"] == pytest.approx(1.0)
    assert (summary["requests"], summary["answered"], summary["refused"], summary["failed"]) == (3, 2, 1, 0)
    assert summary["refusals"] == {"429": 1}


def test_good_requests_met_both_targets_and_were_answered():
    fast, slow_start, slow_tokens = record(0, 1.0, 1.1), record(0, 2.5, 2.6), record(0, 1.0, 1.5)
    one_token, cut = record(0, 1.0), record(0, 1.0, outcome=LoadOutcome.BROKEN)
    records = [fast, slow_start, slow_tokens, one_token, cut, record(0, outcome=LoadOutcome.REFUSED)]
    goodput = summarize(records, [IdealHits(0, 0)] * 6, LatencyTarget(ttft=2.0, itl=0.2))["goodput"]
    assert goodput["share"] == pytest.approx(2 / 6)
    assert goodput["requests_per_second"] == pytest.approx(2 / 2.6)


def test_late_clients_are_told():
    late = record(1, 3.0)
    late.sent = 1.5
    assert summarize([record(0, 1), late], [IdealHits(0, 0)] * 2, LatencyTarget(1, 1))["client_lag"]["max"] == 0.5


def test_the_chosen_length_fits_context_and_speed():
    trace = [TraceRequest(0, 4096, 512, tuple(range(8)))] * 100
    assert choose_length(trace, 16, 100_000, prefill_rate=1e9) == 1
    assert choose_length(trace, 16, 1_200, prefill_rate=1e9) == 1 / 4
    assert choose_length(trace, 16, 100_000, prefill_rate=1_100) == 1 / 8  # 512 tokens in half a second
    assert choose_length(trace, 16, 100, prefill_rate=1_000) == 1 / 32  # at least a page a block


# The whole way


class CachingServer:
    """Answers with as many tokens as were asked for, and says how much of the prompt it has seen before; every fifth is refused."""

    def __init__(self, refuses: bool = True) -> None:
        self.seen: set[tuple[int, ...]] = set()
        self.bodies: list[dict] = []
        self.refuses = refuses

    async def __call__(self, request):
        body = await request.json()
        self.bodies.append(body)
        if self.refuses and len(self.bodies) % 5 == 0:
            return await refusal()
        prompt = body["prompt"]
        prefixes = [tuple(prompt[:end]) for end in range(PAGE, len(prompt), PAGE)]
        cached = PAGE * sum(prefix in self.seen for prefix in prefixes)
        self.seen.update(prefixes)
        count = body["max_tokens"]
        return await stream(request, *[chunk("a")] * (count - 1), chunk("a", "length"), usage(len(prompt), count, cached), "[DONE]")


async def refusal():
    return web.json_response({"error": {"message": "too many"}}, status=429)


@contextmanager
def served(handler: Handler) -> Iterator[str]:
    """In a thread, as `replay.main` has an event loop of its own."""
    ready, loop = threading.Event(), asyncio.new_event_loop()
    urls: list[str] = []
    ends = asyncio.Event()

    async def serve() -> None:
        async with answering(handler) as url:
            urls.append(url)
            ready.set()
            await ends.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(ends.set)
        thread.join(10)
        loop.close()


def replayed(tmp_path: Path, server: CachingServer, *flags: str) -> dict:
    with served(server) as url:
        replay.main(["--url", url, "--trace", str(TRACE), "--output", str(tmp_path / "r.json"), "--no-guidellm", *flags])
    return json.loads((tmp_path / "r.json").read_text())


def test_a_replay_from_end_to_end(tmp_path, capsys):
    server = CachingServer()
    flags = ("--length-scale", "1/32", "--rate", "60", "--num-requests", "18", "--target-ttft", "5", "--seed", "1")
    result = replayed(tmp_path, server, *flags)
    trace = read_trace(TRACE)
    assert [len(body["prompt"]) for body in server.bodies] == [-(-r.input_length * 16 // 512) for r in trace]
    assert [body["max_tokens"] for body in server.bodies] == [round(r.output_length / 32) for r in trace]
    assert all(body["ignore_eos"] and body["stream_options"]["include_usage"] for body in server.bodies)
    assert {body["model"] for body in server.bodies} == {"scripted"}

    summary = result["summary"]
    assert summary["outcomes"] == {"answered": 15, "refused": 3}
    assert summary["offered_requests_per_second"] == pytest.approx(60)
    assert summary["goodput"]["share"] == pytest.approx(15 / 18)
    # This server's cache is endless, and each answer came before the next request.
    assert summary["cache"]["hit_ratio"] == summary["cache"]["ideal_endless"] > 0.2
    assert result["requests"]["due"][-1] == pytest.approx(17 / 60, abs=1e-3)
    assert result["requests"]["cached_tokens"][4] is None
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert "| requests refused, failed" in (tmp_path / "r.md").read_text()
    assert "15" in capsys.readouterr().out


def test_what_nobody_gave_is_tried(tmp_path):
    server = CachingServer(refuses=False)
    result = replayed(tmp_path, server, "--trial-seconds", "0.5", "--minutes", "0.002", "--load", "0.01")
    scale = result["settings"]["scale"]
    assert scale["length"] == 1 / 8  # 3,024 and 230 tokens into 512
    assert all(len(body["prompt"]) + body["max_tokens"] <= 512 for body in server.bodies)
    assert len(result["requests"]["due"]) >= 2
    assert result["summary"]["answered"] == len(result["requests"]["due"])
    # Nothing that was tried was found again.
    assert result["summary"]["cache"]["hit_ratio"] <= result["summary"]["cache"]["ideal_endless"]


def test_a_replay_without_an_answer_fails(tmp_path):
    async def refuses(request):
        return await refusal()

    with pytest.raises(SystemExit, match="not one request"):
        replayed(tmp_path, refuses, "--length-scale", "1/32", "--rate", "100")
    with pytest.raises(SystemExit, match="doesn't tell what is served"):
        replay.main(["--url", "http://127.0.0.1:9", "--trace", str(TRACE)])


def test_time_scale_takes_the_requests_of_the_minutes(tmp_path):
    flags = ("--length-scale", "1/32", "--time-scale", "0.01", "--minutes", str(10 * 0.01 / 60))
    result = replayed(tmp_path, CachingServer(), *flags)
    trace = read_trace(TRACE)
    within = [r for r in trace if r.timestamp <= trace[0].timestamp + 10_000]
    assert 5 < len(result["requests"]["due"]) == len(within) < len(trace)
    spans = [(r.timestamp - trace[0].timestamp) / 1e5 for r in within]
    assert result["requests"]["due"] == pytest.approx(spans, abs=1e-3)
