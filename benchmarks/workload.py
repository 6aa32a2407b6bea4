"""What is measured, and the one formula that all engines are measured by. Standard library only: it runs in the peers'
environments too."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

Prompts = list[list[int]]
# From prompts and the number of new tokens of each (greedy, ignoring the end-of-sequence token) to, after each step,
# the indices of the prompts that got a token. The first step and the last have been waited for when they come.
Generate = Callable[[Prompts, int], Iterator[Sequence[int]]]

DECODE_PROMPT_TOKENS = 32
TOKEN_IDS = (1_000, 31_000)  # any vocabulary of 32,000 has them; special tokens are elsewhere
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class WorkloadCase:
    kind: str  # decode, prefill or throughput
    # decode: sequences in the batch; prefill: prompt tokens of the one sequence; throughput: requests, all submitted at
    # once
    size: int
    new_tokens: int = 0  # decode: timed tokens of each sequence; throughput: all tokens of each
    prompt_tokens: int = DECODE_PROMPT_TOKENS  # decode and throughput: of each sequence
    token_ids: tuple[int, int] = TOKEN_IDS  # prompts' tokens are sampled from these, the second excluded

    @property
    def label(self) -> str:
        if self.kind == "decode":
            return f"decode, batch {self.size}"
        if self.kind == "prefill":
            return f"prefill, {self.size:,} tokens"
        return f"{self.size} requests at once, {self.prompt_tokens} tokens in, {self.new_tokens} out"

    @property
    def context(self) -> int:
        """Tokens of each sequence at the end."""
        return self.size + 1 if self.kind == "prefill" else self.prompt_tokens + self.new_tokens + 1

    def short(self) -> WorkloadCase:
        """The same shapes with few tokens, to warm up."""
        return replace(self, new_tokens=min(self.new_tokens, WARM_UP_TOKENS))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def prompts(count: int, length: int, seed: int, token_ids: Sequence[int] = TOKEN_IDS) -> Prompts:
    """Random token ids of that range. New with each seed: a prefix cache finds nothing."""
    rng = random.Random(f"{count} {length} {seed}")
    return [[rng.randrange(*token_ids) for _ in range(length)] for _ in range(count)]


def measure(case: WorkloadCase, seed: int, generate: Generate) -> float:
    """Tokens per second. Prefill: the prompt's tokens over the time to the first token. Decode: the tokens that came
    while the whole batch was running, from when the last sequence had its first token to when the first sequence had
    its last. Throughput: all tokens over the whole time, prompts included."""
    length = case.size if case.kind == "prefill" else case.prompt_tokens
    batch = prompts(1 if case.kind == "prefill" else case.size, length, seed, case.token_ids)
    if case.kind == "prefill":
        start = time.perf_counter()
        ends = [time.perf_counter() for step in generate(batch, 1) if step]  # chunks before the last give no token
        assert len(ends) == 1, f"{len(ends)} tokens came"
        return case.size / (ends[0] - start)
    wanted = case.new_tokens + (case.kind == "decode")
    counts = [0] * case.size
    marks = []  # time and tokens so far, at each step of the full batch
    began = time.perf_counter()
    for step in generate(batch, wanted):
        is_full = max(counts) < wanted
        for number in step:
            counts[number] += 1
        if is_full and min(counts) > 0:
            marks.append((time.perf_counter(), sum(counts)))
    ended = time.perf_counter()
    assert counts == [wanted] * case.size, f"{counts} tokens came: {wanted} of each sequence were asked for"
    if case.kind == "throughput":
        return sum(counts) / (ended - began)
    assert len(marks) > 1, f"{case.label}: the first sequence ended before the last began; measure more than {case.new_tokens} new tokens"
    (start, before), (end, after) = marks[0], marks[-1]
    return (after - before) / (end - start)


def cases(decode: Sequence[int], prefill: Sequence[int], new_tokens: int) -> list[WorkloadCase]:
    """Decode cases by batch size, then prefill cases by prompt length."""
    return [WorkloadCase("decode", b, new_tokens) for b in decode] + [WorkloadCase("prefill", n) for n in prefill]
