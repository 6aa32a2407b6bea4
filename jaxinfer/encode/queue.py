"""EncodeQueue: which waiting texts are encoded next, and in what rows. Imports no JAX."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32

from jaxinfer.encode.batch import SHORTEST
from jaxinfer.encode.texts import TokenIds

Shape = tuple[int, int]  # of a batch: rows, and places for tokens in each

_STEP_TOKENS = 512  # places of the largest batches: larger ones take no less time a token, and decoding would wait for them
_NARROWEST = 32
_LEAST_FULL = 0.75  # of a batch's rows; fewer are quicker one by one


class Place(NamedTuple):
    """A text: whose it is, and its number there."""

    job: EncodeJob
    number: int


_Waiting = tuple[int, int, Place]  # a text's length, minus its order of arrival, and which it is: of the longest the oldest comes last


@dataclass(eq=False, slots=True)
class EncodeJob:
    """One request's texts and, as they come, their embeddings."""

    request_id: str
    token_lists: Sequence[TokenIds]
    embeddings: Float32[np.ndarray, "N D"]
    arrival_time: float  # seconds, as are the other times
    first_launch: float | None = None
    device_seconds: float = 0.0  # its share of its batches' time
    num_waiting: int = 0  # texts that no batch has had yet
    num_left: int = 0  # texts without an embedding


def shapes_for(max_tokens: int) -> list[Shape]:
    """The shapes of batches for texts of so many tokens: for each width one row, and as many as make up a whole step."""
    widths = [min(_NARROWEST, max_tokens)]
    while widths[-1] < max_tokens:
        widths.append(min(2 * widths[-1], max_tokens))
    shapes = [(num_rows, width) for width in widths for num_rows in (1, max(_STEP_TOKENS // width, 1))]
    # Of the narrowest only one row, for a short text alone: where more wait they are as quick in wider ones.
    return list(dict.fromkeys(shape for shape in shapes if shape[0] == 1 or shape[1] > _NARROWEST or len(widths) == 1))


class EncodeQueue:
    """Jobs take turns: each batch begins with the longest text of the next one, and the largest waiting texts that fit fill it up,
    whosever they are. So texts of one batch are of like length, and a short job soon has its turn behind a long one."""

    def __init__(self, max_tokens: int) -> None:
        self.shapes = shapes_for(max_tokens)
        self._most_rows = {width: num_rows for num_rows, width in sorted(self.shapes)}
        self._jobs: deque[EncodeJob] = deque()
        self._texts: list[_Waiting] = []  # in order
        self._num_arrived = 0

    def __len__(self) -> int:
        """Waiting texts."""
        return len(self._texts)

    def add(self, job: EncodeJob) -> None:
        """Have a job's texts wait."""
        self._jobs.append(job)
        job.num_waiting = job.num_left = len(job.token_lists)
        for number, token_ids in enumerate(job.token_lists):
            self._num_arrived += 1
            self._texts.append((len(token_ids), -self._num_arrived, Place(job, number)))
        self._texts.sort()

    def remove(self, job: EncodeJob) -> None:
        """Let go of a job's waiting texts, if there are any."""
        self._take_away({text for text in self._texts if text[2].job is job})

    def take(self) -> tuple[Shape, list[list[Place]]] | None:
        """The next batch: its shape, and the texts of its rows. None if nothing waits."""
        if not self._jobs:
            return None
        self._jobs.rotate(-1)
        rest = list(self._texts)
        first = rest.pop(max(i for i, text in enumerate(rest) if text[2].job is self._jobs[-1]))
        width = self._width(first[0])
        most = self._most_rows[width]
        rows = [[first, *_fill(rest, width - first[0], width // SHORTEST - 1)]]
        while len(rows) < most and (row := _fill(rest, width, width // SHORTEST)):
            rows.append(row)
        if len(rows) < _LEAST_FULL * most:
            most, rows = 1, rows[:1]
        self._take_away({text for row in rows for text in row})
        return (most, width), [[text[2] for text in row] for row in rows]

    def _width(self, length: int) -> int:
        """Of the rows for a text of this length."""
        narrowest = min(self._most_rows)
        # The narrowest for what fits it alone; no text is of no tokens.
        is_alone = sum(text[0] for text in self._texts[: narrowest + 1]) <= narrowest
        return next(w for w in self._most_rows if w >= length and (w > narrowest or is_alone or len(self._most_rows) == 1))

    def _take_away(self, texts: set[_Waiting]) -> None:
        self._texts = [text for text in self._texts if text not in texts]
        for text in texts:
            text[2].job.num_waiting -= 1
        self._jobs = deque(job for job in self._jobs if job.num_waiting)


def _fill(rest: list[_Waiting], room: int, most: int) -> list[_Waiting]:
    """Take the largest texts that fit into `room` tokens, `most` at most."""
    taken: list[_Waiting] = []
    while len(taken) < most and (place := bisect_left(rest, (room + 1,))):
        taken.append(rest.pop(place - 1))
        room -= taken[-1][0]
    return taken
