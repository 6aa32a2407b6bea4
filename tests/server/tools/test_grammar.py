"""The grammar of each format lets through what the parser reads, and nothing else."""

import json
import random
import tempfile
from functools import cache
from pathlib import Path

import llguidance
import pytest

from server.tools.formats import FORMATS
from server.tools.grammar import call_grammar
from server.tools.writing import written
from tests.server.fakes import byte_tokenizer
from tests.server.tools.test_parser import WRITTEN, parse

TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "wind": {"type": "boolean"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "clock": {"type": "object", "properties": {}, "additionalProperties": False},
}
# What is a special token in the family's vocabulary.
SPECIAL = (
    *("<|python_tag|>", "<|python_start|>", "<|python_end|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    "<|tool_calls_section_end|>",
)


@cache
def vocabulary():
    tokenizer = byte_tokenizer(more=SPECIAL)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(file := Path(folder) / "tokenizer.json")
        return tokenizer, llguidance.LLTokenizer(file.read_text(encoding="utf-8"), eos_token=tokenizer.eos_token_ids[0])


def accepts(name, text, **settings):
    """Whether the grammar lets the whole text through, and an answer may end there."""
    tokenizer, known = vocabulary()
    grammar = call_grammar(FORMATS[name], TOOLS, tokenizer.special_tokens, **settings)
    matcher = llguidance.LLMatcher(known, grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


CALLS = [("get_weather", {"city": 'Zürich "\\\n', "days": 3}), ("clock", {})]


@pytest.mark.parametrize("name", FORMATS)
def test_calls_as_the_parser_reads_them_are_let_through(name):
    several = CALLS if FORMATS[name].parallel and (FORMATS[name].layouts[0].is_marked or name == "pythonic") else CALLS[:1]
    text = written(FORMATS[name], several)
    _, content, calls = parse(name, text)
    assert content == "" and [(tool, json.loads(arguments)) for _, tool, arguments in calls] == several
    assert accepts(name, text, choice="required") and accepts(name, text)
    assert accepts(name, written(FORMATS[name], CALLS[1:]), choice="clock")
    assert not accepts(name, written(FORMATS[name], CALLS[:1]), choice="clock")
    assert accepts(name, "Only words.") and not accepts(name, "Only words.", choice="required")
    if len(several) > 1:
        assert not accepts(name, text, choice="required", is_parallel=False)
    for wrong in (("whether", {}), ("get_weather", {"days": 3}), ("get_weather", {"city": "a", "days": "b"}), ("clock", {"a": 1})):
        assert not accepts(name, written(FORMATS[name], [wrong]), choice="required"), wrong


@pytest.mark.parametrize("name", sorted({*FORMATS} - {"llama4", "llama3", "json"}))
def test_what_models_write_is_let_through(name):
    """But for layouts that a grammar does not ask for: `llama4` writes JSON under one, `json` one call."""
    text = WRITTEN[name].removeprefix("Let me see.").lstrip()
    assert accepts(name, text if name != "mistral_list" else text.replace(', "id": "abc123def"', ""), choice="required")


def random_answer(matcher, rng):
    """A random text that the grammar lets through; None where none came to its end. Closing characters are likelier, and
    what has begun like a closing tag goes on as one."""
    tokenizer, _ = vocabulary()
    ids, tag = [], b"</parameter>"
    while len(ids) < 600 and not (matcher.is_accepting() and rng.random() < 0.3):
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(tokenizer.vocab_size) if mask[i // 8] >> (i % 8) & 1 and i not in tokenizer.eos_token_ids]
        if not allowed:
            break
        spelt = {i: tokenizer.token_bytes(i) for i in allowed}
        spelt = {i: text for i, text in spelt.items() if text.isascii()} or spelt
        end = tokenizer.decode(ids[-len(tag) :], skip_special_tokens=False).encode()
        begun = max((n for n in range(1, len(tag)) if end.endswith(tag[:n])), default=0)
        closing = [i for i, text in spelt.items() if text in (b'"', b"}", b"]", b")", b"<")]
        following = [i for i, text in spelt.items() if begun and text == tag[begun : begun + 1]]
        ids.append(rng.choice(following or (closing if closing and rng.random() < 0.4 else [*spelt])))
        assert matcher.consume_token(ids[-1])
    return tokenizer.decode(ids, skip_special_tokens=False) if matcher.is_accepting() else None


@pytest.mark.parametrize("name", FORMATS)
def test_whatever_it_lets_through_the_parser_reads(name):
    tokenizer, known = vocabulary()
    grammar = call_grammar(FORMATS[name], TOOLS, tokenizer.special_tokens, choice="required")
    answers = [random_answer(llguidance.LLMatcher(known, grammar), random.Random(seed)) for seed in range(6)]
    texts = [text for text in answers if text is not None]
    assert len(texts) > 2
    for text in texts:
        _, content, calls = parse(name, text)
        assert calls and not content.strip() and all(isinstance(json.loads(arguments), dict) for *_, arguments in calls), text


def test_a_name_of_no_tool_is_an_error():
    with pytest.raises(KeyError):
        call_grammar(FORMATS["hermes"], TOOLS, {}, choice="other")
