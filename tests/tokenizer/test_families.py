"""Each family's kind of tokenizer and template: ids, texts and prompts equal to transformers' (tests/golden/tokenizers)."""

from __future__ import annotations

import base64
import json
import re
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.gguf_source import GGUFSource
from checkpoints.source import CheckpointError
from jaxinfer.request import RequestError
from jaxinfer.tokenizer import Tokenizer
from jaxinfer.tokenizer.detokenizer import IncrementalDetokenizer
from jaxinfer.tokenizer.gguf import read_gguf
from tests.checkpoints import tiny
from tests.golden.tokenizers import read

# GGUF's name of each way to cut words; a file has the vocabulary, the merges and each token's type.
PRE = {
    "llama3": "llama-bpe",
    "llama4": "llama4",
    "gpt_oss": "gpt-4o",
    "qwen3": "qwen2",
    "mistral_tekken": "tekken",
    "deepseek_v3": "deepseek-v3",
}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


@cache
def tokenizer_of(family: str) -> Tokenizer:
    return Tokenizer.from_folder(read.FOLDER / family)


@pytest.mark.parametrize("family", read.NAMES)
def test_ids_are_the_references(family: str) -> None:
    for case in read.texts(family):
        assert tokenizer_of(family).encode(case.text) == case.ids, case.text


@pytest.mark.parametrize("family", read.NAMES)
def test_decoding_is_the_references_at_once_and_as_tokens_come(family: str) -> None:
    tokenizer = tokenizer_of(family)
    for case in read.texts(family):
        for skip, expected in ((False, case.decoded), (True, case.decoded_without_special)):
            assert tokenizer.decode(case.ids, skip_special_tokens=skip) == expected
            stream = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
            assert "".join([*map(stream.add, case.ids), stream.flush()]) == expected


@pytest.mark.parametrize("family", read.NAMES)
def test_tokens_are_their_bytes(family: str) -> None:
    for case in read.texts(family):
        joined = b"".join(map(tokenizer_of(family).token_bytes, case.ids))
        assert joined.decode() == case.decoded, case.text


@pytest.mark.parametrize("family", read.NAMES)
def test_conversations_render_as_the_references(family: str) -> None:
    num_refused = 0
    for chat in read.chats(family):
        if chat.text is None:
            num_refused += 1
            with pytest.raises(RequestError):
                tokenizer_of(family).render_chat(**chat.given)
        else:
            assert tokenizer_of(family).render_chat(**chat.given) == chat.text, (chat.name, chat.ending)
        if chat.ids is not None and chat.text is not None:
            assert tokenizer_of(family).encode(chat.text, add_special_tokens=False) == chat.ids
    assert num_refused > 5  # an empty list of messages to continue, at least


def test_what_begins_and_ends_is_the_folders() -> None:
    named = {family: tokenizer_of(family) for family in read.NAMES}
    ends = {family: [t.decode([i], skip_special_tokens=False) for i in t.eos_token_ids] for family, t in named.items()}
    assert ends["llama3"] == ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]
    assert ends["gemma3"] == ["<eos>", "<end_of_turn>"]
    assert ends["kimi_k2"] == ["<|im_end|>", "[EOS]"]
    assert ends["mistral"] == ["</s>"]
    assert named["qwen3"].bos_token_id is None
    assert named["gemma3"].token_bytes(named["gemma3"].bos_token_id or 0) == b"<bos>"


def test_tokens_that_only_the_settings_name_are_added() -> None:
    """As transformers adds them; some are special, and some take the white space around them along."""
    for family, token in (("llama4", "<|finetune_right_pad|>"), ("gemma3", "<image_soft_token>"), ("phi3", "<|placeholder1|>")):
        tokenizer = tokenizer_of(family)
        assert tokenizer.encode(token, add_special_tokens=False)[-1] == tokenizer.vocab_size - 1
        assert tokenizer.vocab_size - 1 in tokenizer.special_ids
    phi3 = tokenizer_of("phi3")
    assert phi3.encode("<|end|>\n\n a", add_special_tokens=False) == phi3.encode("<|end|>a", add_special_tokens=False)
    assert phi3.encode("</s> a", add_special_tokens=False) == phi3.encode("</s>a", add_special_tokens=False)  # flags of the settings alone


