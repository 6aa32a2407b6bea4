"""The chat template's variables of a request, with its wishes about reasoning."""

from __future__ import annotations

from typing import Any

from jaxinfer.tokenizer import Tokenizer
from server.openai.parameter_policy import IGNORED, not_implemented
from server.openai.protocol import ChatRequest


def template_variables(tokenizer: Tokenizer, body: ChatRequest) -> dict[str, Any] | None:
    """`chat_template_kwargs`, with wishes about reasoning under the names that the template reads.

    Where it reads none they can't change the answer: they are ignored, or refused where parameters are read strictly.
    """
    given: dict[str, Any] = {}
    is_thinking = False if body.enable_thinking is None and body.reasoning_effort == "none" else body.enable_thinking
    wishes: dict[str, dict[str, Any]] = {
        "reasoning_effort": {"reasoning_effort": None if body.reasoning_effort == "none" else body.reasoning_effort},
        "enable_thinking": {"enable_thinking": is_thinking, "thinking": is_thinking},  # two names of one switch
    }
    for parameter, variables in wishes.items():
        read = {name: value for name, value in variables.items() if value is not None and tokenizer.template_reads(name)}
        given |= read
        if not read and variables[parameter] is not None and getattr(body, parameter) is not None:
            if body.policy.is_strict:
                raise not_implemented([parameter])
            body.policy.ignore("", parameter)
            IGNORED.log([parameter])
    return given | (body.chat_template_kwargs or {}) if given else body.chat_template_kwargs
