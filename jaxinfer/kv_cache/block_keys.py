"""What whole blocks of tokens are known by, in a tree of this process and by digest everywhere. Imports no JAX.

A block's key is its token ids, 4 bytes each, and after them what the prompt's segments say beside these. Blocks after
the prompt, and those of a prompt that is token ids alone, have nothing more. A block's digest names it with all before
it: the key in tiers and hand-offs.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from operator import itemgetter
from struct import iter_unpack
from typing import Protocol

from jaxinfer.request import RequestContext
from jaxinfer.segments import Prompt

TOKEN_BYTES = 4
DIGEST_BYTES = 16


class TokenHistory(Protocol):
    """Tokens whose KV is cached, and all else that decides who may find it. `jaxinfer.sequence.Sequence` is one."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def prompt(self) -> Prompt: ...

    @property
    def context(self) -> RequestContext: ...


@dataclass(frozen=True)
class History:
    """The `TokenHistory` of a request that no engine has yet."""

    token_ids: Sequence[int]
    prompt: Prompt
    context: RequestContext


def block_keys(history: TokenHistory, block_size: int, end: int, first: int = 0) -> Iterator[bytes]:
    """The keys of blocks `first` to `end` - 1, which must be whole."""
    tokens = array("i", history.token_ids[first * block_size : end * block_size]).tobytes()
    keys: Iterator[bytes] = map(itemgetter(0), iter_unpack(f"{block_size * TOKEN_BYTES}s", tokens))
    extra = history.prompt.block_digests(block_size)
    return keys if not extra else (key + extra.get(block, b"") for block, key in enumerate(keys, first))


def digests(namespace: str, keys: Iterable[bytes]) -> list[bytes]:
    """What names each block of a run of keys from the first on, 16 bytes each, the same in every process."""
    digest, found = namespace_digest(encoded(namespace)), []
    for key in keys:
        digest = block_digest(digest, key)
        found.append(digest)
    return found


def encoded(namespace: str) -> bytes:
    """A namespace as bytes. It comes from outside: a lone surrogate must stop nobody."""
    return namespace.encode("utf-8", "surrogatepass")


def namespace_digest(namespace: bytes) -> bytes:
    """What stands before a namespace's first blocks."""
    # `person`, so that no namespace can pose as a run of tokens.
    return blake2b(namespace, digest_size=DIGEST_BYTES, person=b"namespace").digest()


def block_digest(before: bytes, key: bytes) -> bytes:
    """Of the block after one with the digest `before`."""
    return blake2b(before + key, digest_size=DIGEST_BYTES).digest()
