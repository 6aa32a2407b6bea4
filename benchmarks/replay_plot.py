"""A plot of a replay: inter-token times, active requests, and the cache's hit ratio."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from benchmarks.http_load import LoadOutcome, RequestRecord
from benchmarks.plot_style import BLUE, GREEN, INK, MUTED, ORANGE, RED, STYLE, duration, legend, styled
from benchmarks.replay_report import IdealHits, LatencyTarget, hit_ratio_so_far

SHORTEST = 1e-4  # seconds, on a logarithmic axis: two tokens read at once have no time between them


def draw(
    path: Path, title: str, subtitle: str, records: Sequence[RequestRecord], ideal: Sequence[IdealHits], target: LatencyTarget
) -> None:
    """Write the PNG."""
    answered = [r for r in records if r.outcome is LoadOutcome.ANSWERED]
    with matplotlib.rc_context(STYLE):
        figure = styled((12, 8), title, subtitle)
        axes = figure.subplots(2, 2)
        ttft = [r.ttft for r in answered if r.ttft is not None]
        _distribution(axes[0, 0], "Time to first token", ttft, target.ttft, BLUE)
        _distribution(axes[0, 1], "Inter-token latency", [gap for r in answered for gap in r.gaps], target.itl, ORANGE)
        _under_way(axes[1, 0], records)
        _hits(axes[1, 1], records, ideal)
        figure.savefig(path, dpi=150)


def _distribution(axes: Axes, title: str, values: Sequence[float], target: float, color: str) -> None:
    """Share of the values up to each one, on a logarithmic axis."""
    axes.set_title(title)
    axes.set_ylabel("share")
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.axvline(target, color=RED, linewidth=1.2, linestyle=(0, (4, 3)), label=f"target: {duration(target)}")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if _decades(values, target) < 2 else (1,)))
    axes.xaxis.set_major_formatter(lambda seconds, _: duration(seconds))
    axes.xaxis.set_minor_formatter(NullFormatter())
    if values:
        ordered = np.sort(np.maximum(values, SHORTEST))
        axes.step(ordered, np.arange(1, len(ordered) + 1) / len(ordered), where="post", color=color, linewidth=2)
        # room for the labels
        axes.set_xlim(max(ordered[0], np.percentile(ordered, 1) / 2) / 1.3, max(ordered[-1], target) * 3)
        for percent in (50, 90, 99):
            at = float(np.percentile(ordered, percent))
            axes.plot(at, percent / 100, "o", color=color, markersize=5.5, markeredgecolor="white", zorder=4)
            axes.annotate(
                f"p{percent}  {duration(at)}",
                (at, percent / 100),
                xytext=(8, -8),  # below and to the right of a rising curve nothing is drawn
                textcoords="offset points",
                va="center",
                fontsize=9,
                color=INK,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5},
                zorder=3,
            )
    legend(axes)


def _decades(values: Sequence[float], target: float) -> float:
    positive = [max(value, SHORTEST) for value in (*values, target)]
    return float(np.log10(max(positive) / min(positive)))


def _steps(starts: Sequence[float], ends: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Times at which something begins or ends, and the number that is active from then on."""
    times = np.concatenate([starts, ends])
    changes = np.concatenate([np.ones(len(starts)), -np.ones(len(ends))])
    order = np.argsort(times, kind="stable")
    return times[order], np.cumsum(changes[order])


def _under_way(axes: Axes, records: Sequence[RequestRecord]) -> None:
    start = records[0].due
    axes.set_title("Requests under way")
    axes.set_xlabel("seconds")
    times, counts = _steps([r.sent - start for r in records], [r.ended - start for r in records])
    axes.fill_between(times, counts, step="post", color=BLUE, alpha=0.14, linewidth=0)
    axes.step(times, counts, where="post", color=BLUE, linewidth=1.4, label="in flight")
    firsts = [(r.arrivals[0] if r.arrivals else r.ended) - start for r in records]
    times, counts = _steps([r.sent - start for r in records], firsts)
    axes.fill_between(times, counts, step="post", color=ORANGE, alpha=0.3, linewidth=0)
    axes.step(times, counts, where="post", color=ORANGE, linewidth=1.4, label="no token yet")
    refused = [r.due - start for r in records if r.outcome is LoadOutcome.REFUSED]
    if refused:
        axes.plot(refused, np.zeros(len(refused)), "|", color=RED, markersize=11, label=f"refused ({len(refused)})", clip_on=False)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(0, None)
    axes.set_xlim(0, None)
    legend(axes)


def _hits(axes: Axes, records: Sequence[RequestRecord], ideal: Sequence[IdealHits]) -> None:
    axes.set_title("Cache hits")
    axes.set_xlabel("seconds")
    axes.set_ylabel("of the prompt tokens so far")
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    points = hit_ratio_so_far(records, ideal)
    if points:
        times, measured, endless, computed = zip(*points, strict=True)
        # Where they coincide, the lower ones are wider: each stays visible, however many overlap.
        lines = [(endless, "endless", MUTED, 8.0, 0.45), (computed, "computed by then", ORANGE, 4.5, 0.9)]
        if all(ratio is not None for ratio in measured):
            lines.append((measured, "server", GREEN, 1.8, 1.0))
        for ratios, name, color, width, alpha in lines:
            axes.plot(times, ratios, color=color, linewidth=width, alpha=alpha, label=f"{name} {ratios[-1]:.0%}")
        axes.set_ylim(-0.01, max(0.1, *endless) * 1.1)
        axes.set_xlim(0, None)
        legend(axes)
