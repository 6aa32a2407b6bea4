"""The timeline of a pipeline: when each stage works on which micro-batch, and the bubble share. Imports no JAX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageWork:
    """A stage's work on one micro-batch in one of its rounds, in seconds from the start."""

    stage: int
    micro_batch: int
    round: int
    start: float
    stop: float


@dataclass(frozen=True)
class Timeline:
    num_stages: int
    works: tuple[StageWork, ...]  # in the order of the stages' inputs

    @property
    def seconds(self) -> float:
        """From the first work's start to the last one's end."""
        return max(work.stop for work in self.works)

    @property
    def bubble_share(self) -> float:
        """The share of all stages' time in which they wait, including filling and draining of the pipeline; 0 for works
        without duration."""
        whole = self.num_stages * self.seconds
        return 1 - sum(work.stop - work.start for work in self.works) / whole if whole else 0.0

    def ends(self, micro_batch: int) -> list[float]:
        """When a micro-batch leaves the last stage, in each round."""
        return [work.stop for work in self.works if work.stage == self.num_stages - 1 and work.micro_batch == micro_batch]


def timeline(
    stage_seconds: Sequence[float],
    num_micro_batches: int,
    num_rounds: int = 1,
    *,
    move_seconds: float = 0.0,
    return_seconds: float | None = None,
) -> Timeline:
    """Micro-batches pass through the stages in order, repeatedly. Each stage processes them in the order of rounds,
    then of their numbers. It begins with one when the one before is done and this one has arrived, `move_seconds` after
    the stage before was done. After `return_seconds` a round's result is back at the first stage. The next round of the
    same micro-batch waits there for it, as for a sampled token in decode; None: nothing waits, as in prefill."""
    if not stage_seconds or num_micro_batches < 1 or num_rounds < 1:
        raise ValueError(
            f"{len(stage_seconds)} stages, {num_micro_batches} micro-batches and {num_rounds} rounds: there must be one of each at least"
        )
    free = [0.0] * len(stage_seconds)
    back = [0.0] * num_micro_batches
    works = []
    for round_ in range(num_rounds):
        for micro_batch in range(num_micro_batches):
            arrival = back[micro_batch]
            for stage, seconds in enumerate(stage_seconds):
                start = max(free[stage], arrival)
                free[stage] = start + seconds
                works.append(StageWork(stage, micro_batch, round_, start, free[stage]))
                arrival = free[stage] + move_seconds
            if return_seconds is not None:
                back[micro_batch] = free[-1] + return_seconds
    return Timeline(len(stage_seconds), tuple(works))


def round_seconds(
    stage_seconds: Sequence[float], num_micro_batches: int, *, move_seconds: float = 0.0, return_seconds: float = 0.0
) -> float:
    """The time of a round of all micro-batches once the pipeline is full: the slowest stage's time with each, or the
    time of one through all stages and back where there are too few to fill it."""
    way = sum(stage_seconds) + move_seconds * (len(stage_seconds) - 1) + return_seconds
    return max(num_micro_batches * max(stage_seconds), way)


def steady_bubble_share(
    stage_seconds: Sequence[float], num_micro_batches: int, *, move_seconds: float = 0.0, return_seconds: float = 0.0
) -> float:
    """The share of all stages' time in a round in which they wait, once the pipeline is full."""
    whole = len(stage_seconds) * round_seconds(stage_seconds, num_micro_batches, move_seconds=move_seconds, return_seconds=return_seconds)
    return 1 - num_micro_batches * sum(stage_seconds) / whole if whole else 0.0
