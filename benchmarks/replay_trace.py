"""A service's trace (see `jaxinfer.planner.trace`), scaled to a machine: which requests, when, how long, and prompts
whose tokens are equal where the trace's hashes are."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.planner.trace import BLOCK, TraceError, TraceRequest


def pick(trace: Sequence[TraceRequest], count: int, how: str) -> list[TraceRequest]:
    """About `count` requests (exactly for `how` "first"): the first ones, or those of whole sessions, sampled from all
    over the trace. In order of arrival."""
    if how == "first" or count >= len(trace):
        return list(trace[:count])
    sessions: dict[tuple[int, ...], list[int]] = {}
    for number, request in enumerate(trace):
        sessions.setdefault(request.session, []).append(number)
    order = list(sessions.values())
    random.Random(0).shuffle(order)  # the same in every run
    chosen: list[int] = []
    for members in order:
        if len(chosen) + len(members) <= count:
            chosen += members
    if not chosen:
        raise TraceError(f"no session of the trace has as few as {count} requests: pick the first ones instead")
    return [trace[number] for number in sorted(chosen)]


@dataclass(frozen=True, slots=True)
class Scale:
    """`block_size` tokens represent a block of the trace; outputs are multiplied by `output`, times by `time`."""

    block_size: int
    output: float
    time: float = 1.0

    @classmethod
    def of(cls, length: float, page_size: int, output: float | None = None, time: float = 1.0) -> Scale:
        """The scale nearest `length` at which a block is whole pages, at least one: a server that caches whole pages
        then finds what the trace shares, and nothing less."""
        block_size = max(round(BLOCK * length / page_size), 1) * page_size
        return cls(block_size, block_size / BLOCK if output is None else output, time)

    @property
    def length(self) -> float:
        return self.block_size / BLOCK

    def num_prompt(self, request: TraceRequest) -> int:
        whole, rest = divmod(request.input_length, BLOCK)
        return whole * self.block_size + -(-rest * self.block_size // BLOCK)

    def num_output(self, request: TraceRequest) -> int:
        return max(round(request.output_length * self.output), 1)

    def fits(self, request: TraceRequest, max_model_len: int) -> bool:
        return self.num_prompt(request) + self.num_output(request) <= max_model_len


@dataclass(frozen=True, slots=True)
class Prompts:
    """Creates the prompts' tokens: from `low` to `high` - 1, and the same for a hash wherever it occurs. Another salt
    gives other tokens."""

    scale: Scale
    low: int
    high: int
    salt: int = 0

    def tokens(self, request: TraceRequest) -> np.ndarray:
        """int32[prompt tokens]."""
        blocks = [self._block(hash_id) for hash_id in request.hash_ids]
        return np.concatenate(blocks)[: self.scale.num_prompt(request)]

    def _block(self, hash_id: int) -> np.ndarray:
        rng = np.random.Generator(np.random.Philox(key=np.array([self.salt, hash_id % 2**64], np.uint64)))
        return rng.integers(self.low, self.high, self.scale.block_size, dtype=np.int32)


def pages_of(tokens: np.ndarray, page_size: int) -> Iterator[bytes]:
    """A key for each whole page that a cache may hold of a prompt, from the first on: equal keys mean equal tokens up
    to the page's end. The last token is never among them: it has to be computed, so that there is something to sample
    from."""
    so_far = hashlib.blake2b(digest_size=16)
    for end in range(page_size, len(tokens), page_size):
        so_far.update(tokens[end - page_size : end].tobytes())
        yield so_far.digest()
