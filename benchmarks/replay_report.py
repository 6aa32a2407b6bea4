"""The result of a replay: latencies, goodput under a target, the hit ratio beside an ideal cache's, refusals. As
numbers, then as a table."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Column, Table

from benchmarks.http_load import LoadOutcome, RequestRecord


@dataclass(frozen=True, slots=True)
class LatencyTarget:
    """Seconds. A request is good when its first token came within `ttft` and those after it within `itl` each, on
    average."""

    ttft: float
    itl: float

    def is_met(self, record: RequestRecord) -> bool:
        if record.outcome is not LoadOutcome.ANSWERED or record.ttft is None:
            return False
        return record.ttft <= self.ttft and (record.time_per_token or 0.0) <= self.itl


@dataclass(frozen=True, slots=True)
class IdealHits:
    """Prompt tokens that a cache of whole pages without eviction would have found for a request."""

    endless: int  # in any prompt sent before: the upper bound of any cache
    computed: int  # in prompts whose first token had come when this one was sent: active ones are not cached yet


def ideal_hits(records: Sequence[RequestRecord], pages: Sequence[Sequence[bytes]], page_size: int) -> list[IdealHits]:
    """For each request, in the order they were sent. `pages`: `pages_of` each prompt. Refused requests leave nothing in
    a cache."""
    ready_at: dict[bytes, float] = {}  # page -> when the first prompt with it was computed
    found = []
    for record, keys in zip(records, pages, strict=True):
        known = [ready_at[key] for key in keys if key in ready_at]  # keys are of prefixes: known ones come first
        endless = len(known)
        computed = next((i for i, ready in enumerate(known) if ready > record.sent), endless)
        found.append(IdealHits(endless * page_size, computed * page_size))
        if record.arrivals:
            for key in keys:
                ready_at[key] = min(ready_at.get(key, record.arrivals[0]), record.arrivals[0])
    return found


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """p50, p90, p99 and the mean; None where there are no values."""
    if not values:
        return dict.fromkeys(("p50", "p90", "p99", "mean"))
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return {"p50": p50, "p90": p90, "p99": p99, "mean": float(np.mean(values))}


def summarize(records: Sequence[RequestRecord], ideal: Sequence[IdealHits], target: LatencyTarget) -> dict[str, Any]:
    """All the figures. Seconds; rates a second; shares and ratios from 0 to 1, None where the server doesn't report
    them."""
    answered = [r for r in records if r.outcome is LoadOutcome.ANSWERED]
    seconds = max(r.ended for r in records) - records[0].due
    offered = records[-1].due - records[0].due
    good = sum(target.is_met(r) for r in records)
    return {
        "requests": len(records),
        "answered": len(answered),
        "refused": (refused := sum(r.outcome is LoadOutcome.REFUSED for r in records)),
        "failed": len(records) - len(answered) - refused,
        "outcomes": {str(o): n for o, n in Counter(r.outcome for r in records).most_common()},
        "refusals": {str(s): n for s, n in Counter(r.status for r in records if r.outcome is LoadOutcome.REFUSED).items()},
        "errors": dict(
            Counter(f"{r.status} {r.message}" for r in records if r.outcome not in (LoadOutcome.ANSWERED, LoadOutcome.REFUSED)).most_common(
                10
            )
        ),
        "seconds": seconds,
        "offered_requests_per_second": (len(records) - 1) / offered if offered else None,
        "answered_requests_per_second": len(answered) / seconds,
        "output_tokens_per_second": sum(r.output_tokens or 0 for r in answered) / seconds,
        "prompt_tokens_per_second": sum(r.prompt_tokens or 0 for r in answered) / seconds,
        "ttft": percentiles([r.ttft for r in answered if r.ttft is not None]),
        "inter_token_latency": percentiles([gap for r in answered for gap in r.gaps]),
        "time_per_token": percentiles([r.time_per_token for r in answered if r.time_per_token is not None]),
        "end_to_end": percentiles([r.ended - r.due for r in answered]),
        "goodput": {
            "target_ttft": target.ttft,
            "target_itl": target.itl,
            "share": good / len(records),
            "requests_per_second": good / seconds,
        },
        "cache": _cache(records, ideal),
        "client_lag": percentiles([r.sent - r.due for r in records]) | {"max": max(r.sent - r.due for r in records)},
    }


def _cache(records: Sequence[RequestRecord], ideal: Sequence[IdealHits]) -> dict[str, Any]:
    told = [(r, hits) for r, hits in zip(records, ideal, strict=True) if r.outcome is LoadOutcome.ANSWERED and r.prompt_tokens is not None]
    total = sum(r.prompt_tokens or 0 for r, _ in told)
    cached = None if not told or any(r.cached_tokens is None for r, _ in told) else sum(r.cached_tokens or 0 for r, _ in told)

    def share(tokens: int | None) -> float | None:
        return None if tokens is None or not total else tokens / total

    return {
        "prompt_tokens": total,
        "cached_tokens": cached,
        "hit_ratio": share(cached),
        "ideal_endless": share(sum(hits.endless for _, hits in told)),
        "ideal_computed": share(sum(hits.computed for _, hits in told)),
    }


def hit_ratio_so_far(records: Sequence[RequestRecord], ideal: Sequence[IdealHits]) -> list[tuple[float, float | None, float, float]]:
    """After each answered request, by when it was sent: seconds, then hit ratio, endless and computed ideal of all
    prompts so far."""
    points = []
    prompt = cached = endless = computed = 0
    is_told = True
    for record, hits in zip(records, ideal, strict=True):
        if record.outcome is not LoadOutcome.ANSWERED or not record.prompt_tokens:
            continue
        is_told &= record.cached_tokens is not None
        prompt, cached = prompt + record.prompt_tokens, cached + (record.cached_tokens or 0)
        endless, computed = endless + hits.endless, computed + hits.computed
        at = record.due - records[0].due
        points.append((at, cached / prompt if is_told else None, endless / prompt, computed / prompt))
    return points


def rows(*summaries: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table: a label, then its figure in each summary ("" where it has none)."""
    target = summaries[0]["goodput"]
    lines: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("requests sent, answered", lambda s: f"{s['requests']:,}, {s['answered']:,}"),
        ("requests refused, failed", lambda s: f"{s.get('refused', 0):,}, {s['failed']:,}"),
        ("requests/s offered", lambda s: _number(s["offered_requests_per_second"])),
        ("requests/s answered", lambda s: _number(s["answered_requests_per_second"])),
        ("tokens/s: prompt, output", lambda s: f"{s['prompt_tokens_per_second']:,.0f}, {s['output_tokens_per_second']:,.0f}"),
        ("time to first token: p50, p90, p99", lambda s: _spread(s["ttft"])),
        ("inter-token latency: p50, p90, p99", lambda s: _spread(s["inter_token_latency"])),
        ("its mean in each request: p50, p90, p99", lambda s: _spread(s["time_per_token"])),
        ("whole answer: p50, p90, p99", lambda s: _spread(s["end_to_end"])),
        (
            f"good: first token in {_seconds(target['target_ttft'])}, then {_seconds(target['target_itl'])} each",
            lambda s: f"{s['goodput']['share']:.0%}, {s['goodput']['requests_per_second']:.2f}/s",
        ),
        ("prompt tokens found in the cache", lambda s: _percent(s["cache"]["hit_ratio"])),
        ("... by a cache that forgets nothing", lambda s: _percent(s["cache"]["ideal_endless"])),
        ("... by one with what was computed by then", lambda s: _percent(s["cache"]["ideal_computed"])),
        ("client late by: p50, p99, most", lambda s: _spread(s["client_lag"], ("p50", "p99", "max"))),
    ]

    def shown(figure: Callable[[dict[str, Any]], str], summary: dict[str, Any]) -> str:
        try:
            return figure(summary)
        except KeyError:
            return ""

    return [(label, *(shown(figure, summary) for summary in summaries)) for label, figure in lines]


def _spread(values: dict[str, float | None], names: Sequence[str] = ("p50", "p90", "p99")) -> str:
    return ", ".join(_seconds(values[name]) for name in names)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(share: float | None) -> str:
    return "not told" if share is None else f"{share:.1%}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:.{1 if value < 0.01 else 0}f} ms" if value < 1 else f"{value:.2f} s"


def table(title: str, lines: Sequence[tuple[str, ...]], heads: Sequence[str] = ("", "")) -> Table:
    out = Table(*(Column(head, justify="left" if i == 0 else "right") for i, head in enumerate(heads)), title=title, title_justify="left")
    for line in lines:
        out.add_row(*line)
    return out


def markdown(shown: Table) -> str:
    """The table as Markdown has it."""
    shown.box, shown.title = box.MARKDOWN, None
    out = io.StringIO()
    Console(file=out, width=200).print(shown)
    return "\n".join(line.strip() for line in out.getvalue().splitlines() if line.strip()) + "\n"
