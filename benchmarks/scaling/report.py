"""A run as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.plot_style import duration
from benchmarks.scaling.workload import ONE_DEVICE

BUSY = 0.1  # cores of other processes up to which a run is trustworthy


def render(result: Mapping[str, Any], picture: str) -> str:
    """The whole page. `result` as in the JSON file; `plot_style` lies beside the page."""
    about, settings, others = result["machine"], result["settings"], result["others"]
    rounds = (
        "one round of a few tokens: whether it runs, not a measurement" if settings["quick"] else f"medians of {settings['rounds']} rounds"
    )
    pieces = [
        "# What it costs to spread a model over devices",
        f"{about['cpu']}, {about['cores']} cores; {settings['model']}, {settings['dtype']}; {result['date']}; {rounds}. "
        "Written by `python -m benchmarks.scaling`.",
    ]
    if others is not None and others["median"] > BUSY:
        pieces.append(
            f"**Other processes took {others['median']:.2f} of the machine's cores in the median stretch, {others['most']:.2f} at most: "
            "these figures are of a busy machine.**"
        )
    pieces += [f"![{picture}]({picture})", "## Measured, on virtual devices"]
    is_measured = result["hardware"]["is_measured"]
    pieces.append(
        f"Devices are parts of one CPU and share its {about['cores']} cores: what one device does in a time, eight do no more of. A layout that cost nothing would take "
        "as long as one device, so what is above that is its overhead: sums over devices, copies between stages, work that is done on every device, weights that "
        "are read once for each micro-batch. Times one device's in the same turn, then the time itself; in brackets what is predicted, "
        + (
            "on this machine as it was calibrated."
            if is_measured
            else "**from defaults: this machine was not calibrated** (`jaxinfer plan --calibrate`)."
        )
    )
    pieces += [_measured(result), _bubbles(result), *_heads(result)]
    far = result["elsewhere"]
    pieces.append(f"## Predicted, not measured: {far['model']} on {far['target']}")
    pieces.append(
        "Layouts of as many cards as hold its weights; what bounds a step is in brackets. Figures of the cards are from data sheets and shares of them that are "
        "commonly reached (`sharding/hardware.py`); PCIe stands for links that are slow."
    )
    for name, layouts in far["links"].items():
        pieces += [f"Joined by {name}:", _predicted(far["cases"], layouts)]
    return "\n\n".join(pieces) + "\n"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _measured(result: Mapping[str, Any]) -> str:
    def cell(layout: str, case: str) -> str:
        found, one = result["measured"][layout][case], result["predicted"][str(ONE_DEVICE)][case]["seconds"]
        told = result["predicted"][layout][case]["seconds"]
        ratios = f"{statistics.median(found['ratio']):.2f} x ({told / one:.2f} x)"
        return f"{ratios}, {duration(statistics.median(found['seconds']))} ({duration(told)})"

    cases = result["cases"]
    return _table(["layout", *cases], [[layout, *(cell(layout, case) for case in cases)] for layout in result["measured"]])


def _bubbles(result: Mapping[str, Any]) -> str:
    """For layouts with stages."""
    rows = []
    for layout, cases in result["measured"].items():
        shares = {case: of_case["bubble_share"] for case, of_case in cases.items()}
        if any(shares.values()):
            rows.append(
                [
                    layout,
                    *(
                        f"{statistics.median(share):.0%} ({result['predicted'][layout][case]['bubble_share']:.0%})" if share else ""
                        for case, share in shares.items()
                    ),
                ]
            )
    if not rows:
        return "No layout had stages."
    about = "Bubbles: of the time that stages had a step launched, the share that they waited for another stage (in brackets: predicted)."
    return f"{about}\n\n{_table(['layout', *result['cases']], rows)}"


def _heads(result: Mapping[str, Any]) -> list[str]:
    """The cost where devices don't divide the model's heads."""
    told = {layout: "; ".join(about["heads"].values()) for layout, about in result["layouts"].items() if about["heads"]}
    return ["Heads that devices don't divide:\n\n" + "\n".join(f"* {layout}: {text}" for layout, text in told.items())] if told else []


def _predicted(cases: list[str], layouts: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    def cell(found: Mapping[str, Any]) -> str:
        bubbles = f", bubbles {found['bubble_share']:.0%}" if found["bubble_share"] > 0.005 else ""
        return f"{duration(found['seconds'])} ({found['bound']}{bubbles})"

    rows = [[layout, *(cell(found[case]) if case in found else "no room" for case in cases)] for layout, found in layouts.items()]
    return _table(["layout", *cases], rows)
