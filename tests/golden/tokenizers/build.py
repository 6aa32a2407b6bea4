"""Small tokenizers of each family's kind, in folders as the families publish them: `python -m tests.golden.tokenizers.build`, with transformers.

The families' own vocabularies are large and their licences differ, so these are trained here: on prompts.json, with each family's way to
cut words, normalise, fall back to bytes, name tokens and decode. A folder's chat_template.jinja is written by hand.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode, generate_merges

from tests.golden.tokenizers import inputs

FOLDER = Path(__file__).parent
NUM_TOKENS = 1200
NUM_CHARACTERS = 120  # of the SentencePiece kinds; all others are bytes
UNREACHABLE = ("Ġpresident", "Ġgovernment")  # whole words that no merges lead to, as vocabularies made of ranks have some

# As the models' tokenizer.json files have them.
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
# As its code has it.
KIMI = "|".join(
    [
        r"""[\p{Han}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)


def main() -> None:
    bos = "<|begin_of_text|>"
    llama3 = [bos, "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"]
    published(
        *("llama3", "llama", "PreTrainedTokenizerFast"),
        byte_level([LLAMA3], llama3, first=bos, ignore_merges=True),
        {"bos_token": bos, "eos_token": "<|eot_id|>", "clean_up_tokenization_spaces": True},
        ends=["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
    )
    llama4 = [
        bos,
        "<|end_of_text|>",
        "<|header_start|>",
        "<|header_end|>",
        "<|eom|>",
        "<|eot|>",
        "<|python_start|>",
        "<|python_end|>",
        "<|image|>",
    ]
    published(
        *("llama4", "llama4", "PreTrainedTokenizerFast"),
        byte_level([O200K], llama4, first=bos, ignore_merges=True),
        {
            "bos_token": bos,
            "eos_token": "<|eot|>",
            "pad_token": "<|finetune_right_pad|>",
            "extra_special_tokens": {"image_token": "<|image|>"},
        },
        ends=["<|end_of_text|>", "<|eom|>", "<|eot|>"],
    )
    qwen = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    plain = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
    published(
        *("qwen3", "qwen3", "Qwen2Tokenizer"),
        byte_level([QWEN], qwen, plain, normalizer=normalizers.NFC()),
        {
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
            "add_bos_token": False,
            "additional_special_tokens": qwen[1:],
        },
        ends=["<|im_end|>", "<|endoftext|>"],
    )
    v3 = ["[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
    mistral = sentencepiece(["<unk>", "<s>", "</s>", *v3], first="<s>", unknown="<unk>")
    mistral.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    mistral.decoder = decoders.Sequence([*SENTENCEPIECE_DECODER, decoders.Strip(" ", 1, 0)])
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    published("mistral", "mistral", "LlamaTokenizer", mistral, {**names, "legacy": False, "add_prefix_space": True, "add_bos_token": True})
    tekken = [*names.values(), *v3, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[CALL_ID]", "[ARGS]", "[IMG]"]
    published("mistral_tekken", "mistral", "PreTrainedTokenizerFast", byte_level([TEKKEN], tekken, first="<s>", ignore_merges=True), names)
    gemma = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>"]
    runs = [*("\n" * n for n in range(2, 6)), *("▁" * n for n in range(2, 9)), "<table>", "</h1>"]
    gemma3 = sentencepiece(gemma, runs, first="<bos>", unknown="<unk>")
    gemma3.normalizer = normalizers.Replace(" ", "▁")
    gemma3.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    gemma3.decoder = decoders.Sequence(SENTENCEPIECE_DECODER)
    names = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "pad", "unk", "mask")}
    extra = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>"}  # the last is not in its tokenizer.json
    published(
        "gemma3", "gemma3_text", "GemmaTokenizerFast", gemma3, {**names, "extra_special_tokens": extra}, ends=["<eos>", "<end_of_turn>"]
    )
    v3 = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"]
    calls = [f"<｜tool▁{what}▁{end}｜>" for what in ("calls", "call", "outputs", "output") for end in ("begin", "end")]
    deepseek = byte_level(DEEPSEEK, v3, ["<｜User｜>", "<｜Assistant｜>", *calls, "<｜tool▁sep｜>"], first=v3[0], special_normalized=True)
    names = dict(zip(("bos_token", "eos_token", "pad_token"), v3, strict=True))
    described = {name: {"__type": "AddedToken", "content": text, **FLAGS, "normalized": True} for name, text in names.items()}
    published("deepseek_v3", "deepseek_v3", "LlamaTokenizerFast", deepseek, {**described, "add_bos_token": True, "legacy": True})
    harmony = ["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"]
    published(
        *("gpt_oss", "gpt_oss", "PreTrainedTokenizerFast"),
        byte_level([O200K], harmony, ignore_merges=True),
        {"bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": "<|endoftext|>"},
        ends=["<|return|>", "<|endoftext|>", "<|call|>"],
    )
    phi3()
    kimi()


FLAGS = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
SENTENCEPIECE_DECODER = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def training_text() -> list[str]:
    prompts = json.loads((FOLDER.parent / "prompts.json").read_text(encoding="utf-8"))["prompts"]
    return [*inputs.texts(), *inputs.MORE_TEXTS * 5, *(prompt.get("text") or prompt["messages"][-1]["content"] for prompt in prompts)]


def trained(pre_tokenizer: pre_tokenizers.PreTokenizer, num_tokens: int, **trainer: Any) -> tuple[list[str], list[Any]]:
    """Tokens in the order in which they were made, and the merges."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizer
    backend.train_from_iterator(training_text(), trainers.BpeTrainer(vocab_size=num_tokens, show_progress=False, **trainer))
    state = json.loads(backend.to_str())["model"]
    return sorted(state["vocab"], key=state["vocab"].__getitem__), [tuple(pair) for pair in state["merges"]]


def trained_across_words() -> tuple[list[str], list[Any]]:
    """Unlike the families' own: there are tokens that span words, so that text cut in any other place has other ids."""
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return trained(whole, NUM_TOKENS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def byte_level(
    patterns: Sequence[str],
    special: Sequence[str],
    plain: Sequence[str] = (),
    *,
    first: str | None = None,
    ignore_merges: bool = False,
    normalizer: normalizers.Normalizer | None = None,
    special_normalized: bool = False,
) -> Tokenizer:
    """`special` and `plain` come after the vocabulary; `first` is put before a prompt."""
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    whole = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokens, merges = trained_across_words()
    tokens += [word for word in UNREACHABLE if ignore_merges and word not in tokens]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges, ignore_merges=ignore_merges))
    backend.pre_tokenizer, backend.decoder = whole, decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_special_tokens([AddedToken(token, special=True, normalized=special_normalized) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    after = processors.ByteLevel(trim_offsets=False)
    backend.post_processor = after if first is None else processors.Sequence([after, beginning(backend, first)])
    return backend


def beginning(backend: Tokenizer, first: str) -> processors.TemplateProcessing:
    token = (first, backend.token_to_id(first))
    return processors.TemplateProcessing(single=f"{first} $A", pair=f"{first} $A {first}:1 $B:1", special_tokens=[token])


def sentencepiece(special: Sequence[str], plain: Sequence[str] = (), *, first: str, unknown: str) -> Tokenizer:
    """As SentencePiece's models are converted: special tokens and bytes first, then every way to make each piece, best first."""
    pieces, _ = trained(pre_tokenizers.Metaspace("▁", prepend_scheme="always"), NUM_TOKENS, limit_alphabet=NUM_CHARACTERS)
    pieces = [piece for piece in pieces if piece not in plain]
    tokens = [*special, *plain, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocab = {token: i for i, token in enumerate(dict.fromkeys([*tokens, "\n", "▁"]))}
    merges = generate_merges(vocab, {token: -i for token, i in vocab.items() if token not in special})
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    backend.post_processor = beginning(backend, first)
    return backend


def phi3() -> None:
    """Tokens that take the white space around them along."""
    special = ["<unk>", "<s>", "</s>", "<|endoftext|>"]
    backend = sentencepiece(special, first="<s>", unknown="<unk>")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([*SENTENCEPIECE_DECODER, decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(
        [AddedToken(f"<|{name}|>", rstrip=True, normalized=False) for name in ("system", "user", "assistant", "end")]
    )
    backend.add_tokens([AddedToken("government", lstrip=True), AddedToken("the", single_word=True, normalized=False)])
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "legacy": False}
    listed = {str(i): {"content": t.content, **_flags(t)} for i, t in backend.get_added_tokens_decoder().items()}
    listed["2"] |= {"rstrip": True}  # otherwise than its tokenizer.json says
    listed[str(backend.get_vocab_size())] = {"content": "<|placeholder1|>", **FLAGS, "rstrip": True, "special": True}  # not in it at all
    published("phi3", "phi3", "LlamaTokenizer", backend, {**named, "added_tokens_decoder": listed}, ends=["<|endoftext|>", "<|end|>"])


def kimi() -> None:
    """No tokenizer.json: ranks in tiktoken.model, names in tokenizer_config.json, and code that is not here."""
    tokens, _ = trained_across_words()
    bytes_of = {character: byte for byte, character in bytes_to_unicode().items()}
    lines = [base64.b64encode(bytes(bytes_of[c] for c in token)).decode() + f" {rank}\n" for rank, token in enumerate(tokens)]
    (FOLDER / "kimi_k2" / "tiktoken.model").write_text("".join(lines))
    special = ["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "[UNK]", "[PAD]"]
    calls = ["tool_calls_section_begin", "tool_calls_section_end", "tool_call_begin", "tool_call_argument_begin", "tool_call_end"]
    ids = {name: len(tokens) + i for i, name in enumerate(special)} | {f"<|{name}|>": len(tokens) + 20 + i for i, name in enumerate(calls)}
    ids |= {"<think>": len(tokens) + 30, "</think>": len(tokens) + 31}
    config = {
        "added_tokens_decoder": {str(i): {"content": name, **FLAGS, "special": name in special} for name, i in ids.items()},
        "additional_special_tokens": special[2:7],
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "tokenizer_class": "TikTokenTokenizer",
    }
    settings(FOLDER / "kimi_k2", "kimi_k25", config, [ids["<|im_end|>"]])


def published(name: str, model_type: str, kind: str, backend: Tokenizer, config: dict, ends: Sequence[str] = ()) -> None:
    """With `ends` by name, what ends a reply is said in generation_config.json."""
    text = json.dumps(json.loads(backend.to_str()), ensure_ascii=False, separators=(",", ":"))
    (FOLDER / name / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    flags = {str(i): {"content": t.content, **_flags(t)} for i, t in backend.get_added_tokens_decoder().items()}
    ids = [backend.token_to_id(end) for end in ends]
    settings(FOLDER / name, model_type, {"added_tokens_decoder": flags, **config, "tokenizer_class": kind}, ids)


def settings(folder: Path, model_type: str, config: dict, ends: list[int]) -> None:
    files = {"tokenizer_config.json": config, "config.json": {"model_type": model_type, "transformers_version": "5.0.0"}}
    if ends:
        files["generation_config.json"] = {"eos_token_id": ends}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _flags(token: AddedToken) -> dict[str, bool]:
    return {name: getattr(token, name) for name in (*FLAGS, "special")}


if __name__ == "__main__":
    main()
