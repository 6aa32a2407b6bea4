"""A plot of a soak: throughput, queue, pages and memory over time, with the load of each period."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes

from benchmarks.http_load import LoadOutcome, RequestRecord
from benchmarks.plot_style import BLUE, GREEN, INK, MUTED, ORANGE, RED, STYLE, legend, styled
from benchmarks.soak_checks import Phase, throughput
from benchmarks.soak_monitor import ServerSample

WINDOW = 5  # seconds that a rate is averaged over


def draw(path: Path, subtitle: str, phases: Sequence[Phase], samples: Sequence[ServerSample], records: Sequence[RequestRecord]) -> None:
    """Write the PNG."""
    at = np.array([s.at for s in samples]) / 60
    with matplotlib.rc_context(STYLE):
        figure = styled((12, 10.5), "Soak: above capacity, with aborts, disconnects and bad requests", subtitle)
        rate, queue, pages, memory = figure.subplots(4, 1, sharex=True, height_ratios=(1.25, 1.1, 0.8, 0.8))
        _throughput(rate, at, samples, phases)
        _queue(queue, at, samples, records, phases[0].start)
        pages.set_title("KV pages held by requests")
        pages.fill_between(at, [s.pages_used for s in samples], color=GREEN, alpha=0.15, linewidth=0)
        pages.plot(at, [s.pages_used for s in samples], color=GREEN, linewidth=1.3)
        pages.set_ylim(0, 1.05)
        pages.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        memory.set_title("Memory of the server (MiB resident)")
        memory.plot(at, [s.rss for s in samples], color=BLUE, linewidth=1.6)
        memory.set_ylim(0, max(s.rss for s in samples) * 1.15)
        memory.set_xlabel("minutes")
        for axes in (rate, queue, pages, memory):
            _shade(axes, phases)
        figure.savefig(path, dpi=150)


def _shade(axes: Axes, phases: Sequence[Phase]) -> None:
    for phase in phases:
        if phase.load is not None and phase.load > 1:
            axes.axvspan(phase.start / 60, phase.end / 60, color=RED, alpha=0.05, linewidth=0)
    axes.set_xlim(0, None)


def _throughput(axes: Axes, at: np.ndarray, samples: Sequence[ServerSample], phases: Sequence[Phase]) -> None:
    axes.set_title("Output tokens a second")
    times, tokens = at * 60, np.array([s.output_tokens for s in samples])
    before = np.interp(times - WINDOW, times, tokens)
    width = np.minimum(times - times[0], WINDOW)
    axes.plot(at[1:], ((tokens - before)[1:] / width[1:]), color=BLUE, linewidth=1.3, label=f"over {WINDOW} s")
    top = axes.get_ylim()[1]
    axes.set_ylim(0, top * 1.25)
    for number, phase in enumerate(phases):
        mean = throughput(samples, phase)
        if mean is not None:
            label = "mean of a phase, settled" if number == 0 else None
            axes.plot([phase.measured_from / 60, phase.end / 60], [mean, mean], color=INK, linewidth=2, label=label)
        axes.annotate(
            f"{phase.name}" + (f"\n{mean:,.0f}" if mean is not None else ""),
            ((phase.start + phase.end) / 120, top * 1.22),
            ha="center",
            va="top",
            fontsize=9,
            color=INK if phase.load is None or phase.load <= 1 else RED,
        )
    legend(axes)


def _queue(axes: Axes, at: np.ndarray, samples: Sequence[ServerSample], records: Sequence[RequestRecord], start: float) -> None:
    axes.set_title("Requests")
    axes.plot(at, [s.waiting for s in samples], color=ORANGE, linewidth=1.4, label="waiting")
    axes.plot(at, [s.running for s in samples], color=BLUE, linewidth=1.4, label="running")
    axes.set_ylim(0, max(axes.get_ylim()[1], 1) * 1.25)
    legend(axes)
    refused = np.array([r.ended for r in records if r.outcome is LoadOutcome.REFUSED])
    if len(refused) and len(at) > 1:
        edges = np.arange(0, at[-1] * 60 + WINDOW, WINDOW)
        counts, _ = np.histogram(refused - records[0].due + start, edges)
        other = axes.twinx()
        other.fill_between(edges[:-1] / 60, counts / WINDOW, step="post", color=RED, alpha=0.18, linewidth=0, label="refused a second")
        other.set_ylim(0, max(counts.max() / WINDOW, 0.1) * 1.8)
        other.grid(visible=False)
        other.spines["right"].set_visible(True)
        other.tick_params(colors=MUTED)
        legend(axes, other)
