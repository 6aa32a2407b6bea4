"""A run as Markdown: each engine's figures, this engine's ratios to the best peer, and what a reader needs to judge
them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers import embedding_rates, memory, quality, rates, second_turn, serving_load, starts
from benchmarks.peers.engines import OURS
from benchmarks.peers.measures import EngineFigure, Measures, Spread

BUSY = 0.1  # cores of other processes up to which a run is trustworthy
FULL_BITS = (16, 32)  # of a weight: ratios compare with these peers
SECTIONS = (
    ("Without a server", ("decode", "prefill", "throughput"), "Tokens per second. Decode: after each sequence has its first token. Prefill: of one prompt, to its first token."),
    ("Over HTTP", (serving_load.PART,), "Each client sends its next request when it has its answer; answers are streamed."),
    ("Start and memory", (starts.PART, memory.PART), "A start is a new process, to its first token: cold with nothing compiled, warm with what a start before it left on disk."),
)  # fmt: skip


def render(result: Mapping[str, Any], pictures: Sequence[str] = ()) -> str:
    """The whole page. `result` as in the JSON file; `pictures` are file names beside the page."""
    measures, engines = Measures.from_json(result["measures"]), result["engines"]
    bits = {name: engine["bits"] for name, engine in engines.items()}
    pieces = [_heading(result), *_warning(result["others"]), *(f"![{name}]({name})" for name in pictures)]
    for title, parts, about in SECTIONS:
        if rows := [m for part in parts for m in measures.of(part)]:
            pieces += [f"## {title}", about, comparison(rows, bits)]
    pieces += _second_turn(measures) + _host(measures, list(engines)) + _quality(measures) + _embeddings(measures, bits)
    return "\n\n".join([*pieces, *_absent(result), *_conditions(result)]) + "\n"


def comparison(measures: Sequence[EngineFigure], bits: Mapping[str, int]) -> str:
    """A row a figure: each engine's median. Then for each of this project's engines its ratio to the best peer with 16-
    or 32-bit weights, and for those with fewer bits also to each peer with fewer."""
    names = [name for name in bits if any(m.spread(name) for m in measures)]
    ours = [name for name in names if _is_ours(name)]
    peers = [name for name in names if not _is_ours(name)]
    rivals = [name for name in peers if bits[name] in FULL_BITS]
    head = ["", *names, *(["best peer, 16/32 bits"] if rivals else []), *([f"{name} / best peer" for name in ours] if rivals else [])]
    small = [(own, peer) for own in ours for peer in peers if bits[own] not in FULL_BITS and bits[peer] not in FULL_BITS]
    head += [f"{own} / {peer}" for own, peer in small]
    rows = []
    for measure in measures:
        best = measure.best(rivals)
        row = [measure.label, *(value(measure.unit, measure.spread(name)) for name in names)]
        if rivals:
            row += [best or "-", *(ratio(measure.ratio(name, best) if best else None) for name in ours)]
        rows.append(row + [ratio(measure.ratio(own, peer)) for own, peer in small])
    return table(head, rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *(["---:"] * (len(head) - 1))], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def value(unit: str, spread: Spread | None) -> str:
    """The median in a readable form; '-' where there is none."""
    if spread is None:
        return "-"
    number = spread.median
    if unit == "s":
        return f"{number * 1e3:,.{1 if number < 0.1 else 0}f} ms" if number < 1 else f"{number:.2f} s" if number < 10 else f"{number:.0f} s"
    if unit == "share":
        return f"{number:.1%}"
    if unit == "cosine":
        return f"{number:.5f}"
    if unit == "nats":
        return f"{number:.2g}"
    if unit in ("MiB", "us"):
        return f"{number:,.0f} {unit}"
    return f"{number:,.0f}" if number >= 100 else f"{number:,.1f}" if number >= 20 else f"{number:,.2f}"


def ratio(spread: Spread | None) -> str:
    """'1.15 (1.13-1.38)', in bold where every round was better."""
    if spread is None:
        return "-"
    shown = f"{spread.median:.2f}"
    return f"{f'**{shown}**' if spread.low > 1 else shown} ({spread.low:.2f}-{spread.high:.2f})"


def _is_ours(name: str) -> bool:
    return name.startswith(OURS)


def _heading(result: Mapping[str, Any]) -> str:
    machine, settings = result["machine"], result["settings"]
    return (
        f"# This engine beside others, {result['date']}\n\n"
        f"{machine['cpu']}, {machine['cores']} cores; the weights of {settings['model']} for every engine, and the same prompts. Medians of "
        f"{settings['rounds']} rounds in which the engines take turns; while one is measured the others are stopped. A ratio says how many times "
        "as good this engine is as the best peer that holds its weights in 16 or 32 bits (over 1: this engine is better, also where less is "
        "better). It is the median of ratios of one round each, with the lowest and the highest behind it; bold: better in every round. "
        "Only ratios travel from one machine to another."
    )


def _warning(others: Mapping[str, Any] | None) -> list[str]:
    if others is None or others["median"] <= BUSY:
        return []
    return [
        f"> **Not a quiet machine.** Other processes kept {others['median']:.2f} cores busy in the median measurement. Engines whose threads "
        "wait for each other are slowed tenfold by that, others hardly: these figures and ratios are not to be believed."
    ]


def _second_turn(measures: Measures) -> list[str]:
    rows = []
    for measure in measures.of(second_turn.PART):
        gain = measure.ratio(second_turn.WITH, second_turn.WITHOUT)
        rows.append([measure.label, *(value("s", measure.spread(n)) for n in (second_turn.WITH, second_turn.WITHOUT)), ratio(gain)])
    if not rows:
        return []
    about = f"The second turn of a chat, {OURS} alone: pages of the first turn's prompt and answer are found in the prefix cache."
    return ["## Second turn", about, table(["", second_turn.WITH, second_turn.WITHOUT, "times as fast"], rows)]


def _host(measures: Measures, engines: Sequence[str]) -> list[str]:
    rows = measures.of(rates.HOST)
    if not rows:
        return []
    names = [name for name in engines if name in rows[0].values]
    about = "What the engine's thread does in a decode step outside the compiled program: scheduling, dispatch, reading, text. Some of it while the device works."
    return ["## Host time", about, table(["", *names], [[m.label, *(value(m.unit, m.spread(n)) for n in names)] for m in rows])]


def _quality(measures: Measures) -> list[str]:
    rows = measures.of(quality.PART)
    if not rows:
        return []
    names = list(dict.fromkeys(n for m in rows for n in m.values))
    about = (
        "Over a fixed text in the public domain. The default model is a 4-bit file: llama.cpp's Q4_1 multiplies its weights as they are and "
        "rounds what they are multiplied by, all others start from what they stand for. KL divergence is of an engine's "
        f"distribution over the vocabulary from {quality.REFERENCE}'s, the mean over all positions."
    )
    return ["## Quality", about, table(["", *(m.label for m in rows)], [[n, *(value(m.unit, m.spread(n)) for m in rows)] for n in names])]


def _embeddings(measures: Measures, bits: Mapping[str, int]) -> list[str]:
    rates, alike = measures.of(embedding_rates.PART), measures.of(embedding_rates.SIMILARITY)
    if not rates:
        return []
    pieces = ["## Embeddings", "Texts per second, from text to vectors.", comparison(rates, bits)]
    if alike:
        names = [name for name in bits if name in alike[0].values]
        pieces.append(table(["", *names], [[m.label, *(value(m.unit, m.spread(n)) for n in names)] for m in alike]))
    return pieces


def _absent(result: Mapping[str, Any]) -> list[str]:
    missing = {**result["absent"], **{name: f"failed during the run: {why}" for name, why in result["lost"].items()}}
    return ["## Not measured", "\n".join(f"* **{name}**: {why}" for name, why in missing.items())] if missing else []


def _conditions(result: Mapping[str, Any]) -> list[str]:
    others, engines = result["others"], result["engines"]
    lines = [f"* settings: {', '.join(f'{name} {value}' for name, value in result['settings'].items())}"]
    for name, engine in engines.items():
        about = [*(f"{k} {v}" for k, v in engine.get("versions", {}).items()), *(f"{k} {v}" for k, v in engine.get("settings", {}).items())]
        lines.append(f"* {name}: {', '.join(about) or '-'}")
    if others:
        busy = f"median {others['median']:.2f} of {result['machine']['cores']} cores, at most {others['most']:.2f}"
        lines.append(f"* other processes during measurements: {busy} (a quiet machine has under 0.05)")
    lines.append(f"* the run took {result['seconds'] / 60:.0f} minutes")
    return ["## Conditions", "\n".join(lines)]
