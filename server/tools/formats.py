"""The families' formats, as their model cards and chat templates have them, and which one a chat template is for."""

from __future__ import annotations

from server.tools.layout import (
    CallIndex,
    JsonArguments,
    JsonCall,
    KeywordArguments,
    Layout,
    Name,
    TaggedArguments,
    ToolFormat,
    WrittenId,
)

_JSON = JsonCall()
_PARAMETERS = JsonCall(arguments=("parameters", "arguments"))
_TAGGED_JSON = Layout((_JSON,), ("<tool_call>",), end=("</tool_call>",))
_TAGGED_LIST = Layout((_JSON,), ("<tool_call>", "["), ",", ("]", "</tool_call>"))
_PYTHON = (Name(), "(", KeywordArguments(), ")")
_PYTHON_LIST = Layout(_PYTHON, ("[",), ",", ("]",))
_TAGGED_ARGUMENTS = TaggedArguments("<parameter=", ">", "</parameter>", "</function>")
_MARKED_PYTHON_LIST = Layout(_PYTHON, ("<|python_start|>", "["), ",", ("]", "<|python_end|>"))

QWEN3_CODER = ToolFormat(
    "qwen3_coder",
    (Layout(("<function=", Name(), ">", _TAGGED_ARGUMENTS), ("<tool_call>",), end=("</tool_call>",)),),
    signs=(("<function=", "<parameter="),),
)
KIMI_K2 = ToolFormat(
    "kimi_k2",
    (
        Layout(
            ("functions.", Name(), ":", CallIndex(), "<|tool_call_argument_begin|>", JsonArguments(), "<|tool_call_end|>"),
            ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
            "<|tool_call_begin|>",
            ("<|tool_calls_section_end|>",),
        ),
    ),
    signs=(("<|tool_calls_section_begin|>",),),
    call_id="functions.{name}:{index}",
)
_DEEPSEEK = (("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"), "<｜tool▁call▁begin｜>", ("<｜tool▁calls▁end｜>",))
DEEPSEEK_V3 = ToolFormat(
    "deepseek_v3",  # and R1
    (Layout(("function", "<｜tool▁sep｜>", Name(), "```json", JsonArguments(), "```", "<｜tool▁call▁end｜>"), *_DEEPSEEK),),
    signs=(("<｜tool▁calls▁begin｜>", "```json"),),
)
DEEPSEEK_V31 = ToolFormat(
    "deepseek_v31",
    (Layout((Name(), "<｜tool▁sep｜>", JsonArguments(), "<｜tool▁call▁end｜>"), *_DEEPSEEK),),
    signs=(("<｜tool▁calls▁begin｜>",),),
)
MISTRAL = ToolFormat(
    "mistral",  # tokenizers from v11 on; the id is v11's
    (
        Layout((Name(), "[ARGS]", JsonArguments()), ("[TOOL_CALLS]",)),
        Layout((Name(), "[CALL_ID]", WrittenId(9), "[ARGS]", JsonArguments()), ("[TOOL_CALLS]",)),
    ),
    signs=(("[TOOL_CALLS]", "[ARGS]"),),
    call_id="{random:9}",
)
MISTRAL_LIST = ToolFormat(
    "mistral_list",  # tokenizers before v11
    (Layout((_JSON,), ("[TOOL_CALLS]", "["), ",", ("]",)),),
    signs=(("[TOOL_CALLS]",),),
    call_id="{random:9}",
)
PYTHONIC = ToolFormat(
    "pythonic",  # Llama 4 and small Llama 3.2 where their template asks for it
    (_PYTHON_LIST, _MARKED_PYTHON_LIST),
    signs=(("[func_name1(params_name1=",),),
)
LLAMA4 = ToolFormat(
    "llama4",  # whose template asks for JSON; the models write either
    (
        Layout((_PARAMETERS,)),
        Layout((_PARAMETERS,), ("<|python_start|>",), end=("<|python_end|>",)),
        Layout((_PARAMETERS,), ("<|python_start|>", "<|python_end|>")),
        _PYTHON_LIST,
        _MARKED_PYTHON_LIST,
    ),
    signs=(("<|python_start|>",),),
)
LLAMA3 = ToolFormat(
    "llama3",
    (Layout((_PARAMETERS,)), Layout((_PARAMETERS,), ("<|python_tag|>",))),
    signs=(("<|python_tag|>",), ('{"name": function name, "parameters": dictionary',)),
    parallel=False,
)
HERMES = ToolFormat(
    "hermes",  # and Qwen 2.5 and 3, SmolLM3
    (_TAGGED_JSON, _TAGGED_LIST),
    signs=(("<tool_call>",),),
)
SMOLLM2 = ToolFormat(
    "smollm2",  # the smallest leave the tags out
    (_TAGGED_LIST, _TAGGED_JSON, Layout((_JSON,)), Layout((_JSON,), ("[",), ",", ("]",))),
    signs=(("named SmolLM",),),
)
GENERIC = ToolFormat(
    "json",
    (
        Layout((_JSON,)),
        Layout((_JSON,), ("[",), ",", ("]",)),
        Layout(("```json", _JSON, "```")),
        _TAGGED_JSON,
        _TAGGED_LIST,
    ),
)

# The order in which signs are looked for: a family before those whose texts it has too.
FORMATS: dict[str, ToolFormat] = {
    tool_format.name: tool_format
    for tool_format in (
        *(QWEN3_CODER, KIMI_K2, DEEPSEEK_V3, DEEPSEEK_V31, MISTRAL, MISTRAL_LIST, PYTHONIC, LLAMA4, LLAMA3, HERMES),
        *(SMOLLM2, GENERIC),
    )
}
NO_FORMAT = "none"
_OTHER_SYNTAX = "<|channel|>"  # of Harmony (GPT-OSS), whose calls are messages of their own: not read here


def format_of(template: str, setting: str = "auto") -> ToolFormat | None:
    """The format of a model with this chat template. `setting`: auto, none, or the name of a format. None: calls are
    not read."""
    if setting != "auto":
        return FORMATS.get(setting)
    if _OTHER_SYNTAX in template:
        return None
    return next((known for known in FORMATS.values() if _has_signs(template, known)), GENERIC)


def _has_signs(template: str, tool_format: ToolFormat) -> bool:
    return any(all(sign in template for sign in signs) for signs in tool_format.signs)
