"""Plots of a run: throughput of each engine, under load over HTTP, start times and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes

from benchmarks.peers import embedding_rates, memory, serving_load, starts
from benchmarks.peers.measures import EngineFigure, Measures
from benchmarks.peers.report import value
from benchmarks.plot_style import INK, MUTED, STYLE, duration, styled

# Okabe and Ito's colours, which the colour-blind can distinguish: one a family, a lighter tone for each further engine
# of it.
FAMILIES = {"jaxinfer": "#0072B2", "transformers": "#E69F00", "llama.cpp": "#009E73", "vLLM": "#CC79A7"}
LIGHTER = 0.45  # towards white, for each further engine of a family


def colors(engines: Sequence[str]) -> dict[str, tuple[float, float, float]]:
    """A colour for each engine."""
    found: dict[str, tuple[float, float, float]] = {}
    for name in engines:
        family = name.split()[0]
        red, green, blue = matplotlib.colors.to_rgb(FAMILIES.get(family, MUTED))
        keep = (1 - LIGHTER) ** sum(other.split()[0] == family for other in found)
        found[name] = (1 - keep * (1 - red), 1 - keep * (1 - green), 1 - keep * (1 - blue))
    return found


def draw(folder: Path, stem: str, title: str, measures: Measures, engines: Sequence[str]) -> list[Path]:
    """Writes a PNG for each kind of measure that there is; returns their paths."""
    rates = [m for part in ("decode", "prefill", "throughput") for m in measures.of(part)]
    waits = [*measures.of(starts.PART), *measures.of(memory.PART)]
    pictures = []
    for kind, about, panels in (
        ("rates", "Tokens a second without a server: longer is better", rates),
        ("served", "Over HTTP: throughput (longer is better), then latencies (shorter is better)", measures.of(serving_load.PART)),
        ("embeddings", "Embeddings, texts a second: longer is better", measures.of(embedding_rates.PART)),
        ("start", "Start to the first token, peak memory: shorter is better", waits),
    ):
        if panels:
            path = folder / f"{stem}-{kind}.png"
            _draw(path, title, f"{about}. Bars: medians; lines: lowest to highest of the rounds.", panels, colors(engines))
            pictures.append(path)
    return pictures


def _draw(path: Path, title: str, subtitle: str, panels: Sequence[EngineFigure], shades: Mapping[str, tuple[float, float, float]]) -> None:
    columns = min(len(panels), 4 if len(panels) > 6 else 3)
    rows = -(-len(panels) // columns)
    bars = max(sum(m.spread(name) is not None for name in shades) for m in panels)
    with matplotlib.rc_context(STYLE):
        figure = styled((4.4 * columns, 1.0 + rows * (0.9 + 0.27 * bars)), title, subtitle)
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes, measure in zip(grid, panels, strict=False):
            _bars(axes, measure, shades)
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        figure.savefig(path, dpi=130)


def _bars(axes: Axes, measure: EngineFigure, shades: Mapping[str, tuple[float, float, float]]) -> None:
    found = [(name, spread) for name in shades if (spread := measure.spread(name))]
    axes.set_title(
        f"{measure.label}" + (f" ({measure.unit})" if measure.unit in ("tokens/s", "texts/s", "MiB") else ""), fontsize=9.5, x=-0.28
    )
    longest = max((spread.high for _, spread in found), default=1.0)
    for place, (name, spread) in enumerate(found):
        axes.barh(place, spread.median, color=shades[name], height=0.72)
        axes.plot([spread.low, spread.high], [place, place], color=INK, linewidth=1.1)
        axes.text(spread.high + longest * 0.02, place, value(measure.unit, spread), va="center", fontsize=8.5, color=INK)
    axes.set_yticks(range(len(found)), [name for name, _ in found], fontsize=8.5, color=INK)
    axes.set_xlim(0, longest * 1.22)  # room for the numbers
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4))
    axes.tick_params(axis="x", labelsize=8)
    if measure.unit == "s":
        axes.xaxis.set_major_formatter(lambda seconds, _: duration(seconds) if seconds else "0")
