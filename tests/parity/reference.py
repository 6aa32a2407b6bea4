"""The reference implementation: transformers in float32 on the same GGUF file. Needs torch; only `make golden` and `make test-parity` import it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from checkpoints import hub


def load_model() -> PreTrainedModel:
    path = hub.resolve("default")
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def load_tokenizer(as_published: bool = True) -> PreTrainedTokenizerFast:
    """transformers' conversion of the GGUF's tokenizer, cutting words as the model's published tokenizer.json does.

    The conversion (as of transformers 5) knows several values of `tokenizer.ggml.pre` but not `smollm`, which stands for GPT-2's
    rule with every digit on its own, and leaves GPT-2's rule alone: white space before a digit then comes out otherwise than the
    model saw it in training ("\\n\\n1" as two newlines in place of one token). `as_published=False` gives the conversion as it is.
    """
    path = hub.resolve("default")
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if as_published:
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer])
    return tokenizer


@torch.inference_mode()
def all_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> np.ndarray:
    """[T, V] float32: the scores after each token, in one pass."""
    return model(torch.tensor([list(token_ids)]), use_cache=False).logits[0].numpy()


@torch.inference_mode()
def greedy(model: PreTrainedModel, token_ids: Sequence[int], num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """The next tokens by argmax, end-of-sequence or not: ids [N] and the scores [N, V] that each was chosen from, step by step with a cache."""
    inputs, cache, chosen, scores = torch.tensor([list(token_ids)]), None, [], []
    for _ in range(num_tokens):
        output = model(inputs, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        scores.append(output.logits[0, -1].numpy())
        chosen.append(int(scores[-1].argmax()))
        inputs = torch.tensor([[chosen[-1]]])
    return np.array(chosen, np.int32), np.stack(scores)


def load_encoder(folder: Path) -> PreTrainedModel:
    return AutoModel.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def hidden_states(model: PreTrainedModel, token_ids: Sequence[int]) -> np.ndarray:
    """[T, D] float32: an encoder's last, of one text alone, without padding."""
    return model(torch.tensor([list(token_ids)])).last_hidden_state[0].numpy()
