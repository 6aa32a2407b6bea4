"""The golden logits, as objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MAX_LOGIT_DIFFERENCE = 2e-3
CLOSE_CALL = 1e-3  # where the two best logits are nearer than this, rounding may decide, and what follows may differ


@dataclass(frozen=True)
class Scores:
    """Of N positions: the logits at `vocab_ids`, the best ids and their logits, and the logsumexp over the vocabulary."""

    vocab_ids: np.ndarray
    logits: np.ndarray
    best_ids: np.ndarray
    best_logits: np.ndarray
    logsumexp: np.ndarray

    @property
    def margins(self) -> np.ndarray:
        """Between the best two."""
        return self.best_logits[:, 0] - self.best_logits[:, 1]

    def difference(self, logits: np.ndarray) -> float:
        """Largest absolute difference to logits [N, V], over all that is stored."""
        wide = logits.astype(np.float64)
        top = wide.max(-1)
        differences = (
            np.abs(logits[:, self.vocab_ids] - self.logits).max(),
            np.abs(np.take_along_axis(logits, self.best_ids, -1) - self.best_logits).max(),
            np.abs(np.log(np.exp(wide - top[:, None]).sum(-1)) + top - self.logsumexp).max(),
        )
        return float(max(differences))


@dataclass(frozen=True)
class GoldenPrompt:
    """A prompt, the reference's greedy tokens, the scores each was chosen from, and the scores at some of the prompt's positions."""

    name: str
    prompt_ids: list[int]
    tokens: list[int]
    steps: Scores
    prefill_positions: np.ndarray
    prefill: Scores


def load(path: Path = Path(__file__).parent / "logits.npz") -> list[GoldenPrompt]:
    with np.load(path) as file:
        arrays = dict(file)
    names = dict.fromkeys(key.partition("/")[0] for key in arrays if "/" in key)

    def scores(prefix: str) -> Scores:
        return Scores(arrays["vocab_ids"], *(arrays[f"{prefix}{field}"] for field in ("logits", "best_ids", "best_logits", "logsumexp")))

    return [
        GoldenPrompt(
            name,
            arrays[f"{name}/prompt_ids"].tolist(),
            arrays[f"{name}/tokens"].tolist(),
            scores(f"{name}/"),
            arrays[f"{name}/prefill_positions"],
            scores(f"{name}/prefill_"),
        )
        for name in names
    ]


def first_difference(tokens: Sequence[int], reference: Sequence[int], margins: np.ndarray) -> int | None:
    """The first step whose token differs though no step so far, itself included, was a close call; None where there is none."""
    assert len(tokens) == len(reference) == len(margins)
    for step, (token, expected) in enumerate(zip(tokens, reference, strict=True)):
        if margins[step] < CLOSE_CALL:
            return None
        if token != expected:
            return step
    return None
