"""Texts a second of this engine's embedding model and of transformers, and the similarity of their embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.embeddings import CASES, texts_of
from benchmarks.machine import BackgroundLoad
from benchmarks.peers.engines import OURS, PeerEngine
from benchmarks.peers.measures import Measures
from benchmarks.peers.rates import last_line, rotate
from benchmarks.worker import Answer, Worker, WorkerError

PART, SIMILARITY = "embeddings", "embedding likeness"
REFERENCE = "transformers float32"
MODULES = {OURS: "benchmarks.this_embedder", "transformers": "benchmarks.transformers_embeddings"}


def measure_embeddings(
    engines: Sequence[PeerEngine],
    folder: Path,
    threads: int,
    num_texts: int | None,
    rounds: int,
    measures: Measures,
    lost: dict[str, str],
    others: BackgroundLoad,
    say: Callable[[str], None],
) -> None:
    """Measures the engines that embed, in the types both have. One unrecorded round, then the rounds. `num_texts`: of
    each case, all if None."""
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for engine in engines:
            is_plain = "dtype" in engine.settings and engine.settings.get("weights", "dequantised") == "dequantised"
            if engine.family in MODULES and is_plain:
                try:
                    workers[engine.name] = Worker(
                        engine.python, MODULES[engine.family], str(folder), engine.settings["dtype"], str(threads)
                    )
                except WorkerError as error:
                    lost[engine.name] = f"embedding: {last_line(error)}"
                    continue
                stack.callback(workers[engine.name].close)
        for case in CASES:
            texts = texts_of(case)[:num_texts]
            try:
                answers = _ask(workers, case, texts, rounds, measures, others, say)
            except WorkerError as error:
                lost[case] = last_line(error)
                continue
            record_similarity(measures, case, {name: np.array(answer["embeddings"]) for name, answer in answers.items()})


def _ask(
    workers: Mapping[str, Worker],
    case: str,
    texts: Sequence[str],
    rounds: int,
    measures: Measures,
    others: BackgroundLoad,
    say: Callable[[str], None],
) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    for number in range(rounds + 1):
        for name in rotate(list(workers), number):
            say(f"{f'round {number} of {rounds}' if number else 'warming up'}: embeddings of {case}, {name}")
            others.look()
            answers[name] = workers[name].ask(texts=texts, warm=not number)
            if number:
                others.keep()
                rate = len(texts) / answers[name]["seconds"]
                measures.add(PART, f"embeddings of {case}", "texts/s", name, rate, is_higher_better=True)
    return answers


def record_similarity(measures: Measures, case: str, embeddings: Mapping[str, np.ndarray]) -> None:
    """The lowest cosine of any text's embedding with the reference's, which all have length 1."""
    if REFERENCE in embeddings:
        for name, found in embeddings.items():
            lowest = float((found * embeddings[REFERENCE]).sum(1).min())
            measures.add(SIMILARITY, f"{case}: lowest cosine to {REFERENCE}", "cosine", name, lowest, is_higher_better=True)
