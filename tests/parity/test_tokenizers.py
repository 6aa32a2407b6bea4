"""Live against transformers: any text, any tokens, the clock, and templates wherever a folder may keep them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from jaxinfer.request import RequestError
from jaxinfer.tokenizer import Tokenizer
from tests.golden.tokenizers import inputs, read, write

pytestmark = pytest.mark.parity

PIECES = (
    "  ",
    "\n\n",
    "\r\n",
    "\t",
    "\u3000",
    "▁",
    "'LL",
    "1234",
    "ABc",
    "漢字",
    "かな",
    "한",
    "e\u0301",
    "👩🏽‍🚀",
    "</s>",
    "[INST]",
    "<|im_end|>",
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.lists(
    st.sampled_from(PIECES) | st.text("aB1 .'\n", max_size=4) | st.sampled_from(inputs.texts()).map(lambda text: text[:30])
).map("".join)


@cache
def ours(family: str) -> Tokenizer:
    return Tokenizer.from_folder(read.FOLDER / family)


@cache
def reference(family: str) -> tuple[PreTrainedTokenizerFast, write.Reference]:
    return write.load(family)


@pytest.mark.parametrize("family", read.NAMES)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(text=TEXTS)
def test_ids_of_any_text_are_the_references(family: str, text: str) -> None:
    _, expected = reference(family)
    ids = ours(family).encode(text)
    assert ids == expected.encode(text)
    for skip in (False, True):
        assert ours(family).decode(ids, skip_special_tokens=skip) == expected.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("family", read.NAMES)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(text=TEXTS, system=TEXTS, how=st.sampled_from([*inputs.ENDINGS.values()]), has_tools=st.booleans())
def test_conversations_about_anything_render_as_the_references(family: str, text: str, system: str, how: dict, has_tools: bool) -> None:
    turns = (("system", system), ("user", text), ("assistant", system), ("user", text + system), ("assistant", text))
    chat = {"messages": [{"role": role, "content": content} for role, content in turns], **how}
    chat |= {"tools": [inputs.WEATHER, inputs.CLOCK]} if has_tools else {}
    assert render(ours(family), chat) == write.rendered(reference(family)[0], chat, {})  # with today's date


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_a_saved_tokenizer_is_the_same_to_the_reference(family: str, tmp_path: Path) -> None:
    ours(family).save(tmp_path / "tokenizer.json")
    expected = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for case in read.texts(family):
        assert expected.encode(case.text) == case.ids


def render(tokenizer: Tokenizer, chat: dict) -> str | None:
    try:
        return tokenizer.render_chat(**chat)
    except RequestError:
        return None


def one_string(folder: Path) -> dict:
    return {"chat_template": "one{{ bos_token }}{{ image_token }}"}


def a_list(folder: Path) -> dict:
    named = {"default": "plain{{ eos_token }}", "tool_use": "with {{ tools|length }}", "rag": "{{ documents }}"}
    return {"chat_template": [{"name": name, "template": text} for name, text in named.items()]}


def a_list_without_a_default(folder: Path) -> dict:
    return {"chat_template": [{"name": "tool_use", "template": "with {{ tools|length }}"}, {"name": "rag", "template": "rag"}]}


def files(folder: Path) -> dict:
    (folder / "chat_template.jinja").write_text("file {{ messages[0].content }}\n")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("with {{ tools|length }}\n\n")
    return one_string(folder)


def no_template(folder: Path) -> dict:
    return {}


def older_names(folder: Path) -> dict:
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<older>", "lstrip": True, "rstrip": False, "normalized": False, "single_word": False}})
    )
    return {"chat_template": "{{ bos_token }}", "added_tokens_decoder": None}


@pytest.mark.parametrize("place", [one_string, a_list, a_list_without_a_default, files, no_template, older_names])
def test_templates_and_names_are_found_where_the_reference_finds_them(place: Callable[[Path], dict], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(read.FOLDER / "llama4", folder)
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")) | place(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    tokenizer, expected = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    texts = []
    for tools in (None, [], [inputs.CLOCK]):
        chat = {"messages": [{"role": "user", "content": "a"}], "tools": tools, "add_generation_prompt": True}
        texts.append(render(tokenizer, chat))
        assert texts[-1] == write.rendered(expected, chat, {})
    assert texts[-1] is not None or place is no_template
    for text in ("a <older> b", "<|finetune_right_pad|>", "x"):
        assert tokenizer.encode(text) == expected.encode(text)
    assert tokenizer.vocab_size == len(expected)
