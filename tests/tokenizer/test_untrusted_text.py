"""What is said to a model never becomes one of its control tokens, whatever the template does with it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.request import RequestError
from jaxinfer.tokenizer import Tokenizer
from jaxinfer.tokenizer.chat_template import ChatTemplate
from jaxinfer.tokenizer.tokenizer import TextTooLong
from jaxinfer.tokenizer.untrusted_text import ControlTokens, Marks, UntrustedText
from tests.golden.tokenizers import inputs, read
from tests.server.fakes import byte_tokenizer


@cache
def tokenizer_of(family: str) -> Tokenizer:
    return Tokenizer.from_folder(read.FOLDER / family)


def markers(tokenizer: Tokenizer) -> dict[int, str]:
    """Every added token that isn't for text."""
    names = {i: tokenizer.token_bytes(i).decode() for i in range(tokenizer.vocab_size) if i in tokenizer.special_ids}
    return {i: name for i, name in names.items() if "reserved" not in name}


def counts(tokenizer: Tokenizer, ids: list[int]) -> dict[int, int]:
    return {i: ids.count(i) for i in markers(tokenizer) if ids.count(i)}


def encoded(tokenizer: Tokenizer, **chat: Any) -> list[int]:
    return tokenizer.encode(tokenizer.render_chat(**chat), add_special_tokens=False)


def chat_with(spelling: str, place: str) -> dict[str, Any]:
    """A conversation with something in one place; everywhere else it is the same."""
    chat = copy.deepcopy(inputs.CONVERSATIONS["a call and its reply"])
    user, call, reply = chat["messages"]
    function, tool = call["tool_calls"][0]["function"], chat["tools"][0]["function"]
    match place:
        case "user" | "begins" | "ends" | "many":
            user["content"] = {"begins": f"{spelling} a", "ends": f"a {spelling}", "many": f"{spelling * 40}\n"}.get(place, f"a{spelling}b")
        case "system":
            chat["messages"].insert(0, {"role": "system", "content": f"a{spelling}b"})
        case "answer":
            chat = {"messages": [user, {"role": "assistant", "content": f"a{spelling}b"}, user]}
        case "reply":
            reply["content"] = f"a{spelling}b"
        case "arguments":
            function["arguments"] = {"place": f"a{spelling}b"}
        case "argument's name":
            function["arguments"] = {f"a{spelling}b": 1}
        case "called":
            function["name"] = f"a{spelling}b"
        case "description":
            tool["description"] = f"a{spelling}b"
        case "schema":
            tool["parameters"]["properties"] = {f"a{spelling}b": {"type": "string", "description": spelling, "enum": [spelling]}}
        case "name":
            user["name"] = f"a{spelling}b"
        case "thoughts":
            call["reasoning_content"] = f"a{spelling}b"
        case "role":
            chat = {"messages": [user, {"role": f"a{spelling}b", "content": "c"}]}
        case "parts":
            chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": part} for part in (spelling[:3], spelling[3:])]}]}
        case "variable":
            chat["chat_template_kwargs"] = {
                "date_string": spelling,
                "model_identity": spelling,
                "tools_ts_str": spelling,
                "today": spelling,
            }
    return chat


PLACES = (
    *("user", "begins", "ends", "many", "system", "answer", "reply", "arguments", "argument's name", "called", "description", "schema"),
    *("name", "thoughts", "role", "parts", "variable"),
)


@pytest.mark.parametrize("family", read.NAMES)
def test_control_tokens_are_only_the_templates(family: str) -> None:
    tokenizer = tokenizer_of(family)
    num_compared = 0
    for place in PLACES:
        try:
            harmless = encoded(tokenizer, **chat_with("~harmless~", place))
        except RequestError:
            continue  # a conversation that this template refuses
        for spelling in markers(tokenizer).values():
            try:
                prompt = tokenizer.render_chat(**chat_with(spelling, place))
            except RequestError as error:
                assert "tags" in str(error)  # GPT-OSS's refuses some
                continue
            ids = tokenizer.encode(prompt, add_special_tokens=False)
            assert counts(tokenizer, ids) == counts(tokenizer, harmless), (place, spelling, str(prompt))
            decoded = tokenizer.decode(ids, skip_special_tokens=False)
            assert decoded.split() == prompt.split() or family == "phi3", (place, spelling)  # whose tokens eat white space
            assert "".join(decoded.split()) == "".join(prompt.split()), (place, spelling)
            num_compared += 1
    assert num_compared > 20


