"""What transformers makes of each family's texts and conversations, into its golden.json. `make golden` runs it.

Kimi's ids are those of tiktoken with the pattern of the model's own code: transformers cuts words otherwise than the model's code does.
"""

from __future__ import annotations

import base64
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, Protocol

import tiktoken
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.golden.tokenizers import build, inputs
from tests.golden.tokenizers.read import FOLDER, NAMES

IDS_OF = ("several turns", "special tokens in what was said", "a call, its reply and an answer", "unicode")


class Reference(Protocol):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str: ...


class Kimi:
    """tiktoken, as the model's code uses it."""

    def __init__(self, folder: Path) -> None:
        lines = (folder / "tiktoken.model").read_text().splitlines()  # tiktoken's own reading would cache an older file's
        ranks = {base64.b64decode(token): int(rank) for token, rank in map(str.split, lines)}
        listed = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))["added_tokens_decoder"]
        ids = range(len(ranks), len(ranks) + 256)
        special = {listed.get(str(i), {}).get("content", f"<|reserved_token_{i}|>"): i for i in ids}
        self._skipped = {i for i in ids if listed.get(str(i), {}).get("special", True)}
        self._encoding = tiktoken.Encoding("kimi", pat_str=build.KIMI, mergeable_ranks=ranks, special_tokens=special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._encoding.encode(text, allowed_special="all")

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return self._encoding.decode([i for i in ids if not (skip_special_tokens and i in self._skipped)], errors="replace")


def load(family: str) -> tuple[PreTrainedTokenizerFast, Reference]:
    """Who renders chats, and who encodes."""
    if family != "kimi_k2":
        tokenizer = AutoTokenizer.from_pretrained(FOLDER / family)
        return tokenizer, tokenizer
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(FOLDER / family, copy, dirs_exist_ok=True)
        config = json.loads((Path(copy) / "tokenizer_config.json").read_text(encoding="utf-8"))
        del config["auto_map"]  # the model's code is not here
        (Path(copy) / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        return AutoTokenizer.from_pretrained(copy), Kimi(FOLDER / family)


def rendered(tokenizer: PreTrainedTokenizerFast, given: dict[str, Any], variables: dict[str, Any]) -> str | None:
    """None where it refuses, however it says so."""
    try:
        return tokenizer.apply_chat_template(tokenize=False, **{"conversation": given["messages"], **_without_messages(given)}, **variables)
    except Exception:
        return None


def _without_messages(given: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key not in ("messages", "variables")}


def main() -> None:
    for family in NAMES:
        chats_by, reference = load(family)
        texts = []
        for text in inputs.texts():
            ids = reference.encode(text)
            texts.append([ids, reference.decode(ids), reference.decode(ids, skip_special_tokens=True)])
        chats: dict[str, dict[str, Any]] = {}
        for name, conversation in inputs.CONVERSATIONS.items():
            chats[name] = {}
            for ending, how in inputs.ENDINGS.items():
                text = rendered(chats_by, conversation | how, inputs.variables(conversation))
                keeps_ids = text is not None and name in IDS_OF
                chats[name][ending] = [text, reference.encode(text, add_special_tokens=False) if keeps_ids else None]
        lines = [json.dumps(case, ensure_ascii=False, separators=(",", ":")) for case in texts]
        of_chats = [f"{json.dumps(name)}:{json.dumps(chat, ensure_ascii=False)}" for name, chat in chats.items()]
        golden = '{"texts":[\n' + ",\n".join(lines) + '\n],"chats":{\n' + ",\n".join(of_chats) + "\n}}\n"
        (FOLDER / family / "golden.json").write_text(golden, encoding="utf-8")
        refused = sum(text is None for chat in chats.values() for text, _ in chat.values())
        print(f"{family}: {len(texts)} texts, {len(chats) * len(inputs.ENDINGS)} prompts, {refused} refused")


if __name__ == "__main__":
    main()
