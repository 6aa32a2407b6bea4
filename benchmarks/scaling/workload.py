"""The layouts and cases that are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.workload import TOKEN_IDS, WorkloadCase
from sharding.layout import Parallel

KINDS = ("tensor parallel", "pipeline", "both")
NUM_DEVICES = (1, 2, 4, 8)
ONE_DEVICE = Parallel()  # what all others are compared with


@dataclass(frozen=True)
class ScalingWorkload:
    """The layouts and cases of one run."""

    layouts: tuple[Parallel, ...]
    latency: WorkloadCase  # decode of a sequence
    throughput: WorkloadCase  # decode of many
    prompt: WorkloadCase  # one
    prompts: WorkloadCase  # several, one after the other
    rounds: int

    @classmethod
    def full(cls, layouts: Sequence[Parallel], rounds: int, vocab_size: int) -> ScalingWorkload:
        """`layouts`: all of up to eight devices if none is given."""
        of = partial(WorkloadCase, token_ids=_token_ids(vocab_size))
        cases = of("decode", 1, 48), of("decode", 32, 24), of("prefill", 512), of("throughput", 16, 1, 512)
        return cls(tuple(layouts) or all_layouts(), *cases, rounds)

    @classmethod
    def quick(cls, layouts: Sequence[Parallel], vocab_size: int) -> ScalingWorkload:
        """A few tokens in few layouts."""
        of = partial(WorkloadCase, token_ids=_token_ids(vocab_size))
        cases = of("decode", 1, 8), of("decode", 8, 8), of("prefill", 128), of("throughput", 4, 1, 128)
        return cls(tuple(layouts) or (Parallel(), Parallel(2), Parallel(1, 2), Parallel(2, 2)), *cases, 1)

    @property
    def cases(self) -> tuple[WorkloadCase, ...]:
        return self.latency, self.throughput, self.prompt, self.prompts

    @property
    def context(self) -> int:
        """Tokens that a sequence may have."""
        return max(case.context for case in self.cases)


def all_layouts() -> tuple[Parallel, ...]:
    """Layouts of 1, 2, 4 and 8 devices: tensor parallel, in stages, and both."""
    return tuple(Parallel(tp, n // tp) for n in NUM_DEVICES for tp in reversed(NUM_DEVICES) if tp <= n)


def _token_ids(vocab_size: int) -> tuple[int, int]:
    """The range of the prompts' token ids."""
    return TOKEN_IDS if vocab_size >= TOKEN_IDS[1] else (0, vocab_size)


def kind(layout: Parallel) -> str:
    """One of `KINDS`; one device belongs to each of them."""
    if layout.pp == 1:
        return "tensor parallel"
    return "pipeline" if layout.tp == 1 else "both"


def seconds(case: WorkloadCase, tokens_per_second: float) -> float:
    """Decode: until every sequence has its next token. Prefill: of one prompt. Several prompts: of each, as they end
    one after another."""
    return (1 if case.kind == "throughput" else case.size) / tokens_per_second


def label(case: WorkloadCase) -> str:
    """A label of the case's seconds."""
    if case.kind == "decode":
        return f"decode, batch {case.size}: a step"
    if case.kind == "prefill":
        return f"prefill: one prompt of {case.size:,} tokens"
    return f"prefill: each of {case.size} prompts of {case.prompt_tokens:,}"
