"""Collectives of a compiled program, counted in its text."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass

# Named alone, or with `-start` the first of an asynchronous pair, whose `-done` is the same one. Those that are wrapped
# in an `async-start` stand in a computation of their own, by their plain names.
_OPERATION = re.compile(
    r"^\s*(?:ROOT )?%?[\w.-]+ = (?P<type>\(.*?\)|\S+) "
    r"(?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast)(?P<start>-start)?\(",
    re.MULTILINE,
)
_ARRAY = re.compile(r"([a-z]+(\d+)?\w*)\[([\d,]*)\]")


@dataclass(frozen=True, order=True)
class Collective:
    """One operation, of all devices together."""

    kind: str  # such as "all-reduce"
    # each device's part of the result, such as "bf16[32,8192]"; several where XLA combined several
    arrays: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of each device's part of the result."""
        return sum(map(_num_bytes, self.arrays))

    def __str__(self) -> str:
        return f"{self.kind} {', '.join(self.arrays)}"


def collectives(program: str) -> Counter[Collective]:
    """The collectives in the text of an optimised HLO module, each counted once: those in a loop run oftener, those in
    a branch perhaps not."""
    return Counter(_read(found) for found in _OPERATION.finditer(program))


def collectives_a_layer(program: str, longer: str) -> Counter[Collective]:
    """The collectives of one layer: those that the same program of a model with one more layer has more. Raises
    `ValueError` if it lacks any."""
    fewer, more = collectives(program), collectives(longer)
    if missing := fewer - more:
        raise ValueError(f"the program with one more layer lacks {', '.join(map(str, missing.elements()))}")
    return more - fewer


def _read(found: re.Match[str]) -> Collective:
    arrays = [array[0] for array in _ARRAY.finditer(found["type"])]
    # The operands, then the results, then perhaps the name of the pair; for a sum only the results, in the XLA of JAX
    # 0.10.
    if found["start"] and (found["kind"] != "all-reduce" or found["type"].startswith("((")):
        while arrays[-1] == "u32[]":
            arrays.pop()
        arrays = arrays[len(arrays) // 2 :]
    return Collective(found["kind"], tuple(arrays))


def _num_bytes(array: str) -> int:
    found = _ARRAY.fullmatch(array)
    assert found is not None, array
    bits = 8 if found[1] == "pred" else int(found[2])
    return math.ceil(math.prod(int(size) for size in found[3].split(",") if size) * bits / 8)
