"""Workloads: the lengths of requests' prompts and answers. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxinfer.config import ConfigError
from jaxinfer.planner.trace import read_trace

_MOST_KINDS = 64  # into which the requests of a trace are grouped


@dataclass(frozen=True)
class RequestClass:
    """A class of requests with equal lengths."""

    input_length: int  # tokens
    output_length: int
    share: float  # of all requests


@dataclass(frozen=True)
class Workload:
    kinds: tuple[RequestClass, ...]
    name: str

    @classmethod
    def of_means(cls, input_length: int, output_length: int) -> Workload:
        """A single kind of these lengths. Raises `ConfigError` for a length under 1."""
        if input_length < 1 or output_length < 1:
            raise ConfigError(f"input_length is {input_length} and output_length {output_length}: both must be at least 1")
        return cls((RequestClass(input_length, output_length, 1.0),), f"{input_length:,} tokens in, {output_length:,} out")

    @classmethod
    def of_trace(cls, path: Path) -> Workload:
        """Lengths from a trace (see `read_trace`). Requests are sorted by prompt length and grouped into kinds of equal
        size, each with its mean lengths. Shared prefixes are not counted as cached.

        Raises `TraceError` naming the line.
        """
        lengths = [(request.input_length, request.output_length) for request in read_trace(path, only_lengths=True)]
        lengths.sort()
        count = min(_MOST_KINDS, len(lengths))
        cuts = [lengths[len(lengths) * i // count : len(lengths) * (i + 1) // count] for i in range(count)]
        kinds = (
            RequestClass(round(sum(n for n, _ in part) / len(part)), round(sum(n for _, n in part) / len(part)), len(part) / len(lengths))
            for part in cuts
        )
        made = cls(tuple(kinds), "")
        means = f"{made.mean_input:,.0f} tokens in, {made.mean_output:,.0f} out on average"
        return cls(made.kinds, f"{len(lengths):,} requests of {path.name}: {means}")

    @property
    def mean_input(self) -> float:
        return sum(kind.share * kind.input_length for kind in self.kinds)

    @property
    def mean_output(self) -> float:
        return sum(kind.share * kind.output_length for kind in self.kinds)

    @property
    def decode_context(self) -> int:
        """Mean context of a sequence in a decode step; longer answers take part in more steps."""
        return round(sum(k.share * k.output_length * (k.input_length + k.output_length / 2) for k in self.kinds) / self.mean_output)
