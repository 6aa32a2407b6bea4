"""The style of the benchmarks' plots."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
BLUE, ORANGE, GREEN, RED = "#2563eb", "#ea8a1f", "#15946b", "#d64545"
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "figure.facecolor": "white",
}


def styled(size: tuple[float, float], title: str, subtitle: str) -> Figure:
    """An empty figure with its heading; call it under `matplotlib.rc_context(STYLE)`."""
    figure = Figure(figsize=size, layout="constrained")
    figure.get_layout_engine().set(h_pad=0.12, w_pad=0.12, hspace=0.06, wspace=0.06, rect=(0, 0, 1, 1 - 0.85 / size[1]))  # type: ignore[union-attr, call-arg]
    left, top = 0.16 / size[0], 1 - 0.2 / size[1]
    figure.text(left, top, title, fontsize=15, fontweight="bold", color=INK, va="top")
    figure.text(left, top - 0.33 / size[1], subtitle, fontsize=10, color=MUTED, va="top")
    return figure


def duration(seconds: float) -> str:
    """Such as '12 ms' or '1.5 s'."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def legend(*pair: Axes) -> None:
    """One legend for all lines of all axes, on the title's line of the first, to the right, where nothing is drawn."""
    entries = [axes.get_legend_handles_labels() for axes in pair]
    handles, labels = [h for hs, _ in entries for h in hs], [label for _, ls in entries for label in ls]
    narrow = {"handlelength": 1.5, "handletextpad": 0.5, "columnspacing": 1.3, "fontsize": 9, "borderaxespad": 0.2}
    pair[0].legend(handles, labels, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(labels), **narrow)
