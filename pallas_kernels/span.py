"""Which cached tokens a query attends to, besides causality. Imports no JAX; `visibility.py` has the same for
arrays."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """All of the context, a sliding window over it (Mistral, Gemma) or the query's own chunk of it (Llama 4). At most
    one is given."""

    window: int | None = None  # the token itself and the window - 1 before it
    chunk: int | None = None  # tokens of a chunk, counted from the context's start

    def __post_init__(self) -> None:
        if self.window is not None and self.chunk is not None:
            raise ValueError(f"a span is a window ({self.window}) or a chunk ({self.chunk}), not both")
        for name in ("window", "chunk"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{name} is {size}: it must be at least 1")

    @property
    def size(self) -> int | None:
        """The most tokens that a query attends to; None where they are not bounded."""
        return self.window if self.window is not None else self.chunk

    def first(self, position: int) -> int:
        """The first position that a query at this position attends to; it attends to all from there on. 0 for all of
        the context."""
        if self.window is not None:
            return max(position - (self.window - 1), 0)
        return position // self.chunk * self.chunk if self.chunk is not None else 0


FULL_ATTENTION = Span()
