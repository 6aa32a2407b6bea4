"""A prompt as segments: token ids today, images later. Imports no JAX.

A segment holds a stretch of the prompt's positions. It says which token ids these have and, where the ids don't tell
all, a digest of what is there. The prefix cache and its tiers name blocks by both: see `kv_cache.block_keys`.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np
from jaxtyping import Int32

TokenArray = Int32[np.ndarray, " T"]

# Of a block that a segment touches: the first position in the block, and in the segment; how many; bytes of the digest.
_PLACE = struct.Struct("<IIII")
_NONE: Mapping[int, bytes] = {}


class Segment(Protocol):
    """A stretch of a prompt."""

    @property
    def token_ids(self) -> TokenArray:
        """One for each of its positions; placeholders where they stand for something else."""
        ...

    @property
    def digest(self) -> bytes:
        """What names its content beside its token ids; b"" where these say it all."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class TokenSegment:
    """Text, as token ids."""

    token_ids: TokenArray
    digest: ClassVar[bytes] = b""


@dataclass(frozen=True, slots=True, eq=False)
class PrefilledSegment:
    """A segment whose content stayed where it was prefilled: its keys and values are all that is needed of it."""

    token_ids: TokenArray
    digest: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Segments in order. Who makes one vouches for its token ids: see `Engine.validate`."""

    segments: tuple[Segment, ...]
    token_ids: TokenArray = field(init=False)

    def __post_init__(self) -> None:
        parts = [segment.token_ids for segment in self.segments]
        token_ids = parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.int32), *parts])
        object.__setattr__(self, "token_ids", token_ids)

    @classmethod
    def of_tokens(cls, token_ids: Iterable[int]) -> Prompt:
        """A prompt of token ids alone."""
        if not isinstance(token_ids, np.ndarray):
            token_ids = np.frombuffer(array("i", token_ids), np.int32)
        return cls((TokenSegment(token_ids.astype(np.int32, copy=False)),))

    def __len__(self) -> int:
        return len(self.token_ids)

    def block_digests(self, block_size: int) -> Mapping[int, bytes]:
        """What names each block of so many positions beside its token ids, by the block's number; those that token ids
        alone name are left out."""
        if not any(segment.digest for segment in self.segments):
            return _NONE
        found: dict[int, bytes] = {}
        start = 0
        for segment in self.segments:
            end = start + len(segment.token_ids)
            for block in range(start // block_size, -(-end // block_size)) if segment.digest else ():
                first, last = max(start, block * block_size), min(end, (block + 1) * block_size)
                place = _PLACE.pack(first - block * block_size, first - start, last - first, len(segment.digest))
                found[block] = found.get(block, b"") + place + segment.digest
            start = end
        return found
