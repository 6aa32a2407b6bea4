"""A checkpoint's own `response_template` decides how its answers are read, where it can be read."""

import json
import shutil

import pytest

from jaxinfer.tokenizer import Tokenizer
from server.config import ServerConfig
from server.openai.answer_syntax import AnswerSyntax
from server.tools import formats
from server.tools.calls import CallRules
from server.tools.events import ArgumentText, CallOpened
from server.tools.parser import ToolCallParser
from server.tools.reasoning import ReasoningFormat
from server.tools.response_template import calls_of, reasoning_of
from tests.golden.tokenizers import read

JSON = {"open": "<call>", "close_pattern": r"</call>\s*", "repeats": True, "content": "json"}
WHOLE = JSON | {"transform": {"type": "function", "function": "{content}"}}
KEYS = JSON | {"transform": {"type": "function", "function": {"name": "{content.tool}", "arguments": "{content.input}"}}}
NAMED = {
    "open_pattern": r'\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
    "close_pattern": r"\}<\|eot_id\|>\s*",
    "content": "json",
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}


def calls_in(tool_format, text):
    parser = ToolCallParser(tool_format, CallRules({"f": {}}, lambda *_: "id"))
    return [event for character in text for event in parser.feed(character)] + parser.finish()


@pytest.mark.parametrize(
    ("region", "text"),
    [
        (WHOLE, '<call>\n{"name": "f", "arguments": {"a": 1}}\n</call>'),
        (KEYS, '<call>{"tool": "f", "input": {"a": 1}}</call>'),
        (NAMED, '{"name": "f", "parameters": {"a": 1}}'),
    ],
)
def test_regions_of_json_are_layouts(region, text):
    found = calls_of({"fields": {"tool_calls": region}}, ["<|eot_id|>"], formats.HERMES)
    opened, *arguments = calls_in(found, text)
    assert opened == CallOpened("id", "f")
    assert "".join(event.text for event in arguments if isinstance(event, ArgumentText)) == '{"a": 1}'
    assert all(isinstance(event, ArgumentText) for event in arguments)
    assert found.layouts[1:] == formats.HERMES.layouts  # what the family writes is read too


@pytest.mark.parametrize(
    "region",
    [
        None,
        [],
        WHOLE | {"content": "xml-inline"},
        WHOLE | {"open": 1},
        WHOLE | {"close_pattern": "</call>|$"},
        WHOLE | {"open": None, "open_pattern": r"<(call|tool)>"},
        WHOLE | {"transform": None},
        KEYS | {"transform": {"function": {"name": "f", "arguments": "{content}"}}},
        NAMED | {"open_pattern": r"(?P<name>\w+)"},
        NAMED | {"open_pattern": "["},
        NAMED | {"transform": {"function": "{content}"}} | {"close_pattern": "("},
    ],
)
def test_others_are_left_to_the_chat_template(region):
    assert calls_of({"fields": {"tool_calls": region}}, (), formats.HERMES) is None
    assert calls_of(region, (), None) is None and reasoning_of(region) is None


def test_it_is_read_from_the_folder_and_a_setting_goes_before_it(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(read.FOLDER / "qwen3", folder)
    thinking = {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"}
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {
        "response_template": {"fields": {"thinking": thinking, "tool_calls": KEYS}, "start_anchor": "<|im_start|>assistant\n"}
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.from_folder(folder)
    syntax = AnswerSyntax.of(tokenizer, ServerConfig())
    assert syntax.reasoning == ReasoningFormat("response_template", "<think>", "</think>")
    assert syntax.calls.name == "response_template" and syntax.calls.layouts[0].begin == ("<call>",)
    assert AnswerSyntax.of(tokenizer, ServerConfig(tool_format="hermes", reasoning_format="none")) == AnswerSyntax(formats.HERMES, None)
