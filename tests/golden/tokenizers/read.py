"""What the reference made of each family's texts and conversations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.golden.tokenizers import inputs

FOLDER = Path(__file__).parent
NAMES = tuple(sorted(file.parent.name for file in FOLDER.glob("*/tokenizer_config.json")))


@dataclass(frozen=True)
class Text:
    text: str
    ids: list[int]
    decoded: str
    decoded_without_special: str


@dataclass(frozen=True)
class Chat:
    """`text` and `ids` are None where the reference refuses; ids are kept of some."""

    name: str
    ending: str
    given: dict[str, Any]  # keywords of `Tokenizer.render_chat`
    text: str | None
    ids: list[int] | None


def texts(family: str) -> list[Text]:
    every, cases = inputs.texts(), _golden(family)["texts"]
    return [Text(text, *case) for text, case in zip(every, cases, strict=True)]


def chats(family: str) -> Iterator[Chat]:
    golden = _golden(family)["chats"]
    assert golden.keys() == inputs.CONVERSATIONS.keys()
    for name, conversation in inputs.CONVERSATIONS.items():
        for ending, how in inputs.ENDINGS.items():
            given = {key: value for key, value in conversation.items() if key != "variables"} | how
            text, ids = golden[name][ending]
            yield Chat(name, ending, given | {"chat_template_kwargs": inputs.variables(conversation)}, text, ids)


def _golden(family: str) -> dict[str, Any]:
    return json.loads((FOLDER / family / "golden.json").read_text(encoding="utf-8"))
