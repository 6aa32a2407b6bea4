"""Block sizes of the kernel, on which all parts of its code must agree."""

from __future__ import annotations

from dataclasses import dataclass

LANES = 16
VECTOR = f"<{LANES} x float>"


@dataclass(frozen=True)
class PrefillBlocking:
    """The kernel processes `at_once` rows by up to `vectors` vectors of sums at a time, over runs of `run` context
    tokens."""

    at_once: int
    vectors: int
    run: int
    head_size: int
    group: int
    page_size: int
    value_bytes: int = 4  # of the pool: float32, or codes of float8

    def split_vectors(self, vectors: int) -> list[int]:
        """`vectors` vectors as parts that are summed at a time, as equal as possible."""
        parts = -(-vectors // self.vectors)
        return [vectors * (i + 1) // parts - vectors * i // parts for i in range(parts)]
