"""Answers that are held to something may come after thoughts, and do where the prompt ends within them."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import llguidance
import pytest

from jaxinfer.tokenizer import Tokenizer
from server.openai.answer_grammar import after_thoughts
from server.tools.formats import FORMATS
from server.tools.grammar import call_grammar
from server.tools.reasoning import REASONING_FORMATS
from tests.server.fakes import byte_tokenizer

TOOLS = {"time": {"type": "object", "properties": {"zone": {"enum": ["UTC"]}}, "required": ["zone"], "additionalProperties": False}}
CALL = '<tool_call>\n{"name": "time", "arguments": {"zone": "UTC"}}\n</tool_call>'
ANSWERS = {"choice": ('start: "yes" | "no"\n', "yes"), "call": (None, CALL)}


@cache
def vocabulary(is_special: bool) -> tuple[Tokenizer, Any]:
    tokenizer = byte_tokenizer(more=("<think>", "</think>") if is_special else ())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokenizer.json"
        file.write_text(tokenizer.to_json(), encoding="utf-8")
        return tokenizer, llguidance.LLTokenizer(file.read_text(encoding="utf-8"), eos_token=tokenizer.eos_token_ids[0])


@pytest.mark.parametrize("is_special", [True, False], ids=["special tokens", "text"])
@pytest.mark.parametrize("kind", ANSWERS)
def test_thoughts_come_before_the_answer(kind: str, is_special: bool) -> None:
    tokenizer, known = vocabulary(is_special)
    special = {text: token for text, token in tokenizer.special_tokens.items() if text in ("<think>", "</think>")}
    assert bool(special) == is_special
    grammar, answer = ANSWERS[kind]
    grammar = grammar or call_grammar(FORMATS["hermes"], TOOLS, special, choice="required")

    def accepts(text: str, *, is_thinking: bool) -> bool:
        whole = after_thoughts(grammar, REASONING_FORMATS["think"], special, is_thinking=is_thinking)
        matcher = llguidance.LLMatcher(known, whole)
        assert not matcher.is_error(), matcher.get_error()
        ids = tokenizer.encode(text, False)
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())

    assert accepts(answer, is_thinking=False)
    assert accepts(f"<think>Is it? {{no}}\n</think>\n\n{answer}", is_thinking=False)
    assert accepts(f"so it is</think>{answer}", is_thinking=True)
    assert not accepts(answer, is_thinking=True)
    assert not accepts("<think>no end", is_thinking=False)
    assert not accepts(f"<think>a</think>{answer} and more", is_thinking=False)
    assert not accepts(f"words first {answer}", is_thinking=False)