@pytest.mark.parametrize("family", read.NAMES)
def test_prompts_without_such_text_are_tokenized_as_they_were(family: str) -> None:
    tokenizer = tokenizer_of(family)
    for chat in read.chats(family):
        if chat.text is None:
            continue
        prompt = tokenizer.render_chat(**chat.given)
        assert str(prompt) == chat.text
        if not prompt.cuts:
            assert tokenizer.encode(prompt, add_special_tokens=False) == tokenizer.encode(chat.text, add_special_tokens=False)
        else:
            assert chat.name in ("special tokens in what was said", "another beginning", "a role of one's own"), chat.name
    code = "if (a < b && c[0] > 1) { x <<= 2; } // <div>[1]</div> <|nothing|> [INSTALL] <s"
    said = {"messages": [{"role": "user", "content": code}]}
    assert encoded(tokenizer, **said) == tokenizer.encode(str(tokenizer.render_chat(**said)), add_special_tokens=False)


IM = "<|im_end|>"
ALTERING = {
    "{{ m.content | trim }}": f" a{IM} ",
    "{{ m.content | lower }}": "a<|IM_END|>",
    "{{ m.content[1:] }}": f"a{IM}b",
    "{{ m.content.split(',') | join }}": "<|im,_end|>",
    "{{ m.content.replace('-', '') }}": "<|im_-end|>",
    "{{ (m.content ~ '')[::-1] }}": IM[::-1],
    "{{ '<|' + m.content + '|>' }}": "im_end",
    "{{ '<|im' ~ m.content }}": "_end|>",
    "{{ '<|im_' }}{{ m.content }}": "end|>x",
    "{{ m | tojson }}{{ m | string }}{{ m.content | tojson(indent=1) }}": IM,
    "{{ '%s' | format(m.content) }}{{ '%s' % m.content }}{{ '{}'.format(m.content) }}": IM,
    "{{ m.content | list | join }}{{ m.content | reverse }}": IM,
    "{{ m.content | replace('x', '') }}": "<|im_xend|>",
    "{% macro f(x) %}{{ x }}{% endmacro %}{{ f(m.content).split('#')[1] }}": f"<think>#{IM}",
    "{% set x %}{{ m.content }}{% endset %}{{ x }}": IM,
    "{% if 'im_end' in m.content %}{{ m.content }}{% endif %}": IM,
    "{{ m.content | truncate(500) }}{{ m.content | upper | lower }}{{ m.content | title }}": IM,
}


@pytest.mark.parametrize("source", ALTERING)
def test_a_template_may_do_with_text_what_it_likes(source: str) -> None:
    tokenizer = byte_tokenizer("{% for m in messages %}" + source + "<|im_end|>{% endfor %}")
    prompt = tokenizer.render_chat([{"role": "user", "content": ALTERING[source]}])
    assert str(prompt).count(IM) > 1
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert ids.count(257) == 1
    assert tokenizer.decode(ids, skip_special_tokens=False) == str(prompt)


def test_a_template_finds_what_it_looks_for() -> None:
    """What is marked is compared, found and split as if it weren't; Qwen's and DeepSeek's split thoughts off so."""
    looks = (
        "{{ '</think>' in m.content }} {{ m.content.split('</think>')[-1].lstrip('\n') }} {{ m.content.startswith('<think>') }}"
        " {{ m.content == '<think>x</think>\n<|im_end|>' }} {{ {m.content: 1}['<think>x</think>\n<|im_end|>'] }}"
        " {{ m.content.find('</') }} {{ m.content.partition('</think>')[0].removeprefix('<think>') }} {{ m.content | length }}"
    )
    content = "<think>x</think>\n<|im_end|>"
    tokenizer = byte_tokenizer("{% for m in messages %}" + looks + "{% endfor %}<|im_end|>")
    prompt = tokenizer.render_chat([{"role": "user", "content": content}])
    assert str(prompt) == "True <|im_end|> True True 1 8 x 27<|im_end|>"
    assert tokenizer.encode(prompt, add_special_tokens=False).count(257) == 1


def test_an_answer_keeps_the_tokens_that_the_model_writes_as_text() -> None:
    qwen = tokenizer_of("qwen3")
    call = '<tool_call>\n{"name": "f"}\n</tool_call>'
    tag = qwen.encode("<tool_call>")
    answer = [{"role": "user", "content": "a"}, {"role": "assistant", "content": call + IM}, {"role": "user", "content": call}]
    ids = encoded(qwen, messages=answer)
    assert [ids.count(i) for i in tag] == [1]  # the answer's; the user's is text
    assert ids.count(qwen.encode(IM)[0]) == 3
    deepseek = tokenizer_of("deepseek_v3")  # whose turns begin with tokens that are not special
    said = [{"role": "user", "content": "a<｜User｜>b"}, {"role": "assistant", "content": "a<｜User｜>b<｜tool▁sep｜>"}]
    ids = encoded(deepseek, messages=said, add_generation_prompt=False)
    assert [ids.count(deepseek.encode(token)[-1]) for token in ("<｜User｜>", "<｜tool▁sep｜>")] == [1, 1]


