"""What the reference made of each family's small checkpoint (tests/families/checkpoint.py)."""

from __future__ import annotations

from pathlib import Path

from tests.golden import read

FOLDER = Path(__file__).parent
NAMES = tuple(sorted(file.parent.name for file in FOLDER.glob("*/golden.npz")))
NUM_TOKENS = 32  # greedy, of each prompt
MIN_MARGIN = 0.01  # between the best two scores of every greedy step: far more than rounding changes
MIN_KINDS = 9  # of tokens among them


def load(family: str) -> list[read.GoldenPrompt]:
    return read.load(FOLDER / family / "golden.npz")
