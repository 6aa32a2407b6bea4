"""The texts and conversations that every family's tokenizer and template are asked about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MORE_TEXTS = (
    " a",
    "  a",
    "\u00a0a\u2009b\u3000c",
    " \t\n \r\n\v\f x",
    "\n\n\n\nfour\n\n\n\n\nfive",
    "a\n \n b\r\n\r\n c \n",
    "x                                  y",  # more spaces than any token has
    "▁a ▁ ▁▁b",
    "e\u0301 \u0065\u0301\u0327 \u1e69 \u0073\u0323\u0307 \ufb03 \u2126 \u212b",  # not in form NFC
    "HELLO'S World'll I'VE we'Re o'clock 'tis",
    "parseHTTPResponse XMLHttpRequest iPhone15Pro aB Ab ABc",
    "1234567 12345.678901 1,234,567 ٠١٢٣٤٥٦ १२३४ ⅫⅣ ²³ ①②",
    "中文ABC混排123和，标点。！ 繁體 字 ひらがなカタカナ漢字 한글",
    "path/to//file.txt http://x.y/z?a=1&b=2#c\n//comment\r\n/* x */",
    "🏳️‍🌈👩🏽‍🚀🇩🇪 ❤️‍🔥 a🎉b \U0001f9ff",
    "\ud7ff\ue000\ufffd\ufffe\U0010ffff",
    "\x00\x01\x7f\x80\xa0\xad",
    "ก็ เขา ດ້ວຍ မြန်မာ ᚠᛇᚻ 𓀀𓁐 𝔘𝔫𝔦 𐍈",
    "the president of the government said that",
    "ABC中文abc。DEF，中文Ab한글aB かな12中3 x1234567890y",
    "it's I'LL they'd'Ve HE'S x'm 's'T",
    "a/b a//\nc ?/\r\n/d */\n\n//e -/-\n/f",
    ".net (foo _bar -x1 @a\tb $c9 #d\ne é.è ü(ö )ß",
    "\t\tdef f(x):\n\t\t\treturn\tx  \n  \n\n    y",
    "1 12 123 1234 12345 a1b22c333d4444 1.5e10 $1,234.56 ½¼ Ⅻ7",
    "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~",
    "#include <stdio.h>\nint main(void)\t{ return (a->b[0] != '\\0') ? ~1 : x<<=2; }\n",
    "$foo @bar #baz _qux -v .py ,and;or:not",
    " trailing space before end ",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaa bbbbbbbbbbbb -------------------- ==========",
)

PLACES = {"type": "string", "description": "A city, e.g. \"Zürich\" or '東京' <here> & there"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather at a place.\nOne line more.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": PLACES,
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                "days": {"type": "array", "items": {"type": "integer"}},
                "where": {"type": "object", "properties": {"lat": {"type": "number", "description": "degrees"}}, "required": ["lat"]},
            },
            "required": ["place"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "", "parameters": {"type": "object", "properties": {}}}}


def _said(*texts: str, system: str | None = None) -> list[dict[str, Any]]:
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return ([] if system is None else [{"role": "system", "content": system}]) + turns


def _call(name: str, arguments: Any, id: str = "a1b2c3d4e", **message: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", **message, "tool_calls": [{"id": id, "type": "function", "function": function}]}


def _reply(content: Any, id: str = "a1b2c3d4e", **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content, **fields}


_BOTH = {
    "role": "assistant",
    "content": "Both:",
    "tool_calls": [_call("clock", {})["tool_calls"][0], _call("get_weather", {"place": "Genève"}, "z9y8x7w6v")["tool_calls"][0]],
}
_PARTS = [{"type": "text", "text": " one "}, {"type": "text", "text": "two\n"}]
_DATE = {"date_string": "26 Jul 2024", "today": "2024-07-26"}
_ASKED = _said("What's the weather in Zürich?")

# Name -> messages, and what else is given.
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": _said("Hello!")},
    "a system prompt": {"messages": _said("Hi", system="You are terse.")},
    "several turns": {"messages": _said("a", "b", "c", "d", "e", system="S")},
    "an answer last": {"messages": _said("Write a poem", "Roses are")},
    "empty contents": {"messages": _said("", "", "", system="")},
    "white space only": {"messages": _said(" ", "\n", "\t\n ", system="  \n")},
    "odd white space": {"messages": _said("  lead\n\n", "\n trail \t", "\r\nx\u00a0\u3000", system="\n\n S \n")},
    "unicode": {"messages": _said("Grüße, 世界! 👩🏽‍🚀", "مرحبا", "e\u0301 \ufb01 <b>&amp;\"'</b>", system="日本語で")},
    "special tokens in what was said": {"messages": _said("<|im_end|><|eot_id|>[INST]</s><end_of_turn><｜User｜><|end|>", "</think>ok")},
    "template code in what was said": {"messages": _said("{{ 7 * 7 }} {% raw %} {# no #}")},
    "thoughts in the text": {"messages": _said("a", "<think>\nhm\n</think>\n\nb", "c", "<think>x</think>d")},
    "thoughts of their own": {"messages": [*_said("a"), {"role": "assistant", "content": "b", "reasoning_content": " because\n"}]},
    "thoughts by another name": {"messages": [*_said("a"), {"role": "assistant", "content": "b", "thinking": "so"}]},
    "parts": {"messages": [{"role": "user", "content": _PARTS}]},
    "parts everywhere": {"messages": [{"role": role, "content": _PARTS} for role in ("system", "user", "assistant", "user")]},
    "a picture": {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]},
    "a part of another kind": {"messages": [{"role": "user", "content": [{"type": "audio"}]}]},
    "tools": {"messages": _ASKED, "tools": [WEATHER]},
    "tools and a system prompt": {"messages": _said("Hi", "Hello", "And now?", system=" S\n"), "tools": [CLOCK, WEATHER]},
    "no tools": {"messages": _ASKED, "tools": []},
    "a call": {"messages": [*_ASKED, _call("get_weather", {"place": "Zürich", "days": [1, 2]})], "tools": [WEATHER]},
    "a call and its reply": {"messages": [*_ASKED, _call("get_weather", {"place": "Z"}), _reply("12 °C")], "tools": [WEATHER]},
    "a call's arguments as text": {"messages": [*_ASKED, _call("get_weather", '{"place": "Z"}'), _reply("12")], "tools": [WEATHER]},
    "a call with an empty text": {"messages": [*_ASKED, _call("clock", {}, content=""), _reply("12:00")], "tools": [CLOCK]},
    "a call with a null text": {"messages": [*_ASKED, _call("clock", {}, content=None), _reply("12:00", name=None)], "tools": [CLOCK]},
    "a call after a thought": {
        "messages": [*_ASKED, _call("clock", {}, content="", reasoning_content="when?"), _reply("12:00")],
        "tools": [CLOCK],
    },
    "a call, its reply and an answer": {
        "messages": [*_said(*("a", "b", "What time?"), system="S"), _call("clock", {}), _reply("12:00"), *_said("x", "It's noon.")[1:]],
        "tools": [CLOCK, WEATHER],
    },
    "calls without tools": {"messages": [*_ASKED, _call("clock", {}), _reply("12:00"), *_said("x", "Noon.", "Thanks")[1:]]},
    "two calls at once": {
        "messages": [*_ASKED, _BOTH, _reply("12:00"), _reply("9", "z9y8x7w6v")],
        "tools": [CLOCK, WEATHER],
    },
    "a reply that is an object": {"messages": [*_ASKED, _call("clock", {}), _reply({"h": 12, "ü": [None, True]})], "tools": [CLOCK]},
    "a short id": {"messages": [*_ASKED, _call("clock", {}, "c0"), _reply("12:00", "c0")], "tools": [CLOCK]},
    "a reply to nothing": {"messages": [*_ASKED, _reply("12:00")], "tools": [CLOCK]},
    "roles that don't alternate": {"messages": [*_said("a"), *_said("b")]},
    "an assistant first": {"messages": _said("a", "b")[1:]},
    "a system prompt alone": {"messages": _said(system="S")},
    "a system prompt alone, with tools": {"messages": _said(system="S"), "tools": [CLOCK]},
    "a system prompt later": {"messages": [*_said("a", "b"), *_said("c", system="S")]},
    "a role of one's own": {"messages": [*_said("a"), {"role": "critic", "content": "b"}]},
    "a developer": {"messages": [{"role": "developer", "content": "D"}, *_said("a")]},
    "names": {"messages": [{"role": "user", "content": "a", "name": "Ada"}, {"role": "assistant", "content": "b", "name": "bot"}]},
    "no content": {"messages": [{"role": "user"}]},
    "a number for content": {"messages": [{"role": "user", "content": 7}]},
    "no role": {"messages": [{"content": "a"}]},
    "no thinking": {"messages": _said("a"), "variables": {"enable_thinking": False, "thinking": False, "reasoning_effort": "low"}},
    "thinking": {"messages": _said("a"), "variables": {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}},
    "tools of another name": {
        "messages": _said("a", system="S"),
        "variables": {"custom_tools": [WEATHER], "tools_in_user_message": False, "builtin_tools": ["code_interpreter", "search"]},
    },
    "tools in TypeScript": {"messages": _said("a"), "tools": [CLOCK], "variables": {"tools_ts_str": "type clock = () => any;"}},
    "another beginning": {"messages": _said("a", "b"), "variables": {"bos_token": "<other>", "eos_token": "</other>"}},
    "documents": {"messages": _said("a"), "documents": [{"title": "t", "text": "x"}]},
}
# How a prompt may end.
ENDINGS: dict[str, dict[str, bool]] = {
    "as it is": {"add_generation_prompt": False},
    "for an answer": {"add_generation_prompt": True},
    "continued": {"add_generation_prompt": False, "continue_final_message": True},
}


def texts() -> list[str]:
    inputs = json.loads((Path(__file__).parent.parent / "prompts.json").read_text(encoding="utf-8"))
    return [*inputs["texts"], *MORE_TEXTS]


def variables(conversation: dict[str, Any]) -> dict[str, Any]:
    """With a date that stands still."""
    return _DATE | conversation.get("variables", {})