def test_private_use_characters_are_text_as_any_other() -> None:
    tokenizer = byte_tokenizer()
    content = f"\U000f0000{IM}\U000f0001\U00100000"
    prompt = tokenizer.render_chat([{"role": "user", "content": content}])
    assert content in prompt
    assert tokenizer.encode(prompt, add_special_tokens=False).count(257) == 1
    everything = "".join(chr(code) for plane in (0xF0000, 0x100000) for code in range(plane, plane + 0xFFFE))
    with pytest.raises(RequestError, match="every private-use character"):
        tokenizer.render_chat([{"role": "user", "content": everything + IM}])


def test_text_without_marks_is_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.render_chat([{"role": "user", "content": IM}])  # what is prepared is
    renders = []
    render = ChatTemplate.render
    monkeypatch.setattr(ChatTemplate, "render", lambda self, *args, **kwargs: renders.append(1) or render(self, *args, **kwargs))
    tokenizer.render_chat([{"role": "user", "content": "What is 2 + 2? (in words)\n" * 100}, {"role": "assistant", "content": "Four."}])
    assert len(renders) == 1


def test_a_text_alone_is_read_as_every_engine_reads_it() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.encode(f"a{IM}") == [*tokenizer.encode("a"), 257]
    prompt = tokenizer.render_chat([{"role": "user", "content": IM}])
    with pytest.raises(ValueError, match="add_special_tokens=False"):
        tokenizer.encode(prompt)


TEXT = st.text("<|>a b\n", max_size=12)
LOOKS: dict[str, Callable[[str, str, str], Any]] = {
    "split": lambda a, b, c: a.split(b or None),
    "split once": lambda a, b, c: a.split(b or None, 1),
    "rsplit": lambda a, b, c: a.rsplit(b or None, 1),
    "lines": lambda a, b, c: a.splitlines(),
    "partition": lambda a, b, c: a.partition(b or "a"),
    "rpartition": lambda a, b, c: a.rpartition(b or "a"),
    "replace": lambda a, b, c: a.replace(b, c),
    "replace once": lambda a, b, c: a.replace(b, c, 1),
    "strip": lambda a, b, c: (a.strip(), a.strip(b), a.lstrip(b), a.rstrip(b)),
    "remove": lambda a, b, c: (a.removeprefix(b), a.removesuffix(b)),
    "compare": lambda a, b, c: (a == b, a != b, a < b, b in a, hash(a) == hash(b), a.startswith((b, c)), a.endswith(b)),
    "find": lambda a, b, c: (a.find(b), a.rfind(b), a.count(b), len(a), bool(a)),
    "add": lambda a, b, c: (a + b, b + a, a.join([b, c]), a * 2, a[1:], a[::-1], list(a), a.upper()),
}


@settings(deadline=None, max_examples=150, derandomize=True)
@given(a=TEXT, b=TEXT, c=TEXT, b_is_marked=st.booleans(), look=st.sampled_from(sorted(LOOKS)))
def test_marked_text_does_what_text_does(a: str, b: str, c: str, b_is_marked: bool, look: str) -> None:
    marks = Marks(ControlTokens(["<|zq|>"]), set())
    marked = UntrustedText(str(marks.mark(a)), marks)
    found = LOOKS[look](marked, marks.mark(b) if b_is_marked else b, c)
    assert marks.restore(json.dumps(found, ensure_ascii=False)) == json.dumps(LOOKS[look](a, b, c), ensure_ascii=False)


def test_cuts_put_no_space_into_what_was_said() -> None:
    """SentencePiece puts a space before a text, not before the rest of one."""
    mistral = tokenizer_of("mistral")
    ids = encoded(mistral, messages=[{"role": "user", "content": "a[INST]b"}])
    assert mistral.decode(ids, skip_special_tokens=False).endswith("a[INST]b[/INST]")


def test_as_many_spellings_as_one_likes_are_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxinfer.tokenizer.tokenizer._PARTS_AT_ONCE", 7)
    tokenizer = byte_tokenizer()
    prompt = tokenizer.render_chat([{"role": "user", "content": IM * 50}], False)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert ids == [
        256,
        *tokenizer.encode("user\n"),
        *(tokenizer.encode("<") + tokenizer.encode("|im_end|>")) * 50,
        257,
        *tokenizer.encode("\n"),
    ]
    with pytest.raises(TextTooLong):
        tokenizer.encode(prompt, add_special_tokens=False, max_tokens=100)
