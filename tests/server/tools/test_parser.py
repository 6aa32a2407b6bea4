"""Text in pieces becomes the same calls however it is cut; what is no call stays text."""

import json
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.tools.answer import AnswerParser
from server.tools.calls import CallRules
from server.tools.events import ArgumentText, CallOpened, ContentText, ReasoningText
from server.tools.formats import FORMATS
from server.tools.parser import ToolCallParser
from server.tools.reasoning import REASONING_FORMATS, ReasoningSplitter
from server.tools.writing import written

SCHEMAS = {
    "get_weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "get": {},
    "clock": {},
}
EXAMPLES = settings(max_examples=16, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


def parse(name, pieces, max_calls=None, thinks=False):
    """ReasoningText, content and calls as (id, name, arguments' text)."""
    numbers = count()
    form = {"functions.{name}:{index}": lambda form, name, index: form.format(name=name, index=index)}
    new_id = form.get(FORMATS[name].call_id, lambda *_: f"id{next(numbers)}")
    splitter = ReasoningSplitter(REASONING_FORMATS["think"], is_open=False) if thinks else None
    parser = AnswerParser(splitter, ToolCallParser(FORMATS[name], CallRules(SCHEMAS, new_id), max_calls))
    thoughts, content, calls = "", "", []
    for event in [event for piece in pieces for event in parser.feed(piece)] + parser.finish():
        match event:
            case ReasoningText(text):
                thoughts += text
            case ContentText(text):
                content += text
            case CallOpened(call_id, tool):
                calls.append((call_id, tool, ""))
            case ArgumentText(text):
                calls[-1] = (*calls[-1][:2], calls[-1][2] + text)
    return thoughts, content, calls


# What models of each family write, as their cards and templates have it: never made by the code that it tests.
WRITTEN = {
    "hermes": 'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    "smollm2": 'Let me see.\n<tool_call>[{"name": "get_weather", "arguments": {"city": "Zürich"}}, {"name": "clock", "arguments": {}}]</tool_call>',
    "qwen3_coder": "Let me see.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=clock>\n</function>\n</tool_call>",
    "deepseek_v3": "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Zürich"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n{}\n```<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "deepseek_v31": 'Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Zürich"}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": "Let me see.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Zürich"}<|tool_call_end|><|tool_call_begin|>functions.clock:1<|tool_call_argument_begin|>{}<|tool_call_end|>'
    "<|tool_calls_section_end|>",
    "mistral": 'Let me see.[TOOL_CALLS]get_weather[ARGS]{"city": "Zürich"}[TOOL_CALLS]clock[ARGS]{}',
    "mistral_list": 'Let me see.[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Zürich"}, "id": "abc123def"}, '
    '{"name": "clock", "arguments": {}}]',
    "pythonic": '[get_weather(city="Zürich"), clock()]',
    "llama4": '<|python_start|>[get_weather(city="Zürich"), clock()]<|python_end|>',
    "llama3": '{"name": "get_weather", "parameters": {"city": "Zürich"}}\n{"name": "clock", "parameters": {}}',
    "json": '[{"name": "get_weather", "arguments": {"city": "Zürich"}}, {"name": "clock", "arguments": {}}]',
}


@pytest.mark.parametrize("name", FORMATS)
def test_each_familys_calls_are_read_however_they_are_cut(name):
    text = WRITTEN[name]
    content = "Let me see." if text.startswith("Let") else ""
    ids = ("functions.get_weather:0", "functions.clock:1") if name == "kimi_k2" else ("id0", "id1")
    expected = ("", content, [(ids[0], "get_weather", '{"city": "Zürich"}'), (ids[1], "clock", "{}")])
    for length in (1, 2, 3, 5, 8, 13, len(text)):
        assert parse(name, [text[at : at + length] for at in range(0, len(text), length)]) == expected
    # However it is cut short, calls are those of the whole text, or the beginnings of their arguments.
    for end in range(len(text)):
        _, shorter, calls = parse(name, [text[:end]])
        assert all(call[:2] == whole[:2] and whole[2].startswith(call[2]) for call, whole in zip(calls, expected[2], strict=False))
        assert shorter.startswith(content) or content.startswith(shorter.rstrip())


@pytest.mark.parametrize("name", FORMATS)
def test_a_name_that_is_no_tools_is_text(name):
    text = WRITTEN[name].replace("get_weather", "get_whether").replace("clock", "clocks")
    assert parse(name, text) == ("", text, [])


TEXTS = st.text(st.sampled_from("aZ09 \n\t\\\"'{}[]()<>,:=`é🎉") | st.characters(exclude_categories=["Cs"]), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(["city", "days", "a", "b_2"])
CALLS = st.lists(st.tuples(st.sampled_from(sorted(SCHEMAS)), st.dictionaries(KEYS, VALUES, max_size=3)), min_size=1, max_size=3)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "qwen3_coder"])
@EXAMPLES
@given(calls=CALLS, data=st.data())
def test_any_arguments_come_back_whatever_the_pieces(name, calls, data):
    text = written(FORMATS[name], calls)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse(name, pieces)
    assert parse(name, text) == whole  # a character at a time
    assert whole[1] == ""
    assert [(tool, json.loads(arguments)) for _, tool, arguments in whole[2]] == calls


# Pieces of every format's syntax, put together without sense.
MARKERS = {text for tool_format in FORMATS.values() for text in tool_format.texts} | {*SCHEMAS, "<think>", "</think>"}
BEGINNINGS = ('{"name": "get", "arguments": {"a": ', '{"name": "clock"', '"arguments": {}', '{"a": [1, "', "get(a=", "'\\", "</")
FRAGMENTS = st.sampled_from([*sorted(MARKERS), *BEGINNINGS, *']})\n "', "words"])


