"""Tokenizer: ids equal to Hugging Face's, from a GGUF or a tokenizer.json; broken or missing files named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from checkpoints import hub
from checkpoints.gguf_source import GGUFSource
from checkpoints.safetensors_source import SafetensorsSource
from checkpoints.source import CheckpointError
from jaxinfer.request import RequestError
from jaxinfer.tokenizer import Tokenizer
from tests.checkpoints import tiny

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "tokenizer.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def default() -> Tokenizer:
    return Tokenizer.from_source(hub.open_source(hub.resolve("default")))


def test_ids_equal_hugging_faces_on_a_multilingual_corpus(default: Tokenizer) -> None:
    assert len(GOLDEN["corpus"]) >= 100
    for case in GOLDEN["corpus"]:
        assert default.encode(case["text"]) == case["ids"], case["text"]


def test_decoding_equals_hugging_faces_with_and_without_special_tokens(default: Tokenizer) -> None:
    for case in GOLDEN["corpus"]:
        assert default.decode(case["ids"], skip_special_tokens=False) == case["decoded"]
        assert default.decode(case["ids"]) == case["decoded_without_special"]


def test_a_saved_tokenizer_reads_back_the_same(default: Tokenizer, tmp_path: Path) -> None:
    default.save(tmp_path / "tokenizer.json")
    read = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for case in GOLDEN["corpus"][:20]:
        assert read.encode(case["text"]).ids == case["ids"]


def test_chats_render_as_hugging_faces(default: Tokenizer) -> None:
    for chat in GOLDEN["chats"]:
        assert default.render_chat(chat["messages"], chat["add_generation_prompt"]) == chat["text"]


def test_the_default_models_tokens(default: Tokenizer) -> None:
    assert default.vocab_size == 49152
    assert default.bos_token_id == 1
    assert default.eos_token_ids == (2,)
    assert default.special_ids == frozenset(range(17))


def test_tokens_are_their_bytes(default: Tokenizer) -> None:
    for case in GOLDEN["corpus"]:
        joined = b"".join(map(default.token_bytes, case["ids"]))
        assert joined.decode("utf-8", "replace") == case["decoded"]
    assert default.token_bytes(2) == b"<|im_end|>"
    assert default.token_bytes(10**6) == b""


def test_half_a_surrogate_pair_is_refused(default: Tokenizer) -> None:
    with pytest.raises(RequestError, match="half a surrogate pair") as caught:
        default.encode("smile \ud83d")
    assert caught.value.param == "prompt"


def gguf_tokenizer(folder: Path, **metadata: object) -> Tokenizer:
    tiny.write_gguf(folder / "tiny.gguf", metadata={f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
    return Tokenizer.from_source(GGUFSource(folder / "tiny.gguf"))


DIGITS = {"tokens": ["</s>", "<s>", *"0123456789", "12", "123", "1234", "12345", "Ġ", "Ċ"], "token_type": [3, 3] + [1] * 16}
DIGITS["merges"] = ["1 2", "12 3", "123 4", "1234 5"]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["12345"]),
        ("smollm", ["1", "2", "3", "4", "5"]),
        ("qwen2", ["1", "2", "3", "4", "5"]),
        ("llama-bpe", ["<s>", "123", "4", "5"]),  # three at a time, and a beginning of its own accord
    ],
)
def test_numbers_are_cut_as_each_vocabularys_training_text_was(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    tokenizer = gguf_tokenizer(tmp_path, pre=pre, **DIGITS)
    assert [tokenizer.token_bytes(i).decode() for i in tokenizer.encode("12345")] == pieces


def test_a_beginning_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    tokenizer = gguf_tokenizer(tmp_path, add_bos_token=True)
    assert tokenizer.encode("the")[0] == tokenizer.bos_token_id == 1
    assert tokenizer.encode("the", add_special_tokens=False)[0] != 1
    assert tokenizer.decode(tokenizer.encode("the and")) == "the and"


def test_an_end_of_turn_or_message_ends_a_reply_too(tmp_path: Path) -> None:
    assert gguf_tokenizer(tmp_path, eot_token_id=5, eom_token_id=6).eos_token_ids == (0, 5, 6)


def test_an_end_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    tokenizer = gguf_tokenizer(tmp_path, add_bos_token=True, add_eos_token=True)
    ids = tokenizer.encode("the")
    assert (ids[0], ids[-1]) == (1, 0)
    assert ids[1:-1] == tokenizer.encode("the", add_special_tokens=False)


def test_a_gguf_may_have_a_template_for_tools(tmp_path: Path) -> None:
    templates = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "{{ tools | length }}"}
    tiny.write_gguf(tmp_path / "tiny.gguf", metadata=templates)
    tokenizer = Tokenizer.from_source(GGUFSource(tmp_path / "tiny.gguf"))
    messages = [{"role": "user", "content": "hi"}]
    assert (tokenizer.render_chat(messages), tokenizer.render_chat(messages, tools=[{}])) == ("plain", "1")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"model": "t5"}, "tokenizer.ggml.model is 't5': of GGUF files 'gpt2' and 'llama' are supported; use the model's folder"),
        ({"pre": "viking"}, "tokenizer.ggml.pre is 'viking': supported are gpt-2, smollm, llama-bpe, llama4, gpt-4o, qwen2, tekken"),
        ({"tokens": None}, "tokens is missing"),
        ({"merges": None}, "merges is missing"),
        ({"model": "llama"}, "has 40 tokens, 0 scores and 40 token types"),
        ({"tokens": ["a", "a"]}, "names a token twice"),
        ({"merges": ["q z"]}, "vocabulary and merges in its metadata don't fit"),
        ({"eos_token_id": 999}, "eos_token_id is 999, but the vocabulary has 40 tokens"),
    ],
)
def test_a_gguf_vocabulary_that_can_not_work_is_refused(tmp_path: Path, metadata: dict, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        gguf_tokenizer(tmp_path, **metadata)


def write_folder(folder: Path, *, generation: dict | None = None, config: dict | None = None, template: str | None = None) -> Path:
    """A tokenizer.json as Hugging Face's folders have it, next to tiny weights."""
    backend = tokenizers.Tokenizer(models.BPE(vocab={"h": 0, "i": 1, "hi": 2, "Ġ": 3}, merges=[("h", "i")]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<s>", "</s>", "<|turn|>")])
    backend.enable_truncation(2)  # some published files have it; a prompt must never be cut in silence
    tiny.write_safetensors(folder, tiny.tensors(), config={"eos_token_id": 5})
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": {"content": "<s>", "special": True}, "eos_token": "</s>", **(config or {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def folder_tokenizer(folder: Path, **kwargs: object) -> Tokenizer:
    return Tokenizer.from_source(SafetensorsSource(write_folder(folder, **kwargs)))  # type: ignore[arg-type]


def test_a_folder_gives_its_tokenizer(tmp_path: Path) -> None:
    tokenizer = folder_tokenizer(tmp_path)
    assert tokenizer.encode("hihi hi<|turn|>") == [2, 2, 3, 2, 6]
    assert tokenizer.decode([2, 3, 2, 6]) == "hi hi"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.vocab_size) == (4, (5,), 7)


def test_every_end_that_the_generation_settings_name_ends_a_reply(tmp_path: Path) -> None:
    assert folder_tokenizer(tmp_path, generation={"eos_token_id": [6, 5]}).eos_token_ids == (6, 5)


def test_a_folders_template_may_be_in_three_places(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "named {{ bos_token }}"}]
    assert folder_tokenizer(tmp_path, config={"chat_template": "plain {{ eos_token }}"}).render_chat(messages) == "plain </s>"
    assert folder_tokenizer(tmp_path, config={"chat_template": named}).render_chat(messages) == "named <s>"
    assert folder_tokenizer(tmp_path, config={"chat_template": "no"}, template="file").render_chat(messages) == "file"


def test_a_folder_without_a_tokenizer_or_with_a_broken_one_says_so(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer\.json this version"):
        Tokenizer.from_source(SafetensorsSource(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: missing"):
        Tokenizer.from_source(SafetensorsSource(tmp_path))
