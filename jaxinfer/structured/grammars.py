"""Grammars of structured outputs: compiled once for a tokenizer, followed token by token. Imports no JAX.

llguidance (https://github.com/guidance-ai/llguidance) compiles and follows them. It works on bytes, so that an answer's
tokens may be cut in any way.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import llguidance
import numpy as np
from jaxtyping import Int32

from jaxinfer.request import RequestError, StructuredOutputs
from jaxinfer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# What a grammar may cost, so that no request holds up the others: of a schema of a hundred keys a twentieth.
_LIMITS = llguidance.LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
)
_CACHED = 256  # compiled grammars
_ALL_ALLOWED = -1  # a word of a mask


class Grammar:
    """What may follow in one sequence. Never shared: each sequence follows its own."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def accept(self, token_ids: Sequence[int]) -> None:
        """Go on after these tokens. What comes after the grammar's end is ignored."""
        if not self._matcher.is_stopped():
            self._matcher.consume_tokens(list(token_ids))

    def roll_back(self, num_tokens: int) -> None:
        """Forget the last tokens."""
        self._matcher.rollback(num_tokens)

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow but the end."""
        return bool(self._matcher.is_stopped())

    @property
    def error(self) -> str | None:
        """Why it can't be followed any further: a limit was reached."""
        return self._matcher.get_error() if self._matcher.is_error() else None

    def fill(self, mask: Int32[np.ndarray, " W"]) -> None:
        """Set the bits of the tokens that may come next."""
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)


class Grammars:
    """Any thread may call it. `vocab_size`: of the model's logits."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, max(vocab_size, tokenizer.vocab_size)
        self._lock = threading.Lock()
        self._tables: llguidance.LLTokenizer | None = None
        self._compiled = lru_cache(maxsize=_CACHED)(self._compile)

    @property
    def mask_words(self) -> int:
        """32-bit words of a mask."""
        return -(-self._vocab_size // 32)

    def _prepared(self) -> llguidance.LLTokenizer:
        """The tokenizer's tables. The first request has them made: a second for 100,000 tokens."""
        with self._lock:
            if self._tables is None:
                self._tables = llguidance.LLTokenizer(
                    self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=list(self._tokenizer.eos_token_ids)
                )
            return self._tables

    def check(self, wanted: StructuredOutputs) -> None:
        """Compile a grammar. Raises `RequestError` for one that is wrong or too large, with the reason."""
        self._compiled(wanted)

    def follow(self, wanted: StructuredOutputs, output_ids: Sequence[int] = ()) -> Grammar:
        """The grammar of a sequence that has generated these tokens. Raises `RequestError`."""
        grammar = Grammar(self._compiled(wanted).deep_copy())
        grammar.accept(output_ids)
        return grammar

    def _compile(self, wanted: StructuredOutputs) -> llguidance.LLMatcher:
        tables = self._prepared()
        try:
            text = grammar_text(wanted)
        except ValueError as error:
            raise RequestError(f"structured outputs: {error}", "structured_outputs") from error
        matcher = llguidance.LLMatcher(tables, text, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            reason = matcher.get_error().partition("\n\nError generating grammar")[0].strip()
            raise RequestError(f"structured outputs can't be held to this {wanted.kind}: {reason[:500]}", "structured_outputs")
        probe = matcher.deep_copy()  # some limits are met only where the first tokens are looked for
        Grammar(probe).fill(np.zeros(self.mask_words, np.int32))
        if probe.is_error():
            reason = "no text satisfies it" if probe.get_error().startswith("NoExtension") else "it is too complex"
            raise RequestError(f"structured outputs can't be held to this {wanted.kind}: {reason}; simplify it", "structured_outputs")
        return matcher


def grammar_text(wanted: StructuredOutputs) -> str:
    """A grammar as llguidance takes it. JSON has one space after commas and colons, as `json.dumps` writes it, for free
    white space is where small models get lost. Raises `ValueError`."""
    compiler = llguidance.LLMatcher
    if wanted.json_object:
        return str(compiler.grammar_from_json_schema({"type": "object"}, defaults=_JSON))
    if wanted.json_schema is not None:
        return str(compiler.grammar_from_json_schema(wanted.json_schema, defaults=_JSON))
    if wanted.regex is not None:
        return str(compiler.grammar_from_regex(wanted.regex))
    if wanted.choice:
        choices = " | ".join(json.dumps(choice) for choice in wanted.choice)
        return str(compiler.grammar_from_lark(f"start: {choices}"))
    assert wanted.grammar is not None
    return str(compiler.grammar_from_lark(wanted.grammar))


_JSON: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def masks_for(grammars: Iterable[Grammar | None], num_rows: int, num_words: int) -> Int32[np.ndarray, "B W"]:
    """The masks of a batch's rows, a bit a token: all allowed in rows without a grammar, and after a grammar's end."""
    masks = np.full((num_rows, num_words), _ALL_ALLOWED, np.int32)
    for row, grammar in enumerate(grammars):
        if grammar is not None and not grammar.is_over:
            grammar.fill(masks[row])
            if grammar.error is not None:
                logger.warning("a grammar can't be followed any further: %s", grammar.error)
                masks[row] = _ALL_ALLOWED
    return masks
