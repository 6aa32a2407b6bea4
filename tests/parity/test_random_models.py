"""Members of the family without weights here: small random ones of the reference implementation, saved and served as folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from jaxinfer import LLM, SamplingParams
from tests.golden.read import MAX_LOGIT_DIFFERENCE
from tests.parity import reference

pytestmark = pytest.mark.parity

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def llama(**changes: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": 49152, **changes}))


MODELS = {
    "separate_head": lambda: llama(tie_word_embeddings=False),
    "tied": lambda: llama(tie_word_embeddings=True),
    "biases": lambda: llama(attention_bias=True, mlp_bias=True),
    "one_kv_head_each": lambda: llama(num_key_value_heads=4),
    "wide_heads": lambda: llama(head_dim=32),
    "llama_3_rope": lambda: llama(rope_parameters={**LLAMA3, "original_max_position_embeddings": 64}),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**{**SIZES, "vocab_size": 49152, "sliding_window": None})),
}


# Of test_families.py's `llama_3_with_biases` all of these are parts.
IN_FAMILIES = {"separate_head", "biases", "one_kv_head_each", "llama_3_rope"}
CASES = [pytest.param(name, marks=pytest.mark.exhaustive if name in IN_FAMILIES else ()) for name in MODELS]


@pytest.mark.parametrize("name", CASES)
def test_a_random_model_gives_the_references_logits_and_tokens(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):  # zero as initialised, which would hide them
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path, max_shard_size="5MB")
    reference.load_tokenizer().save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    llm = LLM(
        str(tmp_path),
        dtype="float32",
        kv_memory="16MiB",
        max_batch_size=1,
        decode_buckets=(1,),
        prefill_chunk_size=128,
        prefill_buckets=(128,),
    )
    ids = np.random.default_rng(1).integers(17, 49152, 200).tolist()
    assert np.abs(llm.logits(ids) - reference.all_logits(model, ids)).max() < MAX_LOGIT_DIFFERENCE
    (output,) = llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
    assert output.outputs[0].token_ids == reference.greedy(model, ids, 16)[0].tolist()
