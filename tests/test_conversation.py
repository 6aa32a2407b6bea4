"""No message is lost on its way into a prompt: what a template lacks is written as text, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.conversation import render_conversation
from jaxinfer.request import RequestError
from jaxinfer.tokenizer import Tokenizer
from tests.golden.tokenizers import inputs, read
from tests.server.fakes import byte_tokenizer

CALLS = [
    {"id": name, "type": "function", "function": {"name": name, "arguments": '{"place": "Zürich"}'}} for name in ("get_weather", "clock")
]
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "get_weather", "content": "12 °C"},
    {"role": "tool", "tool_call_id": "clock", "content": "noon"},
]
CALLED = '{"name": "get_weather", "arguments": {"place": "Zürich"}}\n{"name": "clock", "arguments": {"place": "Zürich"}}'
RETURNED = "Result of get_weather:\n12 °C\n\nResult of clock:\nnoon"


@pytest.mark.parametrize("family", read.NAMES)
def test_what_tools_returned_is_in_every_models_prompt(family: str) -> None:
    tokenizer = Tokenizer.from_folder(read.FOLDER / family)
    history = HISTORY if family not in ("llama3",) else [HISTORY[0], {**HISTORY[1], "tool_calls": CALLS[:1]}, HISTORY[2]]  # one at once
    prompt = render_conversation(tokenizer, history)
    for text in ("get_weather", "Zürich", "12 °C"):
        assert text in prompt, str(prompt)
    knows_calls = family not in ("gemma3", "mistral", "phi3")
    assert (CALLED in prompt and RETURNED in prompt) is not knows_calls


def test_calls_and_results_are_turns_of_text_where_a_template_has_none() -> None:
    tokenizer = byte_tokenizer()
    tail = [{"role": "user", "content": "And now?"}]
    expected = [HISTORY[0], {"role": "assistant", "content": CALLED}, {"role": "user", "content": RETURNED + "\n\nAnd now?"}]
    assert render_conversation(tokenizer, HISTORY + tail) == tokenizer.render_chat(expected)
    said = [HISTORY[0], {"role": "assistant", "content": "Let me see.", "tool_calls": CALLS[:1]}, HISTORY[2]]
    assert f"Let me see.\n{CALLED.splitlines()[0]}<|im_end|>" in render_conversation(tokenizer, said)


def test_arguments_are_objects_where_a_template_reads_those_and_text_elsewhere() -> None:
    objects = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.place }}{% endfor %}{% endfor %}"
    texts = objects.replace("c.function.arguments.place", "'' + c.function.arguments").replace("c.function.name", "c.function.name + ''")
    assert "clockZürich" in render_conversation(byte_tokenizer(objects), HISTORY)
    assert 'clock{"place": "Zürich"}' in render_conversation(byte_tokenizer(texts), HISTORY)


LEAVES_OUT = "{% for m in messages if m.role in ['user', 'assistant'] %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "messages", "param", "message"),
    [
        (
            LEAVES_OUT,
            [{"role": "critic", "content": "b"}],
            "messages[0].role",
            "the role 'critic', which the model's chat template leaves out",
        ),
        (
            LEAVES_OUT + "{# tool_calls #}",
            HISTORY,
            "messages[1].tool_calls",
            r"messages\[1\] has tool_calls, .* leaves out: send them as text",
        ),
        (
            "{{ raise_exception('Only user roles are supported!') }}",
            [{"role": "user", "content": "a"}, {"role": "critic", "content": "b"}],
            "messages[1].role",
            r"Only user roles are supported! \(messages\[1\] has the role 'critic'\)",
        ),
        ("{{ raise_exception('no') }}", [{"role": "user", "content": "a"}], "messages", "does not take these messages: no"),
    ],
)
def test_what_a_template_leaves_out_or_refuses_is_named(source: str, messages: list[dict[str, Any]], param: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        render_conversation(byte_tokenizer(source), messages)
    assert caught.value.param == param


def test_a_role_of_ones_own_is_the_templates() -> None:
    tokenizer = byte_tokenizer()
    messages = [{"role": "critic", "content": "b"}, {"role": "user", "content": "a"}]
    assert render_conversation(tokenizer, messages) == tokenizer.render_chat(messages)
    with pytest.raises(RequestError, match="has the role 'critic'"):
        render_conversation(Tokenizer.from_folder(read.FOLDER / "qwen3"), messages)


def test_conversations_that_every_template_reads_are_rendered_as_they_are() -> None:
    for family in read.NAMES:
        tokenizer = Tokenizer.from_folder(read.FOLDER / family)
        messages = inputs.CONVERSATIONS["several turns"]["messages"]
        assert render_conversation(tokenizer, messages[1:]) == tokenizer.render_chat(messages[1:])
