"""Chat templates: what they may use, and refusals as request errors."""

from __future__ import annotations

import re
from datetime import datetime

import pytest

from jaxinfer.chat_template import ChatTemplate
from jaxinfer.request import RequestError

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
    "source", ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ ''.__class__.__base__.__subclasses__() }}"]
)
def test_a_template_can_not_leave_its_sandbox(source: str) -> None:
    with pytest.raises(RequestError, match="does not take these messages"):
        render(source)
