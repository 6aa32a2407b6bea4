"""EncodeQueue: packs waiting texts into batches. Imports no JAX."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32

from jaxinfer.encode.batch import SHORTEST
from jaxinfer.encode.text_batching import TokenIds

BatchShape = tuple[int, int]  # of a batch: rows, tokens in each

_STEP_TOKENS = 512  # of the largest batches: larger ones are no faster a token, and decode would wait for them
_NARROWEST, _FINE = 32, 128  # row widths; from the latter on they grow by quarters
_LEAST_FULL = 0.75  # of a batch's rows; with fewer, single rows are faster


class JobText(NamedTuple):
    """A text: its job, and its number there."""

    job: EncodeJob
    number: int


# Length, minus the order of arrival, the text: sorted, so that of the longest texts the oldest comes last.
_WaitingText = tuple[int, int, JobText]


@dataclass(eq=False, slots=True)
class EncodeJob:
    """One request's texts, and their embeddings as they are computed."""

    request_id: str
    token_lists: Sequence[TokenIds]
    embeddings: Float32[np.ndarray, "N D"]
    arrival_time: float  # seconds, like the other times
    first_launch: float | None = None
    device_seconds: float = 0.0  # its share of its batches' time
    num_waiting: int = 0  # texts not in any batch yet
    num_left: int = 0  # texts without an embedding


def widths_for(max_tokens: int) -> list[int]:
    """Row widths for texts of up to this many tokens: doubling while narrow, then in steps of a quarter."""
    widths, width = [], _NARROWEST
    while width < max_tokens:
        widths.append(width)
        width += width if width < _FINE else 1 << (width.bit_length() - 3)
    return [*widths, max_tokens]


class EncodeQueue:
    """Round-robin over jobs: each batch begins with the longest text of the next job, and is filled with the largest
    waiting texts of any job that fit. So texts of a batch have similar lengths, and a short job does not wait long
    behind a long one."""

    def __init__(self, max_tokens: int) -> None:
        widths = widths_for(max_tokens)
        # Rows of a whole step, by width. Without the narrowest: many short texts are as fast in wider rows.
        self._steps = {width: max(_STEP_TOKENS // width, 1) for width in widths[1:] or widths}
        # Single rows, for few texts: fewer widths suffice.
        self._singles = [width for width in widths if width.bit_count() == 1 or width == max_tokens]
        self._jobs: deque[EncodeJob] = deque()
        self._texts: list[_WaitingText] = []  # in order
        self._num_arrived = 0

    @property
    def shapes(self) -> list[BatchShape]:
        """Shapes of all batches that `take` returns."""
        return sorted({(num_rows, width) for width, num_rows in self._steps.items()} | {(1, width) for width in self._singles})

    def __len__(self) -> int:
        """The number of waiting texts."""
        return len(self._texts)

    def add(self, job: EncodeJob) -> None:
        """Queue a job's texts."""
        self._jobs.append(job)
        job.num_waiting = job.num_left = len(job.token_lists)
        for number, token_ids in enumerate(job.token_lists):
            self._num_arrived += 1
            self._texts.append((len(token_ids), -self._num_arrived, JobText(job, number)))
        self._texts.sort()

    def remove(self, job: EncodeJob) -> None:
        """Drop a job's waiting texts, if there are any."""
        self._take_away({text for text in self._texts if text[2].job is job})

    def take(self) -> tuple[BatchShape, list[list[JobText]]] | None:
        """The next batch: its shape, and the texts of each row. None if no text waits."""
        if not self._jobs:
            return None
        self._jobs.rotate(-1)
        first = max(i for i, text in enumerate(self._texts) if text[2].job is self._jobs[-1])
        length = self._texts[first][0]
        width = next(width for width in self._steps if width >= length)
        most = self._steps[width]
        rows = self._rows(first, width, most)
        if len(rows) < _LEAST_FULL * most:
            most, total = 1, sum(text[0] for text in self._texts)
            width = next(single for single in self._singles if single >= max(length, min(total, width)))
            rows = self._rows(first, width, most)
        self._take_away({text for row in rows for text in row})
        return (most, width), [[text[2] for text in row] for row in rows]

    def _rows(self, first: int, width: int, most: int) -> list[list[_WaitingText]]:
        """The first text and the largest others that fit, in at most `most` rows."""
        rest = list(self._texts)
        begun = rest.pop(first)
        rows = [[begun, *_fill(rest, width - begun[0], width // SHORTEST - 1)]]
        while len(rows) < most and (row := _fill(rest, width, width // SHORTEST)):
            rows.append(row)
        return rows

    def _take_away(self, texts: set[_WaitingText]) -> None:
        self._texts = [text for text in self._texts if text not in texts]
        for text in texts:
            text[2].job.num_waiting -= 1
        self._jobs = deque(job for job in self._jobs if job.num_waiting)


def _fill(rest: list[_WaitingText], room: int, most: int) -> list[_WaitingText]:
    """Take the largest texts that fit into `room` tokens; `most` at most."""
    taken: list[_WaitingText] = []
    while len(taken) < most and (place := bisect_left(rest, (room + 1,))):
        taken.append(rest.pop(place - 1))
        room -= taken[-1][0]
    return taken