def metadata_of(family: str, **changes: object) -> dict[str, object]:
    """The family's tokenizer.json as llama.cpp's converter writes it."""
    file = json.loads((read.FOLDER / family / "tokenizer.json").read_text(encoding="utf-8"))
    added = {token["content"]: CONTROL if token["special"] else USER_DEFINED for token in file["added_tokens"]}
    ids = file["model"]["vocab"] | {token["content"]: token["id"] for token in file["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    types = [BYTE if token.startswith("<0x") else added.get(token, NORMAL) for token in tokens]
    about: dict[str, object] = {"model": "gpt2", "pre": PRE.get(family), "merges": [" ".join(pair) for pair in file["model"]["merges"]]}
    if family == "mistral":
        types[tokens.index("<unk>")] = UNKNOWN
        about = {"model": "llama", "scores": np.array([-float(i) if t == NORMAL else 0.0 for i, t in enumerate(types)])}
    if family == "gemma3":  # runs of spaces as they are, scores that don't follow the order in which tokens are made, no space at the front
        about = {"model": "llama", "scores": np.array([-1000.0 if t == USER_DEFINED else 0.0 for t in types]), "add_space_prefix": False}
        about["tokens"] = [token.replace("▁", " ") if t == USER_DEFINED else token for token, t in zip(tokens, types, strict=True)]
    config = json.loads((read.FOLDER / family / "tokenizer_config.json").read_text(encoding="utf-8"))
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    named = {name: token["content"] if isinstance(token, dict) else token for name, key in names.items() if (token := config.get(key))}
    about |= {f"{name}_token_id": ids[token] for name, token in named.items() if token in ids}
    about = {"tokens": tokens, "token_type": np.array(types)} | about | changes
    template = (read.FOLDER / family / "chat_template.jinja").read_text(encoding="utf-8")
    return {f"tokenizer.ggml.{key}": value for key, value in about.items()} | {
        "general.architecture": family,
        "tokenizer.chat_template": template,
    }


def gguf(family: str, **changes: object) -> Tokenizer:
    return Tokenizer(*read_gguf(Path(f"{family}.gguf"), metadata_of(family, **changes)))


@pytest.mark.parametrize("family", [*PRE, "mistral", "gemma3"])
def test_a_gguf_gives_the_same_tokenizer_as_the_folder(family: str) -> None:
    tokenizer = gguf(family, **({"add_bos_token": True} if family in ("llama4", "deepseek_v3") else {}))
    for case in read.texts(family):
        assert tokenizer.encode(case.text) == case.ids, case.text
        assert tokenizer.decode(case.ids, skip_special_tokens=False) == case.decoded
        assert tokenizer.decode(case.ids) == case.decoded_without_special
    for chat in read.chats(family):
        if chat.text is not None and not (family == "mistral" and "tools" in chat.given):  # the file has one template
            assert tokenizer.render_chat(**chat.given) == chat.text
    assert tokenizer.bos_token_id == tokenizer_of(family).bos_token_id


def test_kimis_gguf_gives_the_same_tokenizer_as_its_ranks(tmp_path: Path) -> None:
    tokenizer_of("kimi_k2").save(tmp_path / "tokenizer.json")
    ranks = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = sorted(ranks["model"]["vocab"], key=ranks["model"]["vocab"].__getitem__)
    added = {token["content"]: CONTROL if token["special"] else USER_DEFINED for token in ranks["added_tokens"]}
    metadata = {
        "model": "gpt2",
        "pre": "kimi-k2",
        "tokens": [*tokens, *added],
        "merges": [" ".join(pair) for pair in ranks["model"]["merges"]],
        "token_type": np.array([NORMAL] * len(tokens) + list(added.values())),
    }
    tokenizer = Tokenizer(*read_gguf(Path("kimi.gguf"), {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}))
    for case in read.texts("kimi_k2"):
        assert tokenizer.encode(case.text) == case.ids, case.text


def test_a_gguf_file_with_scores_is_read(tmp_path: Path) -> None:
    metadata = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in metadata_of("mistral").items()}
    tiny.write_gguf(tmp_path / "tiny.gguf", metadata=metadata | {"general.architecture": "llama", "tokenizer.ggml.merges": None})
    tokenizer = Tokenizer.from_source(GGUFSource(tmp_path / "tiny.gguf"))
    for case in read.texts("mistral"):
        assert tokenizer.encode(case.text) == case.ids, case.text


def joined_by_rank(word: bytes, ranks: dict[bytes, int]) -> list[int]:
    """The neighbours that make the token of the lowest rank are joined, until none make one."""
    parts = [bytes([byte]) for byte in word]
    while len(parts) > 1:
        rank, at = min((ranks.get(a + b, len(ranks)), i) for i, (a, b) in enumerate(pairwise(parts)))
        if rank == len(ranks):
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [ranks[part] for part in parts]


@settings(deadline=None)
@given(text=st.text("abeht ", max_size=40) | st.text(max_size=40).filter(lambda text: text.isprintable()))
def test_merges_recovered_from_ranks_join_what_ranks_join(text: str) -> None:
    lines = (read.FOLDER / "kimi_k2" / "tiktoken.model").read_text().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(str.split, lines)}
    tokenizer = tokenizer_of("kimi_k2")
    for word in text.split(" "):
        # One letter case and no digits or signs: one word, however text is cut.
        if word.isascii() and word.isalpha() and word.islower():
            assert tokenizer.encode(word) == joined_by_rank(word.encode(), ranks)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["!!!! 0"], "line 1 is b'!!!! 0': it must be base64 and a rank"),
        (["YQ=="], "line 1 is b'YQ=='"),
        (["YQ== 0", "Yg== 2"], "its 2 tokens must have the ranks from 0 on, and be every byte"),
        (["YQ== 0", "Yg== 1"], "its 2 tokens must have the ranks from 0 on, and be every byte"),
    ],
)
def test_ranks_that_can_not_be_are_refused(tmp_path: Path, lines: list[str], message: str) -> None:
    (tmp_path / "tiktoken.model").write_text("\n".join(lines))
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", null]}}')
    with pytest.raises(CheckpointError, match=re.escape(message)):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json", "tiktoken.model"])
def test_a_folder_with_another_form_alone_says_what_to_do(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=rf"there is {re.escape(name)}, which this engine does not read: .* writes one"):
        Tokenizer.from_folder(tmp_path)
