"""Chat templates: what they may use, and refusals as request errors."""

from __future__ import annotations

import re
from datetime import datetime
from enum import StrEnum
from types import MappingProxyType

import pytest

from jaxinfer.request import RequestError
from jaxinfer.tokenizer.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "a < b & 'ü'"}]


def render(source: str | None, messages: list = MESSAGES, add_generation_prompt: bool = True) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, add_generation_prompt)


def test_blocks_leave_no_white_space_of_their_own() -> None:
    source = "{{ bos_token }}\n  {% for m in messages %}\n{{ m['role'] }}: {{ m.content }}\n  {% endfor %}\n{% if add_generation_prompt %}>{% endif %}"
    assert render(source) == "<s>\nuser: a < b & 'ü'\n>"


def test_json_is_not_escaped_for_html() -> None:
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "a < b & \'ü\'"}'
    assert render("{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"


def test_the_date_loop_controls_and_generation_marks_are_there() -> None:
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().astimezone().year)
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("a{% generation %}{{ messages[0].role }}{% endgeneration %}b") == "auserb"
    assert render("{% if tools %}tools{% endif %}{% if documents is none %}none{% endif %}") == "none"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "does not take these messages: Roles must alternate"),
        ("{{ messages[0].content + 1 }}", "does not take these messages"),
        ("{{ messages[7].content.strip() }}", "does not take these messages"),
        ("{% for %}", "does not take these messages"),
        ("{{ 1 // 0 }}", "does not take these messages"),
        (None, "no chat template: send a prompt to /v1/completions"),
    ],
)
def test_a_refusal_is_a_request_error_about_the_messages(source: str | None, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)) as caught:
        render(source)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ dict.mro() }}",
        "{{ namespace(_x=1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    ],
)
def test_a_template_can_not_leave_its_sandbox(source: str) -> None:
    with pytest.raises(RequestError, match="does not take these messages"):
        render(source)


def test_what_the_caller_gave_stays_as_it_was() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a "}], "name": None, "thinking": "t"}]
    template = ChatTemplate("{{ messages[0].content[0].text }}|{{ messages[0].reasoning_content }}|{{ 'name' in messages[0] }}", {})
    assert template.render(messages, False) == "a |t|False"
    assert ChatTemplate("{{ messages[0].content[0].text }}|", {}).render(messages, False, continue_final_message=True) == "a "
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "a "}], "name": None, "thinking": "t"}]


def test_a_template_sees_no_other_objects_than_jsons() -> None:
    class Kind(StrEnum):
        USER = "user"

    odd = [{"role": Kind.USER, "content": MappingProxyType({"a": (1, True, 2.5)}), "picture": object()}]
    assert render("{{ messages[0] }}", odd) == "{'role': 'user', 'content': {'a': (1, True, 2.5)}, 'picture': '<object>'}"


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        ("{{ messages }}", False),
        ("{% set tools = [] %}{{ tools }}", False),
        ("{% if tools %}{{ tools }}{% endif %}", True),
        ("{% set tools = tools %}", True),
        ({"default": "{{ messages }}", "tool_use": "{{ tools }}"}, True),
        ({"default": "{{ messages }}", "rag": "{{ tools }}"}, False),
    ],
)
def test_whether_a_template_reads_tools_can_be_told(source: str | dict[str, str], reads: bool) -> None:
    assert ChatTemplate(source, {}).reads_tools is reads


def test_of_several_templates_one_is_for_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "{{ tools | length }}"}, {})
    assert template.render(MESSAGES, True) == "plain"
    assert template.render(MESSAGES, True, tools=[{}, {}]) == "2"
    with pytest.raises(RequestError, match="this model's chat templates are rag, tool_use: none is the default"):
        ChatTemplate({"rag": "", "tool_use": ""}, {}).render(MESSAGES, True)


def test_generation_marks_are_a_scope_of_their_own() -> None:
    assert render("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}") == "21"


def test_local_time_does_not_tell_its_zone() -> None:
    assert render("{{ strftime_now('%z|%Z|%d') }}") == f"||{datetime.now().astimezone():%d}"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"add_generation_prompt": True, "continue_final_message": True}, "exclude each other"),
        ({"variables": {"tools": []}}, "tools can't be a variable of the template"),
        ({"variables": {"self": 1}}, "does not take these messages"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user"}], "continue_final_message": True}, "the last message has no content"),
        ({"messages": [{"content": [{"type": "image"}]}], "continue_final_message": True}, "there is no text in the last message"),
        (
            {"messages": [{"content": "left out"}, {"content": ""}], "continue_final_message": True, "source": "{{ messages[0].content }}"},
            "leaves",
        ),
    ],
)
def test_what_can_not_be_rendered_is_refused(given: dict, message: str) -> None:
    template = ChatTemplate(given.pop("source", "{{ messages[-1].content }}"), {})
    with pytest.raises(RequestError, match=message):
        template.render(**{"messages": MESSAGES, "add_generation_prompt": False} | given)