@pytest.mark.parametrize("name", FORMATS)
@EXAMPLES
@given(fragments=st.lists(FRAGMENTS | TEXTS, max_size=12), data=st.data())
def test_any_text_is_read_the_same_in_any_pieces(name, fragments, data):
    text = "".join(fragments)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for thinks in (False, True):
        thoughts, content, calls = parse(name, pieces, thinks=thinks)
        assert (thoughts, content, calls) == parse(name, text, thinks=thinks)
        if not calls and not thoughts and not (thinks and "<think>" in text):
            assert content == text  # nothing is lost


@pytest.mark.parametrize(
    ("name", "text", "content", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "get", "arguments": {"a": }}</tool_call>', "}}</tool_call>", '{"a": '),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "get"}</tool_call> Done.', " Done.", '{"a": 1}'),
        ("hermes", '<tool_call>{"name": "get", "arguments": "{\\"a\\": 1}"}</tool_call>', "", '{"a": 1}'),
        ("hermes", '<tool_call>{"name": "get"}</tool_call>', "", "{}"),
        ("hermes", '<tool_call>{"name": "get", "arguments": {"a": "1\n2"}}</tool_call>', "", '{"a": "1\\n2"}'),  # not JSON, but plain
        ("hermes", 'Well, <tool_call>no <tool_call>{"name": "get"}</tool_call>', "Well, <tool_call>no", "{}"),
        ("mistral", "[TOOL_CALLS]get[CALL_ID]abcdefghi[ARGS]{}", "", "{}"),
        ("llama3", '<|python_tag|>{"type": "function", "name": "get", "parameters": {"a": null}}', "", '{"a": null}'),
        ("llama4", '<|python_start|><|python_end|>{"name": "get", "parameters": {}}', "", "{}"),
        (
            "pythonic",
            "[get(a='it\\'s \"x\"', b=[True, None, {'k': -1.5e3}])]",
            "",
            '{"a": "it\'s \\"x\\"", "b": [true, null, {"k": -1.5e3}]}',
        ),
        ("qwen3_coder", "<tool_call><function=get><parameter=a>\n[1]\n</parameter></function></tool_call>", "", '{"a": [1]}'),
        ("qwen3_coder", "<tool_call><function=get><parameter=a>\nTrue\n</parameter></function></tool_call>", "", '{"a": true}'),
        (
            "qwen3_coder",
            '<tool_call><function=get_weather><parameter=city>\n1\n"</\n\n</parameter></function></tool_call>',
            "",
            '{"city": "1\\n\\"</\\n"}',
        ),
        ("json", '```json\n{"name": "get", "arguments": {}}\n```', "", "{}"),
    ],
)
def test_what_models_write_beside_the_rule_is_read_too(name, text, content, arguments):
    _, found, [(_, tool, of_call)] = parse(name, text)
    assert (found, tool.removesuffix("_weather"), of_call) == (content, "get", arguments)


@pytest.mark.parametrize("name", ["json", "llama3", "pythonic"])
@pytest.mark.parametrize(
    "text", ['Say {"name": "get", "arguments": {}} to me', "Call [get(a=1)].", '{"name": "Ann", "parameters": {}}', "[get](x)"]
)
def test_text_that_only_looks_like_a_call_is_text(name, text):
    assert parse(name, text) == ("", text, [])


def test_thoughts_are_told_from_the_answer_and_hold_no_calls():
    call = '<tool_call>{"name": "get"}</tool_call>'
    assert parse("hermes", f"\n<think>\nI could {call}.\n</think>\n\nYes.{call}", thinks=True) == (
        f"I could {call}.",
        "Yes.",
        [("id0", "get", "{}")],
    )
    assert parse("hermes", "<think>cut </thi", thinks=True) == ("cut </thi", "", [])
    assert parse("hermes", "a <think>b</think>", thinks=True) == ("", "a <think>b</think>", [])


def test_each_call_of_a_list_is_told_from_the_one_before():
    text = '<tool_call>[{"name": "clock"}, {"arguments": {"a": 1}, "name": "get"}, {"name": "get"}]</tool_call>'
    calls = [("id0", "clock", "{}"), ("id1", "get", '{"a": 1}'), ("id2", "get", "{}")]
    assert parse("smollm2", text) == ("", "", calls)
    assert parse("smollm2", text[: text.rindex("et")]) == ("", ', {"name": "g', calls[:2])


def test_no_more_calls_than_asked_for():
    assert parse("hermes", WRITTEN["hermes"] + " Bye.", max_calls=1) == (
        "",
        "Let me see. Bye.",
        [("id0", "get_weather", '{"city": "Zürich"}')],
    )


def test_nothing_is_held_back_that_can_not_become_a_call():
    parser = ToolCallParser(FORMATS["json"], CallRules(SCHEMAS, lambda *_: "id"))
    assert parser.feed('{"name": "a text of more characters than any name could have') == []
    assert "".join(event.text for event in parser.feed(" in this request" * 4)).startswith('{"name": "a text')
    parser = ToolCallParser(FORMATS["hermes"], CallRules(SCHEMAS, lambda *_: "id"))
    assert parser.feed('<tool_call>{"name": "get", "arguments": {"a": "so f')[1:] == [ArgumentText('{"a": "so f')]
    assert parser.feed("ar") == [ArgumentText("ar")]
