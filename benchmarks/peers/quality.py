"""How far an engine's distributions are from float32's: perplexity of a fixed text, KL divergence, and how often the
best token is the same.

The text is the openings of Pride and Prejudice and of Alice's Adventures in Wonderland, both in the public domain.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float

from benchmarks.peers.measures import Measures
from benchmarks.peers.rates import last_line
from benchmarks.worker import Worker, WorkerError

PART = "quality"
REFERENCE = "jaxinfer float32"
TEXT = Path(__file__).parent / "quality_text.txt"
_ROWS = 64  # positions at a time: a row is a vocabulary in float64


@dataclass(frozen=True)
class DistributionDistance:
    perplexity: float
    divergence: float | None  # KL(reference || this) in nats, the mean over all positions; None: there is no reference
    agreement: float | None  # share of positions with the reference's best token


def windows(token_ids: Sequence[int], size: int, count: int) -> list[list[int]]:
    """The text in whole windows, each read from its own beginning. Raises ValueError where it has none."""
    whole = [list(token_ids[i : i + size]) for i in range(0, len(token_ids) - size + 1, size)][:count]
    if not whole:
        raise ValueError(f"the text has {len(token_ids)} tokens: a window of {size} does not fit")
    return whole


def compare_distributions(
    logits: Float[np.ndarray, "T V"], tokens: Sequence[Sequence[int]], reference: Float[np.ndarray, "T V"] | None = None
) -> DistributionDistance:
    """Compares all windows' positions, one after another. Perplexity is of each token but a window's first, given those
    before it."""
    nexts = [token for window in tokens for token in (*window[1:], -1)]  # -1: nothing follows
    assert len(nexts) == len(logits), f"{len(logits)} rows of logits for {len(nexts)} tokens"
    surprise = divergence = 0.0
    agreements = 0
    for start in range(0, len(logits), _ROWS):
        rows = slice(start, start + _ROWS)
        own = _log_softmax(logits[rows])
        surprise -= sum(own[i, token] for i, token in enumerate(nexts[rows]) if token >= 0)
        if reference is not None:
            other = _log_softmax(reference[rows])
            divergence += float((np.exp(other) * (other - own)).sum())
            agreements += int((own.argmax(-1) == other.argmax(-1)).sum())
    perplexity = float(np.exp(surprise / sum(token >= 0 for token in nexts)))
    if reference is None:
        return DistributionDistance(perplexity, None, None)
    return DistributionDistance(perplexity, divergence / len(logits), agreements / len(logits))


def _log_softmax(logits: Float[np.ndarray, "T V"]) -> Float[np.ndarray, "T V"]:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def measure_quality(
    workers: Mapping[str, Worker],
    tokens: Sequence[Sequence[int]],
    measures: Measures,
    lost: dict[str, str],
    say: Callable[[str], None],
) -> None:
    """Measures the reference first. Where it is not among the workers, only perplexity is measured."""
    reference = None
    with tempfile.TemporaryDirectory(prefix="jaxinfer-logits-") as folder:
        for name in sorted(workers, key=lambda name: name != REFERENCE):
            if name in lost:
                continue
            say(f"logits of {sum(map(len, tokens)):,} tokens, {name}")
            path = Path(folder) / "logits.npy"
            try:
                workers[name].ask(logits_of=tokens, path=str(path))
            except WorkerError as error:
                lost[name] = f"logits: {last_line(error)}"
                continue
            logits = np.load(path)
            if name == REFERENCE:
                reference = logits
            found = compare_distributions(logits, tokens, reference)
            measures.add(PART, "perplexity", "", name, found.perplexity, is_higher_better=False)
            measures.add(PART, "KL divergence to jaxinfer float32", "nats", name, found.divergence, is_higher_better=False)
            measures.add(PART, "best token the same", "share", name, found.agreement, is_higher_better=True)
