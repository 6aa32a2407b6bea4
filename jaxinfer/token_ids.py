"""The check of token ids that come from outside. Imports no JAX."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from numbers import Integral

import numpy as np

from jaxinfer.request import RequestError
from jaxinfer.segments import TokenArray


class TokenIdError(RequestError):
    """A token id that the model has no embedding for."""

    def __init__(self, name: str, token_id: object, vocab_size: int, param: str | None = None) -> None:
        super().__init__(f"{name} has token id {token_id!r}: this model's are 0 to {vocab_size - 1}", param or name)
        self.name, self.token_id, self.vocab_size = name, token_id, vocab_size


def checked_tokens(token_ids: Sequence[int] | np.ndarray, vocab_size: int, name: str, param: str | None = None) -> TokenArray:
    """A copy of token ids, in one dtype and not to be written to. Raises `TokenIdError` for the first that is no
    integer from 0 to `vocab_size` - 1: `name` is what its message calls them, `param` the field at fault."""
    tokens = _array(token_ids)
    if tokens is None or (tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size):
        plain = token_ids.tolist() if isinstance(token_ids, np.ndarray) else token_ids
        raise TokenIdError(name, next(token for token in plain if not _is_known(token, vocab_size)), vocab_size, param)
    tokens = tokens.astype(np.int32, copy=False)
    tokens.flags.writeable = False
    return tokens


def _array(token_ids: Sequence[int] | np.ndarray) -> np.ndarray | None:
    """None where any is no integer, or one that int32 doesn't hold."""
    if isinstance(token_ids, np.ndarray):
        return token_ids.copy() if token_ids.dtype.kind in "iu" else None
    try:
        return np.frombuffer(array("i", token_ids), np.int32)
    except (TypeError, OverflowError):
        return None


def _is_known(token_id: object, vocab_size: int) -> bool:
    return isinstance(token_id, Integral) and 0 <= int(token_id) < vocab_size
