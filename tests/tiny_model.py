"""A made-up Llama of 200 KB with a real tokenizer, written as a checkpoint folder: the engine's tests need no download.

Its weights are scaled so that the best token's logit is well clear of the next (see `test_reference_forward.py`): what differs only
by rounding chooses the same tokens.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD, MLP, VOCAB, CONTEXT = 64, 2, 4, 2, 16, 128, 512, 512
SPECIAL = ("<|end|>", "<|im_start|>", "<|im_end|>")  # the last ids of the vocabulary; the first and last end a reply
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END = VOCAB - len(SPECIAL)  # <|end|>
END_OF_TURN = VOCAB - 1  # <|im_end|>
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "intermediate_size": MLP,
    "vocab_size": VOCAB,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": [END, END_OF_TURN],
}


def write(folder: Path, **config: Any) -> Path:
    """The checkpoint folder; `config` overrides fields of its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    save_file(tensors(CONFIG | config), folder / "model.safetensors")
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    tokenizer().save(str(folder / "tokenizer.json"))
    about = {"eos_token": SPECIAL[0], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def tensors(config: Mapping[str, Any] = CONFIG) -> dict[str, np.ndarray]:
    """Random float32 weights, by Hugging Face's names."""
    random = np.random.default_rng(7)
    q_size, kv_size = config["num_attention_heads"] * HEAD, config["num_key_value_heads"] * HEAD

    def normal(*shape: int, gain: float = 1.0) -> np.ndarray:
        return (gain * random.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": normal(VOCAB, HIDDEN, gain=8.0),
        "lm_head.weight": normal(VOCAB, HIDDEN, gain=4.0),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
    }
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.input_layernorm.weight": 1 + 0.1 * random.standard_normal(HIDDEN).astype(np.float32),
            f"{name}.post_attention_layernorm.weight": 1 + 0.1 * random.standard_normal(HIDDEN).astype(np.float32),
            f"{name}.self_attn.q_proj.weight": normal(q_size, HIDDEN, gain=1.5),
            f"{name}.self_attn.k_proj.weight": normal(kv_size, HIDDEN, gain=1.5),
            f"{name}.self_attn.v_proj.weight": normal(kv_size, HIDDEN),
            f"{name}.self_attn.o_proj.weight": normal(HIDDEN, q_size, gain=3.0),
            f"{name}.mlp.gate_proj.weight": normal(MLP, HIDDEN),
            f"{name}.mlp.up_proj.weight": normal(MLP, HIDDEN),
            f"{name}.mlp.down_proj.weight": normal(HIDDEN, MLP, gain=3.0),
        }
        if config.get("attention_bias"):
            sizes = {"q": q_size, "k": kv_size, "v": kv_size, "o": HIDDEN}
            weights |= {
                f"{name}.self_attn.{one}_proj.bias": 0.3 * normal(1, size)[0] * np.sqrt(np.float32(size)) for one, size in sizes.items()
            }
    return weights


def tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE: the 256 bytes, pairs of letters, and three special tokens: ids 0 to 511."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = "aehilnorstu Ġ".replace(" ", "") + "cdmp"  # Ġ is the space
    pairs = list(itertools.product(letters, letters))[: VOCAB - len(alphabet) - len(SPECIAL)]
    vocab = {token: i for i, token in enumerate([*alphabet, *("".join(pair) for pair in pairs)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    assert backend.get_vocab_size(with_added_tokens=True) == VOCAB
    return backend
