"""A plot of a run: measurements on virtual devices, which share one CPU, and predictions for GPUs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks.plot_style import BLUE, GREEN, INK, MUTED, ORANGE, STYLE, duration, styled
from benchmarks.scaling.workload import KINDS, ONE_DEVICE, kind
from sharding.layout import Parallel

COLORS = dict(zip(KINDS, (BLUE, ORANGE, GREEN), strict=True))
_DASHED: dict[str, Any] = {"linestyle": (0, (4, 2)), "alpha": 0.8}
_DOTTED: dict[str, Any] = {"marker": "o", "markersize": 5}
Cost = Callable[[str], float | None]  # of a layout, in seconds or relative to one device


def draw(path: Path, result: Mapping[str, Any]) -> None:
    """Write the PNG."""
    far, settings, about = result["elsewhere"], result["settings"], result["machine"]
    with matplotlib.rc_context(STYLE):
        what = f"{settings['model']}, {settings['dtype']}; {about['cpu']}, {about['cores']} cores, {result['date']}"
        subtitle = f"{what}. Of layouts of as many devices the quickest of each kind"
        figure = styled((16, 3.9 * (1 + len(far["links"])) + 1), "What it costs to spread a model over devices", subtitle)
        own, *others = figure.subfigures(1 + len(far["links"]), 1, squeeze=False)[:, 0]
        title = (
            f"Virtual devices that share {about['cores']} cores: times one device's, measured (dots) and predicted (dashed); "
            "a flat 1 is ideal, what is above it overhead"
        )
        _title(own, title)
        for axes, case in zip(own.subplots(1, len(result["cases"])), result["cases"], strict=True):
            lines = [(_predicted_ratio(result["predicted"], case), _DASHED), (_measured_ratio(result["measured"], case), _DOTTED)]
            _panel(axes, case, list(result["measured"]), lines, lambda ratio, _: f"{ratio:g}")
        for part, (link, layouts) in zip(others, far["links"].items(), strict=True):
            _title(part, f"{far['model']} on H100s joined by {link}: predicted, not measured")
            for axes, case in zip(part.subplots(1, len(far["cases"])), far["cases"], strict=True):
                _panel(
                    axes,
                    case,
                    list(layouts),
                    [(_predicted(layouts, case), _DASHED | _DOTTED)],
                    lambda seconds, _: duration(seconds) if seconds else "0",
                )
        figure.savefig(path, dpi=130)


def _title(part: Any, text: str) -> None:
    part.suptitle(text, x=0.012, ha="left", fontsize=12, fontweight="bold", color=INK)


def _measured_ratio(measured: Mapping[str, Any], case: str) -> Cost:
    return lambda layout: statistics.median(measured[layout][case]["ratio"])


def _predicted_ratio(predicted: Mapping[str, Any], case: str) -> Cost:
    return lambda layout: predicted[layout][case]["seconds"] / predicted[str(ONE_DEVICE)][case]["seconds"]


def _predicted(predicted: Mapping[str, Any], case: str) -> Cost:
    return lambda layout: predicted[layout][case]["seconds"] if case in predicted[layout] else None


def _panel(
    axes: Axes, case: str, layouts: Sequence[str], lines: Sequence[tuple[Cost, dict[str, Any]]], form: Callable[[float, float], str]
) -> None:
    axes.set_title(case, fontsize=10.5)
    top = 0.0
    for name in KINDS:
        for cost, style in lines:
            if points := best_of(name, layouts, cost):
                label = name if cost is lines[-1][0] else None
                axes.plot([x for x, _ in points], [y for _, y in points], color=COLORS[name], linewidth=1.8, label=label, **style)
                top = max(top, *(value for _, value in points))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator([1, 2, 4, 8]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda devices, _: f"{devices:.0f}")
    axes.set_xlim(0.9, 8.9)
    axes.set_xlabel("devices", color=MUTED)
    axes.set_ylim(0, top * 1.15 or 1)
    axes.yaxis.set_major_formatter(form)
    axes.legend(fontsize=9, loc="best")


def best_of(name: str, layouts: Sequence[str], cost: Cost) -> list[tuple[int, float]]:
    """The best of a kind's layouts for each number of devices; one device begins every line."""
    found: dict[int, float] = {}
    for text in layouts:
        layout, value = Parallel.parse(text), cost(text)
        if value is not None and (layout.num_devices == 1 or kind(layout) == name):
            found[layout.num_devices] = min(value, found.get(layout.num_devices, value))
    return sorted(found.items()) if set(found) != {1} or name == KINDS[0] else []
