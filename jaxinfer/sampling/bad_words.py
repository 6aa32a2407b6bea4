"""Bad words as token sequences, and which tokens they ban next. Imports no JAX.

The device samples before the host has read the previous token. So the host checks all but the last two tokens of a
word, and the device checks the one before the last, which is its input.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxinfer.request import MAX_LOGIT_BIAS, RequestError, SamplingParams
from jaxinfer.tokenizer import Tokenizer

WordTokens = tuple[int, ...]
Ban = tuple[int, int | None]  # a token, and the one after which it is banned; None: after any


def tokenize_bad_words(tokenizer: Tokenizer, vocab_size: int, words: Sequence[str]) -> tuple[WordTokens, ...]:
    """Each word's tokens at the start of a text, and after a space if those differ; without words that contain a token
    that the model doesn't have."""
    found: dict[WordTokens, None] = {}
    for word in words:
        plain = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        found |= {plain: None} if plain else {}
        if spaced[-len(plain) :] != plain:  # otherwise banning the plain form bans this one too
            found |= {spaced: None}
    return tuple(word for word in found if max(word) < vocab_size)


def check_restrictions(params: SamplingParams, words: Sequence[WordTokens], end_tokens: frozenset[int]) -> None:
    """Raise `RequestError` if `logit_bias`, `bad_words` and `allowed_token_ids` exceed a row's room, or allow no
    token."""
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


def bans_after(words: Sequence[WordTokens], token_ids: Sequence[int], num_prompt: int) -> list[Ban]:
    """Tokens banned after a sequence; prompt tokens don't count."""
    return [(word[-1], None) for word in words if _ends_with(token_ids, num_prompt, len(token_ids), word[:-1])]


def bans_before_newest(words: Sequence[WordTokens], token_ids: Sequence[int], num_prompt: int, num_before: int) -> list[Ban]:
    """Bans for the token after one that only the device knows, which follows the first `num_before` tokens."""
    bans: list[Ban] = []
    for word in words:
        if len(word) == 1:
            bans.append((word[0], None))
        elif _ends_with(token_ids, num_prompt, num_before, word[:-2]):
            bans.append((word[-1], word[-2]))
    return bans


def needs_history(words: Sequence[WordTokens]) -> bool:
    """Whether `bans_before_newest` changes from token to token."""
    return any(len(word) > 2 for word in words)


def _ends_with(token_ids: Sequence[int], first: int, until: int, end: WordTokens) -> bool:
    start = until - len(end)
    return start >= first and tuple(token_ids[start:until]) == end
