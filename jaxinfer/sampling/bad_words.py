"""Bad words as sequences of tokens, and which tokens they ban next. Imports no JAX.

The device samples before the host has read the token before. So of a word of several tokens the host checks all but the last two, and
the device the one before the last, which it is fed.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxinfer.request import MAX_LOGIT_BIAS, RequestError, SamplingParams
from jaxinfer.tokenizer import Tokenizer

TokenIds = tuple[int, ...]
Ban = tuple[int, int | None]  # a token, and the one it is banned after; None: whatever was before


def tokenize_bad_words(tokenizer: Tokenizer, vocab_size: int, words: Sequence[str]) -> tuple[TokenIds, ...]:
    """The tokens of each word as a text begins with it, and as it follows a space where that makes other tokens; without
    those that hold a token that the model does not have."""
    found: dict[TokenIds, None] = {}
    for word in words:
        plain = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        found |= {plain: None} if plain else {}
        if spaced[-len(plain) :] != plain:  # else whoever completes this one completes the plain one
            found |= {spaced: None}
    return tuple(word for word in found if max(word) < vocab_size)


def check_restrictions(params: SamplingParams, words: Sequence[TokenIds], end_tokens: frozenset[int]) -> None:
    """Raise `RequestError` if `logit_bias`, `bad_words` and `allowed_token_ids` don't fit into a row, or leave nothing."""
    allowed = params.allowed_token_ids
    num_others = len(params.logit_bias) if allowed is None else len(allowed) + sum(token in params.logit_bias for token in allowed)
    if num_others + len(words) > MAX_LOGIT_BIAS:
        name = "bad_words" if words else "allowed_token_ids"
        others = "logit_bias" if allowed is None else "allowed_token_ids and logit_bias"
        message = (
            f"bad_words are {len(words)} sequences of tokens, beside {num_others} entries of {others}: at most {MAX_LOGIT_BIAS} together"
        )
        raise RequestError(message, name)
    if allowed is not None and params.min_tokens and end_tokens.issuperset(allowed):
        message = (
            f"allowed_token_ids has only tokens that end the answer, and min_tokens is {params.min_tokens}: allow another, or leave it out"
        )
        raise RequestError(message, "allowed_token_ids")


def bans_after(words: Sequence[TokenIds], token_ids: Sequence[int], num_prompt: int) -> list[Ban]:
    """What is banned as the successor of a sequence's tokens; of the prompt's none counts."""
    return [(word[-1], None) for word in words if _ends_with(token_ids, num_prompt, len(token_ids), word[:-1])]


def bans_before_newest(words: Sequence[TokenIds], token_ids: Sequence[int], num_prompt: int, num_before: int) -> list[Ban]:
    """What is banned as the successor of a generated token that only the device knows, after the first `num_before`."""
    bans: list[Ban] = []
    for word in words:
        if len(word) == 1:
            bans.append((word[0], None))
        elif _ends_with(token_ids, num_prompt, num_before, word[:-2]):
            bans.append((word[-1], word[-2]))
    return bans


def needs_history(words: Sequence[TokenIds]) -> bool:
    """Whether what `bans_before_newest` gives changes from token to token."""
    return any(len(word) > 2 for word in words)


def _ends_with(token_ids: Sequence[int], first: int, until: int, end: TokenIds) -> bool:
    start = until - len(end)
    return start >= first and tuple(token_ids[start:until]) == end
