"""PrefillBatch: one prefill step as padded NumPy arrays: what the host gives the prefill program. Imports no JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from jaxinfer.prefill.scheduler import Chunk, Fork
from jaxinfer.programs.buckets import QUERY_TILE, prefill_rows
from jaxinfer.sampling.bad_words import bans_after
from jaxinfer.sampling.params import SamplingRows, neutral_rows, set_row
from jaxinfer.sequence import Sequence as EngineSequence
from jaxinfer.structured.grammars import Grammar


class PackedTokens(NamedTuple):
    """T packed tokens of at most R sequences with W pages each: for each token block, its page in each group of layers.
    Unused rows have query_len 0; their outputs are ignored."""

    token_ids: Int32[Any, " T"]
    page_table: Int32[Any, "R W"]
    query_start: Int32[Any, " R"]
    query_len: Int32[Any, " R"]
    kv_len: Int32[Any, " R"]  # tokens of context, including this step's


class PrefillBatch(NamedTuple):
    """Packed tokens, and how to sample and score them."""

    packed: PackedTokens
    next_token_ids: Int32[Any, " T"]  # each token's successor in its prompt, for prompt log-probabilities
    wants_prompt_logprobs: bool
    num_generated: Int32[Any, " R"]
    sampling: SamplingRows
    grammars: Sequence[Grammar | None] = ()  # of the rows, if any has one


def build_batch(chunks: Sequence[Chunk], num_tokens: int, table_width: int) -> PrefillBatch:
    """Pack chunks into a bucket of `num_tokens`."""
    num_rows = prefill_rows(num_tokens)
    batch = empty_batch(num_tokens, num_rows, table_width)
    packed, start = batch.packed, 0
    for row, chunk in enumerate(chunks):
        sequence, end = chunk.sequence, chunk.start + chunk.length
        packed.token_ids[start : start + chunk.length] = sequence.token_ids[chunk.start : end]
        following = sequence.token_ids[chunk.start + 1 : end + 1]
        batch.next_token_ids[start : start + len(following)] = following
        packed.page_table[row, : len(sequence.prefill.pages)] = sequence.prefill.pages
        packed.query_start[row], packed.query_len[row], packed.kv_len[row] = start, chunk.length, end
        batch.num_generated[row] = sequence.num_output
        if chunk.is_last:
            _set_row(batch.sampling, row, sequence)
        start += -(-chunk.length // QUERY_TILE) * QUERY_TILE
    return batch._replace(wants_prompt_logprobs=any(chunk.sequence.needs_prompt_scores for chunk in chunks), grammars=grammars_for(chunks))


def sampling_of_forks(forks: Sequence[Fork], num_rows: int) -> SamplingRows:
    """Sampling parameters for each row of a prompt's last hidden state."""
    rows = neutral_rows(num_rows)
    for row, fork in enumerate(forks):
        _set_row(rows, row, fork.sequence)
    return rows


def grammars_for(chunks: Sequence[Chunk]) -> Sequence[Grammar | None]:
    """Grammars of the rows whose first tokens are to be sampled; none if there is no grammar."""
    grammars = [chunk.sequence.grammar if chunk.is_last else None for chunk in chunks]
    return grammars if any(grammars) else ()


def _set_row(rows: SamplingRows, row: int, sequence: EngineSequence) -> None:
    """Set a row for the token after all that the host knows."""
    bans = bans_after(sequence.bad_words, sequence.token_ids, sequence.num_prompt)
    set_row(rows, row, sequence.params, sequence.seed, sorted(sequence.end_tokens), bans)


def empty_batch(num_tokens: int, num_rows: int, table_width: int) -> PrefillBatch:
    """A batch of padding only."""
    packed = PackedTokens(
        token_ids=np.zeros(num_tokens, np.int32),
        page_table=np.zeros((num_rows, table_width), np.int32),
        query_start=np.zeros(num_rows, np.int32),
        query_len=np.zeros(num_rows, np.int32),
        kv_len=np.zeros(num_rows, np.int32),
    )
    return PrefillBatch(packed, np.zeros(num_tokens, np.int32), False, np.zeros(num_rows, np.int32), neutral_rows(num_rows))
