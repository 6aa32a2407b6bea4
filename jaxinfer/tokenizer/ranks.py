"""tiktoken.model: one token a line, its bytes in base64 and its rank. BPE merges the pair whose token has the lowest
rank."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path

import tokenizers
from tokenizers import AddedToken

from checkpoints.source import CheckpointError
from jaxinfer.tokenizer.byte_level import CHARACTERS, PreTokenization, byte_level


def read_ranks(file: Path, words: PreTokenization, names: Mapping[int, str], num_special: int) -> tokenizers.Tokenizer:
    """The backend. The `num_special` ids after the ranks are special tokens, named by `names` or reserved. Raises
    `CheckpointError`."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise CheckpointError(f"{file}: line {number} is {line[:40]!r}: it must be base64 and a rank; fetch it again") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or not all(bytes([byte]) in ranks for byte in range(256)):
        raise CheckpointError(f"{file}: its {len(ranks)} tokens must have the ranks from 0 on, and be every byte and more; fetch it again")
    spelled = {token: "".join(map(CHARACTERS.__getitem__, token)) for token in ranks}
    ways = [
        (rank, ranks[token[:at]], ranks[token[at:]], token, at)
        for token, rank in ranks.items()
        for at in range(1, len(token))
        if token[:at] in ranks and token[at:] in ranks
    ]
    merges = [(spelled[token[:at]], spelled[token[at:]]) for _, _, _, token, at in sorted(ways)]
    backend = byte_level({spelled[token]: rank for token, rank in ranks.items()}, merges, words)
    special = [names.get(i, f"<|reserved_token_{i}|>") for i in range(len(ranks), len(ranks) + num_special)]
    backend.add_tokens([AddedToken(name, normalized=False, special=True) for name in special])
    return backend
