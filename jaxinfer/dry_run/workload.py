"""What requests are like: how long their prompts and answers are. Imports no JAX."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from jaxinfer.config import ConfigError

_MOST_KINDS = 64  # of requests that a trace is made into


@dataclass(frozen=True)
class Kind:
    """Requests taken to be alike."""

    input_length: int  # tokens
    output_length: int
    share: float  # of all requests


@dataclass(frozen=True)
class Workload:
    kinds: tuple[Kind, ...]
    name: str

    @classmethod
    def of_means(cls, input_length: int, output_length: int) -> Workload:
        """Requests of these lengths. Raises `ConfigError` for one under 1."""
        if input_length < 1 or output_length < 1:
            raise ConfigError(f"input_length is {input_length} and output_length {output_length}: both must be at least 1")
        return cls((Kind(input_length, output_length, 1.0),), f"{input_length:,} tokens in, {output_length:,} out")

    @classmethod
    def of_trace(cls, path: Path) -> Workload:
        """Of a file with an object a line, as Mooncake's traces are, of which `input_length` and `output_length` are read: requests by the length
        of their prompts, as many in each kind, each kind of its mean lengths. Prompts' common beginnings are not counted as cached.

        Raises `ConfigError` naming the line.
        """
        lengths = []
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"trace is {path}: it can't be read: {error}") from error
        for number, line in enumerate(lines, 1):
            if line.strip():
                lengths.append(_lengths(path, number, line))
        if not lengths:
            raise ConfigError(f"trace is {path}: it has no requests; give a line such as {_EXAMPLE}")
        lengths.sort()
        count = min(_MOST_KINDS, len(lengths))
        cuts = [lengths[len(lengths) * i // count : len(lengths) * (i + 1) // count] for i in range(count)]
        kinds = (
            Kind(round(sum(n for n, _ in part) / len(part)), round(sum(n for _, n in part) / len(part)), len(part) / len(lengths))
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
        """Tokens that a step of decode finds for a sequence, on average: longer answers are met more often."""
        return round(sum(k.share * k.output_length * (k.input_length + k.output_length / 2) for k in self.kinds) / self.mean_output)


_EXAMPLE = '{"input_length": 6758, "output_length": 500}'


def _lengths(path: Path, number: int, line: str) -> tuple[int, int]:
    try:
        found = json.loads(line)
        lengths = found["input_length"], found["output_length"]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"trace is {path}: line {number} is no request: {error!r}; it must be such as {_EXAMPLE}") from error
    if any(not isinstance(length, int) or isinstance(length, bool) or length < 1 for length in lengths):
        raise ConfigError(f"trace is {path}: line {number} has lengths {lengths}: both must be integers of at least 1")
    return lengths
