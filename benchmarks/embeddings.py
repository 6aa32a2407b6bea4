"""`python -m benchmarks.embeddings`: texts a second of this engine's embedding model and of Hugging Face transformers,
in one run.

Both read the same files, take texts and return NumPy arrays; the fastest of three runs counts. transformers gets the
texts sorted by length, in batches of the size that was fastest in its warm-up. Runs are interleaved, round by round and
in changing order; a ratio is of two measurements of one round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.worker import ROOT, Answer, Worker
from checkpoints.hub import resolve

DTYPES = ("float32", "bfloat16")
WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "for",
    "it",
    "was",
    "with",
    "be",
    "by",
    "on",
    "not",
    "he",
    "they",
    "time",
    "new",
    "more",
)
# number of texts, least and most words of each
CASES = {"queries": (128, 4, 24), "mixed": (128, 4, 250), "passages": (48, 120, 250)}


def texts_of(case: str) -> list[str]:
    """Texts of common words, which are a token each. In "mixed" short texts are as frequent as long ones, in any
    order."""
    count, low, high = CASES[case]
    random = np.random.default_rng(count + high)
    lengths = np.exp(random.uniform(np.log(low), np.log(high), count)).astype(int)
    return [" ".join(random.choice(WORDS, length)) for length in lengths]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.embeddings", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="minilm", help="as for `jaxinfer serve --embedding-model`: a folder both engines read")
    parser.add_argument("--peer-python", type=Path, default=ROOT / ".venv-parity/bin/python", help="Python with torch and transformers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the peer; this engine takes what cores there are")
    parser.add_argument("--output", type=Path, help="also write what was measured to this JSON file")
    return parser.parse_args(arguments)


def main() -> None:
    arguments, console = parse_arguments(), Console(width=140)
    folder = str(resolve(arguments.model))
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for dtype in DTYPES:
            for name, python, module in (
                (f"transformers {dtype}", arguments.peer_python, "benchmarks.transformers_embeddings"),
                (f"jaxinfer {dtype}", Path(sys.executable), "benchmarks.this_embedder"),
            ):
                workers[name] = Worker(str(python), module, folder, dtype, str(arguments.threads))
                stack.callback(workers[name].close)
        seconds: dict[str, dict[str, list[float]]] = {case: {name: [] for name in workers} for case in CASES}
        answers: dict[str, dict[str, Answer]] = {case: {} for case in CASES}
        for number in range(-1, arguments.rounds):  # the first is the warm-up
            for case in CASES:
                for name in list(workers) if number % 2 else list(workers)[::-1]:
                    answer = workers[name].ask(texts=texts_of(case), warm=number < 0)
                    answers[case][name] = answer
                    if number >= 0:
                        seconds[case][name].append(answer["seconds"])
    report(console, seconds, answers)
    if arguments.output:
        arguments.output.write_text(json.dumps(seconds, indent=1) + "\n", encoding="utf-8")


def report(console: Console, seconds: dict[str, dict[str, list[float]]], answers: dict[str, dict[str, Answer]]) -> None:
    """Medians, ratios to the better transformers of the same round, and the similarity of the embeddings."""
    table = Table("texts", "engine", "texts/s", "ratio to the better transformers (low-high)", "lowest cosine", "notes")
    for case, by_name in seconds.items():
        peers = [name for name in by_name if name.startswith("transformers")]
        best = min(peers, key=lambda name: statistics.median(by_name[name]))
        expected = np.array(answers[case]["transformers float32"]["embeddings"])
        for name, measured in by_name.items():
            ratios = sorted(theirs / ours for theirs, ours in zip(by_name[best], measured, strict=True))
            cosine = (np.array(answers[case][name]["embeddings"]) * expected).sum(1).min()
            shown = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
            rate = CASES[case][0] / statistics.median(measured)
            table.add_row(case, name, f"{rate:,.0f}", shown, f"{cosine:.5f}", answers[case][name]["notes"])
    console.print(table)


if __name__ == "__main__":
    main()
